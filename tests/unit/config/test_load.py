"""Loading: inheritance, groups, overrides, and errors that list everything with the nearest known key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.load import dump_config, load_config, schema_of
from megarl.config.schema import (
    MISSING,
    SCHEMAS,
    AdvantageEstimator,
    CorrectionLevel,
    DType,
    KLWhere,
    OnUpdate,
    PPOConfig,
    RewardFunctionConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.shipped import CONFIGS_DIR, configs_dir
from megarl.config.values import converted, expected, item_section, key_types
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import write_yaml

ROOT = Path(__file__).parents[3]
MINIMAL: dict[str, Any] = {"model": {"path": "models/m"}, "data": {"train_files": ["a.parquet"]}}


@pytest.fixture
def minimal(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", MINIMAL)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    write_yaml(
        tmp_path / "algorithm" / "ppo.yaml",
        {"kl": {"coefficient": 0.05, "where": "loss"}, "entropy_coefficient": 0.2},
    )
    write_yaml(
        tmp_path / "algorithm" / "grpo.yaml", {"advantage": {"estimator": "grpo"}, "kl": {"where": "none"}}
    )
    return tmp_path


def problems_of(path: str, *overrides: str, schema: type = PPOConfig) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as error:
        load_config(schema, path, list(overrides))
    return error.value.problems


def test_defaults_file_and_overrides_in_this_order(minimal: str) -> None:
    overrides = [
        "trainer.seed=3",
        "actor.optim.lr=2e-4",
        "actor.optim.betas=[0.5,0.6]",
        "model.dtype=float32",
        "value_clip=1",
    ]
    config = load_config(PPOConfig, minimal, overrides[:-1])
    assert (config.model.path, config.trainer.seed, config.trainer.total_steps) == ("models/m", 3, 100)
    assert (config.actor.optim.lr, config.actor.optim.betas, config.critic.optim.lr) == (
        2e-4,
        [0.5, 0.6],
        1e-5,
    )
    assert config.model.dtype is DType.float32
    with pytest.raises(FrozenInstanceError):
        config.trainer.seed = 4  # type: ignore[misc]


def test_what_would_stand_in_a_file_can_be_given_as_it_is() -> None:
    given = {**MINIMAL, "algorithm": {"base": "grpo", "entropy_coefficient": 0.5}}
    config = load_config(PPOConfig, given, ["trainer.seed=3"])
    assert (config.model.path, config.algorithm.advantage.estimator, config.trainer.seed) == (
        "models/m",
        AdvantageEstimator.grpo,
        3,
    )
    assert config.algorithm.entropy_coefficient == 0.5
    assert given["algorithm"] == {"base": "grpo", "entropy_coefficient": 0.5}

    with pytest.raises(
        ConfigError,
        match=r"given values.*\n.*trainer.sed: unknown key; did you mean trainer.seed\? \[given values\]",
    ):
        load_config(PPOConfig, {**MINIMAL, "trainer": {"sed": 3}})


def test_auto_is_the_dtype_of_the_device(minimal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def dtype(*overrides: str) -> DType:
        return load_config(PPOConfig, minimal, overrides).model.dtype

    assert (dtype("device=cpu"), dtype("device=cuda")) == (DType.float32, DType.bfloat16)
    assert dtype("device=cpu", "model.dtype=bfloat16") is DType.bfloat16
    monkeypatch.setattr("megarl.config.load.has_gpu", lambda: False)
    assert dtype() is DType.float32
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # a cluster that has not been contacted yet
    assert dtype() is DType.bfloat16
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("megarl.config.load.has_gpu", lambda: True)
    assert dtype() is DType.bfloat16


def test_null_and_lists_of_sections_on_the_command_line(minimal: str) -> None:
    config = load_config(
        PPOConfig,
        minimal,
        [
            "actor.micro_batch.max_tokens=null",
            "reward.functions=[{path: r.py, weight: 2}]",
            "placement.devices_per_node=8",
        ],
    )
    assert config.actor.micro_batch.max_tokens is None
    assert config.reward.functions == [RewardFunctionConfig(path="r.py", weight=2.0)]
    assert config.placement.devices_per_node == 8


@pytest.mark.parametrize(
    ("key", "path", "remedy"),
    [
        ("trainer.output_dir", "~/runs/a", "'${oc.env:HOME}/runs/a'"),
        ("checkpoint.dir", "~ann/checkpoints", "the whole path"),
        ("reference.path", "/data/$MODELS/$NAME", "'/data/${oc.env:MODELS}/${oc.env:NAME}'"),
        ("data.val_files", "[b.parquet,$DATA_1/c.parquet]", "'${oc.env:DATA_1}/c.parquet'"),
        ("reward.functions", "[{path: $HERE/r.py}]", "'${oc.env:HERE}/r.py'"),
    ],
)
def test_what_only_a_shell_expands_is_refused_in_paths(
    minimal: str, key: str, path: str, remedy: str
) -> None:
    (problem,) = problems_of(minimal, f"{key}={path}")
    assert problem.startswith(key)
    assert f"neither ~ nor $NAME is expanded; write {remedy} [" in problem


def test_signs_of_a_shell_within_names_are_parts_of_them(minimal: str) -> None:
    for path in ("runs/a~", "runs/~a", "price$", "a$1"):
        assert load_config(PPOConfig, minimal, [f"trainer.output_dir={path}"]).trainer.output_dir == path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("kind: sft\nmodel: {path: Modèle}\n".encode("latin-1"), "is not text in UTF-8 (invalid"),
        ("kind: sft\n".encode("utf-16-be") + b"\xd8", "is not text in UTF-8 ("),
        (b"model:\n  path: m\n\tdtype: float32\n", "; indent with spaces instead of tabs"),
    ],
)
def test_a_file_that_is_not_yaml_in_utf_8_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "run.yaml").write_bytes(content)
    (problem,) = problems_of(str(tmp_path / "run.yaml"))
    assert said in problem


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    assert problems_of(str(tmp_path)) == ("is a folder; give a YAML file",)


def test_base_is_relative_to_the_file_and_forms_a_chain(tmp_path: Path) -> None:
    write_yaml(
        tmp_path / "bases" / "all.yaml",
        {**MINIMAL, "trainer": {"seed": 1, "total_steps": 1, "prompts_per_step": 1}},
    )
    write_yaml(
        tmp_path / "bases" / "middle.yaml", {"base": "all.yaml", "trainer": {"seed": 2, "total_steps": 2}}
    )
    config = load_config(
        PPOConfig, write_yaml(tmp_path / "run.yaml", {"base": "bases/middle.yaml", "trainer": {"seed": 3}})
    )
    assert (config.trainer.prompts_per_step, config.trainer.total_steps, config.trainer.seed) == (1, 2, 3)


def test_base_in_a_circle_or_absent_is_an_error(tmp_path: Path) -> None:
    first = write_yaml(tmp_path / "a.yaml", {"base": "b.yaml"})
    write_yaml(tmp_path / "b.yaml", {"base": "a.yaml"})
    assert "'base' has a cycle" in problems_of(first)[0]
    assert "there is no file" in problems_of(write_yaml(tmp_path / "c.yaml", {"base": "nowhere.yaml"}))[0]
    assert (
        "must be the path of a file" in problems_of(write_yaml(tmp_path / "d.yaml", {"base": ["a.yaml"]}))[0]
    )


def test_a_group_is_a_file_and_can_be_changed_in_place(groups: Path) -> None:
    config = load_config(
        PPOConfig,
        write_yaml(groups / "run.yaml", MINIMAL | {"algorithm": "ppo"}),
        ["algorithm.kl.coefficient=0.5"],
    )
    assert (config.algorithm.kl.where, config.algorithm.kl.coefficient) == (KLWhere.loss, 0.5)
    changed = write_yaml(
        groups / "run.yaml", MINIMAL | {"algorithm": {"base": "ppo", "kl": {"coefficient": 0.7}}}
    )
    config = load_config(PPOConfig, changed)
    assert (
        config.algorithm.kl.where,
        config.algorithm.kl.coefficient,
        config.algorithm.entropy_coefficient,
    ) == (KLWhere.loss, 0.7, 0.2)
    # The parsed file is kept, and the first reading has not changed it.
    assert load_config(PPOConfig, changed) == config


def test_choosing_a_group_starts_its_section_afresh(groups: Path) -> None:
    path = write_yaml(
        groups / "run.yaml", MINIMAL | {"algorithm": {"base": "ppo", "kl": {"estimator": "k3"}}}
    )
    config = load_config(PPOConfig, path, ["algorithm.kl.coefficient=0.5", "algorithm=grpo"])
    assert config.algorithm.advantage.estimator is AdvantageEstimator.grpo
    assert (config.algorithm.kl.where, config.algorithm.kl.coefficient) == (KLWhere.none, 0.5)
    assert (config.algorithm.kl.estimator.name, config.algorithm.entropy_coefficient) == ("k1", 0.0)


def test_a_group_says_what_it_needs_of_other_sections(groups: Path) -> None:
    values = {
        "base": "grpo.yaml",
        "kl": {"coefficient": 0.3},
        "with": {"rollout": {"max_staleness": 2, "n": 3}},
    }
    write_yaml(groups / "algorithm" / "late.yaml", values)
    path = write_yaml(groups / "run.yaml", MINIMAL | {"algorithm": "late", "rollout": {"n": 5}})
    config = load_config(PPOConfig, path)
    assert (config.rollout.max_staleness, config.rollout.n, config.algorithm.kl.coefficient) == (2, 5, 0.3)
    assert load_config(PPOConfig, path, ["algorithm=late"]).rollout.n == 3  # chosen after the file
    assert load_config(PPOConfig, path, ["algorithm=late", "rollout.n=7"]).rollout.n == 7
    write_yaml(groups / "algorithm" / "late.yaml", {"with": {"algorithm": {}}})
    (problem,) = problems_of(path)
    assert problem == "'with' is {'algorithm': {}}, but must be a mapping of sections other than algorithm"


@pytest.mark.parametrize(
    "text", ["1e3", "12e4567", "2024_06_01", "007", "4.10", "0x10", "0b1", ".5", "1:30", "+3", "-.inf", "7"]
)
def test_a_name_that_yaml_reads_as_a_number_stays_as_it_is_written(
    text: str, groups: Path, tmp_path: Path
) -> None:
    (groups / "algorithm" / "named.yaml").write_text(
        f"base: grpo.yaml\nwith:\n  tracking: {{project: {text}}}\n  data: {{columns: {{prompt: {text}}}}}\n"
    )
    (tmp_path / "base.yaml").write_text(
        f"agent: {{harness: {{command: [sleep, {text}, '{text}']}}}}\nteachers:\n- {{name: a, path: b, data_sources: [{text}]}}\n"
    )
    (tmp_path / "run.yaml").write_text(
        f"base: base.yaml\nalgorithm: named\nmodel: {{path: m}}\ndata:\n  train_files:\n  - {text}\n"
        f"tracking:\n  run_name: {text}  # of the day\nplacement: {{roles: {{actor: {text}}}}}\n"
    )
    overrides = [
        f"trainer.output_dir={text}",
        f"reward.judges=[{{name: {text}, prompt: {tmp_path}/a.jinja}}]",
    ]
    config = load_config(PPOConfig, tmp_path / "run.yaml", overrides)
    assert (config.tracking.project, config.data.columns.prompt) == (text, text)
    assert config.agent.harness.command == ["sleep", text, text]
    assert config.teachers[0].data_sources == [text]
    assert config.data.train_files == [str(tmp_path / text)]
    assert config.tracking.run_name == text
    assert config.placement.roles == {"actor": text}
    assert config.trainer.output_dir == text
    assert config.reward.judges[0].name == text

    # The file of a run says the same, and a later value takes precedence.
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(PPOConfig, tmp_path / "config.yaml") == config
    changed = load_config(
        PPOConfig, tmp_path / "run.yaml", [f"tracking.run_name={text}", "tracking.run_name=5"]
    )
    assert changed.tracking.run_name == "5"


def test_numbers_of_other_keys_are_numbers(minimal: str) -> None:
    overrides = [
        "trainer.seed=1_000",
        "actor.optim.lr=1e-3",
        "rollout.sglang.server_args={schedule_conservativeness: 1e-3}",
    ]
    config = load_config(PPOConfig, minimal, overrides)
    assert (config.trainer.seed, config.actor.optim.lr) == (1000, 1e-3)
    assert config.rollout.sglang.server_args == {"schedule_conservativeness": 1e-3}


@pytest.mark.parametrize("name", ["async_grpo", "async_dapo", "async_ppo"])
def test_asynchronous_presets_are_the_others_with_a_correction_and_an_age(name: str, groups: Path) -> None:
    path = write_yaml(groups / "run.yaml", MINIMAL)
    plain = name.removeprefix("async_")
    config, other = (
        load_config(PPOConfig, CONFIGS_DIR / "quickstart.yaml", [f"algorithm={each}"])
        for each in (name, plain)
    )
    assert replace(config.algorithm, rollout_correction=other.algorithm.rollout_correction) == other.algorithm
    assert config.algorithm.rollout_correction.level is CorrectionLevel.token
    assert (config.rollout.max_staleness, config.rollout.on_update) == (1, OnUpdate.continue_)
    assert (
        load_config(PPOConfig, path, [f"algorithm={name}", "rollout.max_staleness=3"]).rollout.max_staleness
        == 3
    )


def test_an_old_name_of_a_value_is_accepted_with_a_warning(
    groups: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_yaml(groups / "run.yaml", MINIMAL | {"rollout": {"on_update": "go_on"}})
    assert load_config(PPOConfig, path).rollout.on_update is OnUpdate.continue_
    [warning] = caplog.messages
    assert warning.startswith(
        "rollout.on_update: go_on is now called continue; write rollout.on_update=continue ["
    )
    caplog.clear()
    load_config(PPOConfig, path, ["rollout.on_update=go_on"])  # the file's has been said
    assert ["command line" in warning for warning in caplog.messages] == [True]


def test_a_choice_that_is_a_keyword_of_python_is_written_as_it_is_read(groups: Path) -> None:
    path = write_yaml(groups / "run.yaml", MINIMAL)
    config = load_config(PPOConfig, path, ["rollout.on_update=continue"])
    dump_config(config, groups / "dumped.yaml")
    assert "on_update: continue\n" in (groups / "dumped.yaml").read_text()
    assert load_config(PPOConfig, groups / "dumped.yaml") == config
    with pytest.raises(ConfigError, match=r"is 'go', but must be one of continue, drain \["):
        load_config(PPOConfig, path, ["rollout.on_update=go"])


def test_a_group_that_ships_is_found_from_any_folder_and_one_of_ones_own_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_yaml(tmp_path / "elsewhere" / "run.yaml", MINIMAL | {"algorithm": "grpo"})
    assert load_config(PPOConfig, path).algorithm.advantage.estimator is AdvantageEstimator.grpo
    write_yaml(tmp_path / "elsewhere" / "algorithm" / "grpo.yaml", {"entropy_coefficient": 0.3})
    assert load_config(PPOConfig, path).algorithm.entropy_coefficient == 0.3
    (problem,) = problems_of(path, "algorithm=pppo")
    assert problem.startswith(
        "algorithm=pppo: there is no such preset; available: async_dapo, async_grpo, async_ppo, "
    )
    assert problem.endswith(
        f"(searched {tmp_path}/elsewhere/algorithm, configs/algorithm); did you mean ppo? [command line]"
    )


def test_a_file_that_ships_has_one_name_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models and data are in the current folder. An existing file of that name has precedence."""
    monkeypatch.chdir(tmp_path)
    config = load_config(PPOConfig, "configs/quickstart.yaml")
    assert config.model.path == "outputs/quickstart/sft/huggingface"
    assert config.data.val_files == ["outputs/quickstart/data/validation.parquet"]
    assert Path(config.reward.functions[0].path).is_file()
    inheriting = write_yaml(
        tmp_path / "mine" / "run.yaml",
        {"base": "configs/quickstart.yaml", "data": {"val_files": ["held_out.parquet"]}},
    )
    config = load_config(PPOConfig, inheriting)
    assert config.data.train_files == ["outputs/quickstart/data/train.parquet"]
    assert config.data.val_files == [f"{tmp_path}/mine/held_out.parquet"]
    assert problems_of("configs/quickstart.yaml", "trainer.total_step=1", "data={n: 1}")[1].endswith(
        "[command line]"
    )
    write_yaml(tmp_path / "configs" / "quickstart.yaml", MINIMAL | {"trainer": {"seed": 9}})
    assert load_config(PPOConfig, "configs/quickstart.yaml").trainer.seed == 9
    assert "there is no such file" in problems_of("configs/nothing.yaml")[0]


def test_code_that_ships_has_one_name_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing file of that name has precedence.

    It is searched next to the configuration, or for an override in the current folder.
    """
    monkeypatch.chdir(tmp_path)
    name = "megarl/recipes/math/reward.py"
    path = write_yaml(tmp_path / "mine" / "run.yaml", MINIMAL | {"reward": {"functions": [{"path": name}]}})
    shipped = str(ROOT / name)
    assert load_config(PPOConfig, path).reward.functions[0].path == shipped
    overridden = load_config(
        PPOConfig, write_yaml(tmp_path / "run.yaml", MINIMAL), [f"reward.functions=[{{path: {name}}}]"]
    )
    assert overridden.reward.functions[0].path == shipped
    function = {"algorithm": {"policy_loss": {"function": f"{name}:loss"}}}
    with_loss = write_yaml(tmp_path / "mine" / "loss.yaml", MINIMAL | function)
    assert load_config(PPOConfig, with_loss).algorithm.policy_loss.function == f"{shipped}:loss"

    for own in (tmp_path / name, tmp_path / "mine" / name):
        own.parent.mkdir(parents=True)
        own.write_text("")

    assert load_config(PPOConfig, path).reward.functions[0].path == str(tmp_path / "mine" / name)
    overridden = load_config(PPOConfig, tmp_path / "run.yaml", [f"reward.functions=[{{path: {name}}}]"])
    assert overridden.reward.functions[0].path == name


def test_the_configurations_of_a_wheel_come_before_a_folder_beside_it_unless_they_are_only_a_rest(
    tmp_path: Path,
) -> None:
    package = tmp_path / "megarl"
    beside = tmp_path / "configs"
    assert configs_dir(package) == beside

    # A checkout of an earlier version can leave untracked files.
    (package / "configs" / "algorithm").mkdir(parents=True)
    assert configs_dir(package) == beside
    (package / "configs" / "quickstart.yaml").write_text("")
    assert configs_dir(package) == package / "configs"


def test_what_a_file_names_is_relative_to_it_and_what_an_override_names_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bases" / "models" / "m").mkdir(parents=True)
    values = MINIMAL | {
        "reference": {"path": "/models/r"},
        "critic": {"model": {"path": "${model.path}"}},
        "reward": {"functions": [{"path": "rewards/own.py"}], "model": {"path": "../judge"}},
        "trainer": {"output_dir": "runs/1"},
    }
    write_yaml(tmp_path / "bases" / "all.yaml", values)
    run = write_yaml(
        tmp_path / "mine" / "run.yaml", {"base": "../bases/all.yaml", "data": {"val_files": ["v.parquet"]}}
    )
    config = load_config(PPOConfig, "mine/run.yaml", ["data.train_files=[b.parquet]"])
    assert [Path(path) for path in (config.model.path, config.critic.model.path)] == [
        Path("bases/models/m")
    ] * 2
    assert config.reference.path == "/models/r"
    assert (config.reward.functions[0].path, config.reward.model.path) == ("bases/rewards/own.py", "judge")
    assert (config.data.train_files, config.data.val_files) == (["b.parquet"], ["mine/v.parquet"])
    assert config.trainer.output_dir == "runs/1"
    (tmp_path / "runs" / "1").mkdir(parents=True)
    dump_config(config, tmp_path / "runs" / "1" / "config.yaml")
    monkeypatch.chdir(tmp_path / "bases")
    again = load_config(PPOConfig, "../runs/1/config.yaml")
    assert again.data.train_files == [f"{tmp_path}/b.parquet"]
    assert again.data.val_files == [f"{tmp_path}/mine/v.parquet"]
    assert Path(run).is_file()


def test_a_name_of_the_hub_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder of that name next to the configuration has precedence."""
    monkeypatch.chdir(tmp_path)
    run = write_yaml(
        tmp_path / "mine" / "run.yaml",
        {"model": {"path": "maker/model"}, "data": {"train_files": ["data/rows.parquet"]}},
    )
    config = load_config(PPOConfig, run)
    assert (config.model.path, config.data.train_files) == (
        "maker/model",
        [f"{tmp_path}/mine/data/rows.parquet"],
    )
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(PPOConfig, "config.yaml").model.path == "maker/model"
    (tmp_path / "mine" / "maker" / "model").mkdir(parents=True)
    assert load_config(PPOConfig, run).model.path == f"{tmp_path}/mine/maker/model"


def test_every_problem_is_listed_with_its_source(tmp_path: Path) -> None:
    values = {
        "actor": {
            "optm": {},
            "lr": 3,
            "recompute": "sometimes",
            "parallel": {"sequence_parallel": 5, "tensor_parallel_size": "two"},
        },
        "critic": 3,
        "data": {"train_files": {"a": "x"}, "seed": 1.5},
        "reward": {"functions": [{"wight": "x"}]},
        "algorithm": {"kl": {"coefficient": True}, "policy_loss": {"clip_dual": "x"}},
    }
    path = write_yaml(tmp_path / "bad.yaml", values)
    expected = [
        f"actor.optm: unknown key; did you mean actor.optim? [{path}]",
        f"actor.lr: unknown key; use actor.optim.lr [{path}]",
        f"actor.recompute: is 'sometimes', but must be one of none, selective, full [{path}]",
        f"actor.parallel.sequence_parallel: is 5, but must be true or false [{path}]",
        f"actor.parallel.tensor_parallel_size: is 'two', but must be an integer [{path}]",
        "critic: is 3, but must be a section with the keys parallel, optim, micro_batch, recompute, "
        "lora, experts, freeze_vision, recompute_modules, recompute_num_layers, megatron, model "
        f"[{path}]",
        f"data.train_files: is {{'a': 'x'}}, but must be a list, each item a string [{path}]",
        f"data.seed: is 1.5, but must be an integer [{path}]",
        f"reward.functions[0].wight: unknown key; did you mean reward.functions[0].weight? [{path}]",
        f"algorithm.kl.coefficient: is True, but must be a number [{path}]",
        f"algorithm.policy_loss.clip_dual: is 'x', but must be a number or null [{path}]",
        "trainer.total_step: unknown key; did you mean trainer.total_steps? [command line]",
        "device: is 'tpu', but must be one of auto, cpu, cuda [command line]",
        "tracking.loggers: is ['console', 'papyrus'], but must be a list, each item one of console, jsonl, "
        "tensorboard, wandb, mlflow, "
        "swanlab, prometheus, opentelemetry [command line]",
        "model.path: is required; set it in the file or as model.path=...",
        "reward.functions[0].path: is required; set it in the file or as reward.functions[0].path=...",
    ]
    assert sorted(
        problems_of(path, "trainer.total_step=4", "device=tpu", "tracking.loggers=[console,papyrus]")
    ) == sorted(expected)


@pytest.mark.parametrize("kind", ["[ppo]", "{ppo: 1}", "3", "null"])
def test_a_kind_that_is_no_text_is_refused(minimal: str, kind: str) -> None:
    assert schema_of(minimal, [f"kind={kind}"]) is PPOConfig
    (problem,) = problems_of(minimal, f"kind={kind}")
    assert problem.endswith("but must be one of ppo, sft, dpo, reward_model [command line]")


def test_ppo_keys_are_unknown_to_sft(minimal: str) -> None:
    length, rollout = problems_of(minimal, "data.max_prompt_length=3", "rollout.n=4", schema=SFTConfig)
    assert length == "data.max_prompt_length: belongs to kind: ppo; this file has kind: sft [command line]"
    assert rollout == "rollout.n: belongs to kind: ppo; this file has kind: sft [command line]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [1", "is not YAML"),
        ("- 1\n- 2", "must contain a mapping"),
        ("trainer: {seed: 1, seed: 2}", "is not YAML"),
        ("trainer: {seed: !!bool x}", "is not YAML: a value does not fit its tag (KeyError: 'x')"),
        ("trainer: {seed: !!int ''}", "is not YAML: a value does not fit its tag (IndexError: "),
        ("model: {path: !!timestamp x}", "is not YAML: a value does not fit its tag (AttributeError: "),
        ("trainer: {seed: !!int x}", "is not YAML: invalid literal for int()"),
        ("trainer: {seed: 1" + "0" * 5000 + "}", "is not YAML: Exceeds the limit (4300 digits)"),
        ("", "model.path"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    assert any(said in problem for problem in problems_of(str(tmp_path / "x.yaml")))


def test_overrides_that_are_none(minimal: str) -> None:
    assert (
        problems_of(minimal, "fast", "trainer.seed=[1")[0]
        == "'fast' is not an override; write key.sub=value [command line]"
    )
    assert len(problems_of(minimal, "fast", "trainer.seed=[1")) == 2
    for override in ("=3", ".trainer.seed=3", "trainer..seed=3", "trainer.=3", "."):
        (problem,) = problems_of(minimal, override)
        assert problem == f"{override!r} is not an override; write key.sub=value [command line]"
    assert "there is no such file" in problems_of("nowhere.yaml")[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.output_dir=${nothing}", "trainer.output_dir: Interpolation key 'nothing' not found"),
        (
            "trainer.seed=${model.path}",
            "trainer.seed: is 'models/m', but must be an integer [",
        ),
        ("trainer.output_dir=${oc.env:NOBODY_SET_IT}", "Environment variable 'NOBODY_SET_IT' not found"),
        ("trainer.output_dir=${", "'trainer.output_dir=${': "),
        ("trainer.output_dir=\ud800", "surrogates not allowed"),
        ("trainer={null: 3}", "Incompatible key type 'NoneType'"),
        ("trainer.seed=!!bool x", "'trainer.seed=!!bool x': a value does not fit its tag (KeyError: 'x')"),
        ("trainer.seed=!!timestamp x", "a value does not fit its tag (AttributeError: "),
        ("trainer.seed=!!float ''", "a value does not fit its tag (IndexError: "),
        ("trainer.seed=!!int x", "'trainer.seed=!!int x': invalid literal for int()"),
        ("trainer.seed=1" + "0" * 5000, "Exceeds the limit (4300 digits)"),
        (
            "tracking.loggers[0]=jsonl",
            "tracking.loggers: is {'0': 'jsonl'}, but must be a list, each item one of console, jsonl",
        ),
        (
            "reward.functions={path: x}",
            "reward.functions: is {'path': 'x'}, but must be a list of objects with the keys path, weight",
        ),
        ("data.val_files=[{}]", "data.val_files: is [{}], but must be a list, each item a string"),
        ("checkpoint.dir=None", "checkpoint.dir: is the string 'None'; write null"),
        (
            "data.val_files=[a, " + "b" * 256 + "]",
            f"data.val_files: is '{'b' * 40}'..., which contains non-printable characters or is longer",
        ),
        (r'model.path="a\x07b"', r"model.path: is 'a\x07b', which contains non-printable characters"),
    ],
)
def test_what_a_key_cannot_be_is_one_line(minimal: str, override: str, said: str) -> None:
    (problem,) = problems_of(minimal, override)
    assert said in problem
    assert "\n" not in problem
    assert "object_type" not in problem


def test_a_file_that_is_too_deep_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: " + "[" * 5000)
    (problem,) = problems_of(str(file))
    assert problem.startswith("is not YAML: ")


def test_dump_is_read_back_equal(tmp_path: Path, minimal: str) -> None:
    config = load_config(
        PPOConfig,
        minimal,
        ["reward.functions=[{path: /r.py}]", "actor.optim.lr=3e-7", "tracking.run_name=1e3"],
    )
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(PPOConfig, str(tmp_path / "config.yaml")) == config


def test_a_preset_on_the_command_line_replaces_a_nested_section(tmp_path: Path) -> None:
    """It removes the preset that the file chooses and the keys that the file adds to that preset."""
    chosen = {"base": "precise_optimizer", "ddp": {"bucket_size": 7}}
    path = write_yaml(tmp_path / "run.yaml", MINIMAL | {"actor": {"megatron": chosen, "optim": {"lr": 2e-5}}})
    assert load_config(PPOConfig, path).actor.megatron.ddp == {"bucket_size": 7}

    loaded = load_config(PPOConfig, path, ["actor.megatron=bf16_gradients"])
    only = load_config(PPOConfig, MINIMAL, ["actor.megatron=bf16_gradients"])
    assert loaded.actor.megatron == only.actor.megatron
    assert loaded.actor.optim.lr == 2e-5


SAMPLES: list[Any] = [
    *(None, True, False, 0, 5, -1, 1.5, float("inf"), float("nan"), 2**70, [], ["a"], {}, {"a": 1}),
    *("", "a", "5", "1e-5", "true", "null", "None", "???", "${data.seed}", "auto", "bfloat16", "DType.auto"),
    *("device", "grpo", "continue", "continue_", "drain", "${", "\ud800", b"bytes", Path("a/b"), object()),
    *([True], [1], ["5"], [1.5], [None], [{}], ["${data.seed}"], ["${"], ["console"], [["a"]], 3.0),
    *({"a": True}, {"a": "b"}, {"a": {"b": [1]}}, {"a": ["5"]}, {"a": "${"}, {1: 2}, {"a": {1: 2}}),
]


def is_taken_too_freely(hint: Any, value: Any) -> bool:
    """Whether OmegaConf makes a true of something else, a text of true, or takes a list or map as an item."""
    inner = value[0] if isinstance(value, list) and value else value
    inner = next(iter(inner.values())) if isinstance(inner, dict) and inner else inner
    words = expected(hint)
    return "anything" not in words and ("true or false" in words or isinstance(inner, bool | dict | list))


def test_a_value_is_converted_as_by_omegaconf() -> None:
    """Only too free conversions of OmegaConf are refused."""
    sections = [section for schema in SCHEMAS.values() for section in sections_of(schema)]
    hints = {hint for section in sections for hint in key_types(section).values() if not is_dataclass(hint)}
    taken = 0

    for hint in hints:
        if item_section(hint):
            continue
        section = make_dataclass("Section", [("key", hint, MISSING)])
        for value in SAMPLES:
            if value == MISSING:  # judged when all layers are merged
                continue
            try:
                merged = OmegaConf.unsafe_merge(OmegaConf.structured(section), {"key": value})
                kept = OmegaConf.to_container(merged)["key"]
            except (OmegaConfBaseException, TypeError):
                with pytest.raises((OmegaConfBaseException, ValueError)):
                    converted(hint, value)
                continue
            try:
                own = converted(hint, value)
            except ValueError:
                assert is_taken_too_freely(hint, value), (hint, value)
                continue
            assert own == kept or own is kept or (own != own and kept != kept), (hint, value)
            assert type(own) is type(kept), (hint, value)
            taken += 1

    assert taken > 150  # 193: types occur once, however many keys have them


@pytest.mark.parametrize("file", ["quickstart", "quickstart_sft"])
def test_a_run_of_any_kind_is_read_by_its_kind(file: str) -> None:
    path = str(CONFIGS_DIR / f"{file}.yaml")
    assert load_config(RunConfig, path) == load_config(schema_of(path), path)
    with pytest.raises(ConfigError, match="kind: is 'dapo', but that is an algorithm; use kind=ppo"):
        load_config(RunConfig, path, ["kind=dapo"])


@pytest.mark.parametrize("file", ["quickstart", "quickstart_sft", "kimi_k2_1t_grpo", "qwen2.5_7b_ppo_split"])
def test_a_file_with_a_reference_is_one_without(file: str) -> None:
    """Only OmegaConf resolves references. Without one, the loader builds the sections itself."""
    path = str(CONFIGS_DIR / f"{file}.yaml")
    changes = ["actor.optim.lr=1e-5", "trainer.seed=7"]
    schema = schema_of(path)
    own = load_config(schema, path, [*changes, "data.seed=7"])
    resolved = load_config(schema, path, [*changes, "data.seed=${trainer.seed}"])

    assert own == resolved
    assert repr(own) == repr(resolved)  # the types of all numbers


def sections_of(section: Any) -> Iterator[Any]:
    yield section
    for hint in key_types(section).values():
        if is_dataclass(hint):
            yield from sections_of(hint)
