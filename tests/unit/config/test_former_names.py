"""Keys of earlier versions are still read from files, overrides and the configurations of old runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.load import differences, dump_config, load_config
from megarl.config.migration import former_keys, with_current_keys
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.config.values import item_section, key_types, schema_keys
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import ppo_values, write_yaml

JUDGE = {"name": "a", "url": "http://localhost:1/v1", "model": "m", "prompt": "a.jinja"}
# What an earlier version wrote into the folder of a run.
OF_OLD = {
    "agent": {
        "environment": {"path": None, "name": "Environment"},
        "harness": {"function": {"path": None, "name": "run"}},
    },
    "actor": {"lora": {"dropout": 0.0}},
    "critic": {"lora": {"dropout": 0.0}},
    "data": {"max_image_mb": 32},
    "recovery": {"window_steps": 10},
    "rollout": {"restart_window_s": 86400.0, "top_p": 1.0, "top_k": -1, "sglang": {"deterministic": False}},
    "tracking": {"samples_max_gb": 4.0},
}


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return one | {
        name: merged(one[name], value) if isinstance(one.get(name), dict) else value
        for name, value in other.items()
    }


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    return ppo_values(tmp_path)


def test_a_run_of_an_earlier_version_is_read_without_a_word(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", values))
    dump_config(config, tmp_path / "config.yaml")
    dumped = yaml.safe_load((tmp_path / "config.yaml").read_text())
    of_environment = dumped["agent"].pop("environment")  # versions add keys
    saved = merged(dumped, OF_OLD)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))

    assert load_config(PPOConfig, tmp_path / "config.yaml") == config
    added = {f"agent.environment.{key}" for key in of_environment if key != "path"}
    assert {each.key for each in differences(tmp_path / "config.yaml", config)} == added
    assert caplog.messages == []


def test_the_old_run_covers_the_table() -> None:
    current, found = with_current_keys(OF_OLD)
    assert found == []
    of_agent = {"environment": {"path": None}, "harness": {"function": None}}
    assert all(values in ({}, {"lora": {}}, {"sglang": {}}, of_agent) for values in current.values())
    gone = {section for (section, _), former in former_keys().items() if "values" not in former}
    of_lists = {"reward.judges[]", "reward.judges[].parse", "reward.functions[]"}
    assert gone == {
        "actor.lora",
        "critic.lora",
        "agent.harness",
        "rollout.sglang",
        *of_lists,
        *(OF_OLD.keys() - {"actor", "critic"}),
    }


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("data.max_image_mb=64", "data.max_image_mb: is 64, but has no effect any more: a file has at most"),
        ("recovery.window_steps=3", "recovery.window_steps: is 3, but has no effect any more: losses count"),
        ("rollout.restart_window_s=60", "rollout.restart_window_s: is 60, but has no effect any more: "),
        ("tracking.samples_max_gb=9", "tracking.samples_max_gb: is 9, but has no effect any more: the limit"),
    ],
)
def test_a_key_that_became_a_constant_is_a_warning(
    values: dict[str, Any], tmp_path: Path, override: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_yaml(tmp_path / "run.yaml", values)
    assert load_config(PPOConfig, path, [override]) == load_config(PPOConfig, path)
    [said] = caplog.messages
    assert said.startswith(warning)
    assert said.endswith("[command line]")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("actor.lora.dropout=0.1", "actor.lora.dropout: is 0.1: dropout of adapters is not supported"),
        ("critic.lora.dropout=0.1", "critic.lora.dropout: is 0.1: dropout of adapters is not supported"),
        (
            "rollout.top_p=0.9",
            "rollout.top_p: is 0.9: a truncated sampler draws from a different distribution",
        ),
        ("rollout.top_k=50", "rollout.top_k: is 50: a truncated sampler draws from a different distribution"),
    ],
)
def test_a_value_that_training_never_had_is_refused(
    values: dict[str, Any], tmp_path: Path, override: str, problem: str
) -> None:
    path = write_yaml(tmp_path / "run.yaml", values)
    with pytest.raises(ConfigError) as refused:
        load_config(PPOConfig, path, [override])
    [said] = refused.value.problems
    assert said.startswith(problem)


def test_fields_of_a_judges_request_move_there(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judges = [JUDGE | {"seed": None, "max_tokens": 64}, JUDGE | {"temperature": 0.5, "name": "b"}]
    judges[1]["request"] = {"stop": ["."], "temperature": 1.0}
    path = write_yaml(tmp_path / "run.yaml", values | {"reward": {"judges": judges}})
    first, second = load_config(PPOConfig, path).reward.judges
    assert first.request == {"seed": None, "max_tokens": 64}
    assert second.request == {"stop": ["."], "temperature": 1.0}  # today's name decides
    assert [said.partition(" [")[0] for said in caplog.messages] == [
        "reward.judges[1].temperature: is now reward.judges[1].request.temperature; write that",
        "reward.judges[0].seed: is now reward.judges[0].request.seed; write that",
        "reward.judges[0].max_tokens: is now reward.judges[0].request.max_tokens; write that",
    ]


def test_deterministic_kernels_are_an_argument_of_the_engine(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_yaml(tmp_path / "run.yaml", values)
    config = load_config(PPOConfig, path, ["rollout.sglang.deterministic=true"])
    assert config.rollout.sglang.server_args == {"enable_deterministic_inference": True}
    [said] = caplog.messages
    new = "rollout.sglang.server_args.enable_deterministic_inference"
    assert said.startswith(f"rollout.sglang.deterministic: is now {new}; write that")


def test_a_former_default_changes_back_what_a_file_has(values: dict[str, Any], tmp_path: Path) -> None:
    for sglang in ({"deterministic": True}, {"server_args": {"enable_deterministic_inference": True}}):
        path = write_yaml(tmp_path / "run.yaml", merged(values, {"rollout": {"sglang": sglang}}))
        config = load_config(PPOConfig, path, ["rollout.sglang.deterministic=false"])
        assert config.rollout.sglang.server_args == {"enable_deterministic_inference": False}


def test_a_path_and_a_name_become_one(
    values: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judges = [
        JUDGE | {"parse": {"path": "/p.py", "name": "score"}},
        JUDGE | {"parse": {"json": "a", "name": "parse"}},
    ]
    functions = [{"path": "/r.py", "name": "compute_score"}, {"path": "/r.py", "name": "other"}]
    agent = {
        "tools": [
            {"path": "/t.py", "name": "price"},
            {"name": "calculator"},
            {"path": None, "name": "python"},
        ],
        "environment": {"path": "/e.py"},
        "harness": {"function": {"path": "/h.py", "name": "play"}},
    }
    run = values | {"agent": agent, "reward": {"functions": functions, "judges": judges}}
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", run))
    assert config.agent.tools == ["/t.py:price", "calculator", "python"]
    assert (config.agent.environment.path, config.agent.harness.function) == (
        "/e.py:Environment",
        "/h.py:play",
    )
    assert [(each.path, each.file, each.name) for each in config.reward.functions] == [
        ("/r.py", "/r.py", "compute_score"),
        ("/r.py:other", "/r.py", "other"),
    ]
    assert [judge.parse.path for judge in config.reward.judges] == ["/p.py:score", None]
    assert [said.partition(" [")[0] for said in caplog.messages] == [
        "agent.environment: is FILE.py:NAME now; write agent.environment=/e.py:Environment",
        "agent.tools: is FILE.py:NAME now; write agent.tools=[/t.py:price, calculator, python]",
        "agent.harness.function: is FILE.py:NAME now; write agent.harness.function=/h.py:play",
        "reward.functions[1].name: is now part of the path; write reward.functions[1].path=/r.py:other",
        "reward.judges[0].parse.name: is now part of the path; write reward.judges[0].parse.path=/p.py:score",
    ]


@pytest.mark.parametrize(
    ("override", "environment"),
    [
        ("agent.environment.path=other.py", "other.py:Game"),
        ("agent.environment=other.py", "other.py:Environment"),
        ("agent.environment={path: other.py, name: Game}", "other.py:Game"),
        ("agent.environment.path=???", None),
        ("agent.environment=null", None),
        ("agent.environment={path: null}", None),
        ("agent.environment.name=Environment", "/e.py:Environment"),
        ("agent.environment.name=Other", "/e.py:Other"),
    ],
)
def test_an_override_of_a_former_section_keeps_the_half_that_it_does_not_give(
    values: dict[str, Any], tmp_path: Path, override: str, environment: str | None
) -> None:
    path = write_yaml(tmp_path / "run.yaml", values | {"agent": {"environment": "/e.py:Game"}})
    if "???" in override:
        with pytest.raises(ConfigError, match=r"agent.environment.*: is '\?\?\?'"):
            load_config(PPOConfig, path, [override])
    else:
        assert load_config(PPOConfig, path, [override]).agent.environment.path == environment


def test_a_former_name_without_its_path_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", values)
    with pytest.raises(ConfigError) as refused:
        load_config(PPOConfig, path, ["agent.environment.name=Other", "agent.tools=[{path: /t.py}]"])
    assert refused.value.problems == (
        "agent.environment.name: is now part of the path; write agent.environment=FILE.py:Other [command line]",
        "agent.tools: is [{'path': '/t.py'}], but each is FILE.py:NAME now; write agent.tools=[FILE.py:NAME] "
        "[command line]",
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"rollout": None, "reward": {"judges": "a"}, "actor": {"lora": 3}},
        {"reward": {"judges": [None, {"seed": 1, "request": "text"}]}},
        {
            "rollout": {"on_update": ["go_on"]},
            "data": [],
            "agent": {"environment": 3, "tools": [{}, {"a": 1}]},
        },
    ],
)
def test_values_of_a_wrong_type_are_left_to_the_schema(odd: dict[str, Any]) -> None:
    current, _ = with_current_keys(odd)
    if "rollout" in odd:
        assert current == odd
    else:
        assert current["reward"]["judges"] == [None, {"request": "text"}]


def test_other_kinds_of_run_do_not_have_the_keys(tmp_path: Path) -> None:
    run = {"kind": "sft", "model": {"path": "m"}, "data": {"train_files": ["a.parquet"]}}
    path = write_yaml(tmp_path / "run.yaml", run | {"rollout": {"top_p": 1.0}})
    with pytest.raises(ConfigError, match=r"rollout"):
        load_config(SFTConfig, path)


def test_the_table_names_keys_that_are_gone_and_keys_that_exist() -> None:
    known = set(schema_keys(PPOConfig))
    judge = item_section(key_types(key_types(PPOConfig)["reward"])["judges"])
    known |= {f"reward.judges[].{key}" for key in schema_keys(judge)}
    function = item_section(key_types(key_types(PPOConfig)["reward"])["functions"])
    known |= {f"reward.functions[].{key}" for key in schema_keys(function)}
    for (section, name), former in former_keys().items():
        assert section in known or section in ("reward.judges[]", "reward.functions[]")
        assert (f"{section}.{name}" in known) == ("values" in former or "reference" in former)
        # A moved key may be a field of a mapping.
        if "ours" in former:
            assert f"{section}.{former['ours'].partition('.')[0]}" in known
        if "suffix_of" in former:
            assert f"{section}.{former['suffix_of']}" in known
        assert former.keys() & {"note", "ours", "values", "reference", "suffix_of"}
