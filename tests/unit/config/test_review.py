"""The review of values: references (`${...}`) and missing ones (`???`), in every kind of value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config.load import dump_config, load_config
from megarl.config.schema import PPOConfig
from megarl.config.sources import HOW_TO_REFER
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import write_yaml

RUN: dict[str, Any] = {
    "model": {"path": "models/m"},
    "data": {"train_files": ["a.parquet"]},
    "reward": {"functions": [{"path": "r.py"}]},
}
# Keys of every kind of value, with `{}` in the place of a text, and the key that a message names.
PLACES = {
    "trainer.seed={}": "trainer.seed",
    "actor.optim.lr={}": "actor.optim.lr",
    "trainer.output_dir={}": "trainer.output_dir",
    "model.dtype={}": "model.dtype",
    "agent.harness.sandbox.provider={}": "agent.harness.sandbox.provider",
    "data.val_files=[a.parquet,'{}']": "data.val_files[1]",
    "actor.optim.betas=['{}',0.5]": "actor.optim.betas[0]",
    "tracking.loggers=[jsonl,'{}']": "tracking.loggers[1]",
    "profile.steps=['{}']": "profile.steps[0]",
    "reward.functions=['{}']": "reward.functions[0]",
    "reward.functions=[{{path: r.py}},'{}']": "reward.functions[1]",
    "reward.functions=[{{path: r.py, weight: '{}'}}]": "reward.functions[0].weight",
    "reward.functions={}": "reward.functions",
    "reward.judges=[{{name: j, prompt: p, request: {{a: [1, '{}']}}}}]": "reward.judges[0].request.a[1]",
    "teachers=[{{name: t, parallel: {{tensor_parallel_size: '{}'}}}}]": (
        "teachers[0].parallel.tensor_parallel_size"
    ),
    "placement.pools={{a: ['{}']}}": "placement.pools.a[0]",
    "placement.roles={{a: '{}'}}": "placement.roles.a",
    "rollout.sglang.server_args={{a: {{b: ['{}']}}}}": "rollout.sglang.server_args.a.b[0]",
}
BROKEN = {
    "${nothing}": "Interpolation key 'nothing' not found",
    "x${no.where}y": "Interpolation key 'no.where' not found",
    "${oc.env:NOBODY_SET_IT}": "Environment variable 'NOBODY_SET_IT' not found",
    "${foo:1}": "Unsupported interpolation type foo",
    "${oc.env:}": "",
}


def problems_of(*overrides: str, source: Any = RUN) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, source, list(overrides))
    return list(error.value.problems)


@pytest.mark.parametrize("place", PLACES)
def test_a_missing_value_is_one_error(place: str) -> None:
    (problem,) = problems_of(place.format("???"))
    assert problem.startswith(f"{PLACES[place]}: is '???', which stands for a value that is still missing; ")
    assert " must be " in problem


def test_a_missing_value_in_a_file_may_come_from_a_later_layer(tmp_path: Path) -> None:
    template = RUN | {"trainer": {"seed": "???"}, "tracking": {"loggers": ["???"]}}
    base = write_yaml(tmp_path / "base.yaml", template)
    assert {problem.partition(": is")[0] for problem in problems_of(source=base)} == {
        "trainer.seed",
        "tracking.loggers[0]",
    }
    run = write_yaml(tmp_path / "run.yaml", {"base": "base.yaml", "trainer": {"seed": 3}})
    assert load_config(PPOConfig, run, ["tracking.loggers=[jsonl]"]).trainer.seed == 3


def test_a_missing_entry_of_a_map_keeps_the_entries_of_earlier_layers(tmp_path: Path) -> None:
    """The entries of a map are merged, inside a nested map too, while one of them is still missing."""
    sections = ({"a": {"kept": 1}}, {"x": [1]}), ({"a": {"given": "???"}}, {"y": "???"})
    first, second = (
        {"rollout": {"sglang": {"server_args": arguments}}, "placement": {"pools": pools}}
        for arguments, pools in sections
    )
    write_yaml(tmp_path / "base.yaml", RUN | first)
    run = write_yaml(tmp_path / "run.yaml", {"base": "base.yaml"} | second)
    given = ["rollout.sglang.server_args.a.given=2", "placement.pools.y=[2]"]
    config = load_config(PPOConfig, run, given)
    assert config.rollout.sglang.server_args == {"a": {"kept": 1, "given": 2}}
    assert config.placement.pools == {"x": [1], "y": [2]}


@pytest.mark.parametrize("given", [["4"], [4]])
def test_entries_of_a_map_are_converted_once_none_is_missing(tmp_path: Path, given: list[Any]) -> None:
    run = write_yaml(tmp_path / "run.yaml", RUN | {"placement": {"pools": {"x": given, "y": "???"}}})
    config = load_config(PPOConfig, run, ["placement.pools.y=[2]"])
    assert config.placement.pools == {"x": [4], "y": [2]}


@pytest.mark.parametrize("given", [4, ["four"], "4", [None]])
def test_an_entry_that_does_not_fit_is_refused_once_none_is_missing(tmp_path: Path, given: Any) -> None:
    run = write_yaml(tmp_path / "run.yaml", RUN | {"placement": {"pools": {"x": given, "y": "???"}}})
    with pytest.raises(ConfigError, match=r"placement\.pools: is \{.*\}, but must be a map"):
        load_config(PPOConfig, run, ["placement.pools.y=[2]"])


@pytest.mark.parametrize("key", ["model.path", "data.train_files"])
def test_a_required_key_that_is_missing_is_reported_as_one(key: str) -> None:
    assert problems_of(f"{key}=???") == [f"{key}: is required; set it in the file or as {key}=..."]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("place", PLACES)
def test_a_reference_that_stands_for_nothing_is_one_error(place: str, text: str) -> None:
    problems = problems_of(place.format(text))
    assert len(problems) == 1
    assert problems[0].startswith(f"{PLACES[place]}: {BROKEN[text]}")
    assert problems[0].endswith(f" in {text!r}; {HOW_TO_REFER}")


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.path=${model.path}"],
        ["model.path=${reference.path}", "reference.path=${model.path}"],
        ["data.val_files=['${data.val_files[0]}']"],
        ["data.train_files=${data.val_files}", "data.val_files=${data.train_files}"],
    ],
)
def test_a_circle_is_an_error_at_each_of_its_keys(overrides: list[str]) -> None:
    problems = problems_of(*overrides)
    assert len(problems) == len(overrides)
    assert all("Recursive interpolation detected" in problem for problem in problems)


def test_what_a_reference_stands_for_has_the_type_of_the_key() -> None:
    values = {
        "trainer.seed": ("${data.seed}", 0),
        "actor.optim.lr": ("${critic.optim.lr}", 1e-5),
        "actor.optim.betas": ("${critic.optim.betas}", [0.9, 0.95]),
        "data.val_files": ("['${data.train_files[0]}']", ["a.parquet"]),
        "reference.path": ("${model.path}/${data.seed}", "models/m/0"),
    }
    config = load_config(PPOConfig, RUN, [f"{key}={text}" for key, (text, _) in values.items()])
    for key, (_, value) in values.items():
        section: Any = config
        for name in key.split("."):
            section = getattr(section, name)
        assert section == value
        assert type(section) is type(value)

    (problem,) = problems_of("trainer.seed=${model.path}")
    assert problem.startswith("trainer.seed: is 'models/m', but must be an integer [")
    (problem,) = problems_of("reward.functions=['${trainer.seed}']")
    assert problem.startswith("reward.functions: is [0], but must be a list of objects with the keys path,")


def test_what_a_reference_stands_for_is_read_like_what_is_written() -> None:
    """Sections in a list have their keys checked, and a file its variables, also behind a reference."""
    given = "rollout.sglang.server_args={a: [{path: r.py, wieght: 2}], b: '~/m', c: 3}"
    assert problems_of(given, "reward.functions=${rollout.sglang.server_args.a}") == [
        "reward.functions[0].wieght: unknown key; did you mean reward.functions[0].weight? "
        "[given values, with its references]"
    ]
    (problem,) = problems_of(given, "model.path=${rollout.sglang.server_args.b}")
    assert problem.startswith("model.path: is '~/m', but neither ~ nor $NAME is expanded")
    (problem,) = problems_of(given, "data.train_files=${rollout.sglang.server_args.c}")
    assert problem.startswith("data.train_files: is 3, but must be a list, each item a string [")


def test_a_missing_value_in_a_list_of_sections_names_its_key() -> None:
    (problem,) = problems_of("reward.functions=[{path: r.py, weight: '???'}, {path: q.py}]")
    assert problem == (
        "reward.functions[0].weight: is '???', which stands for a value that is still missing; "
        "reward.functions[0].weight must be a number, or be left out"
    )


@pytest.mark.parametrize("value", ["['a','???']", "'???'", "[{a: '???'}]", "{a: {b: '???'}}"])
def test_a_missing_value_of_another_type_does_not_hide_a_reference_to_nothing(value: str) -> None:
    unresolved, missing = sorted(problems_of("data.val_files=${nothing}", f"placement.pools={value}"))
    assert unresolved.startswith("data.val_files: Interpolation key 'nothing' not found")
    assert missing.startswith("placement.pools")
    assert "is '???', which stands for a value that is still missing" in missing


def test_a_missing_value_of_the_environment_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKED", "???")
    assert len(problems_of("trainer.output_dir=${oc.env:MARKED}")) == 1


def test_half_a_reference_is_named_with_its_key(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {output_dir: '${oc.env:'}\n")
    (problem,) = problems_of(source=str(file))
    assert problem.startswith("trainer.output_dir: ")
    assert HOW_TO_REFER in problem
    assert problems_of("data.val_files=['${a']")[0].startswith("\"data.val_files=['${a']\": no viable")


@pytest.mark.parametrize("text", ["${x}", "a${x}b", r"\${x}", "$", "${oc.env:HOME}"])
def test_an_escaped_reference_is_read_back_from_the_folder_of_the_run(text: str, tmp_path: Path) -> None:
    written = text.replace("${", r"\${") if not text.startswith("\\") else r"\\\${x}"
    config = load_config(PPOConfig, RUN, [f"tracking.run_name='{written}'"])
    assert config.tracking.run_name == text
    dump_config(config, tmp_path / "config.yaml")
    assert load_config(PPOConfig, tmp_path / "config.yaml").tracking.run_name == text


@pytest.mark.parametrize(
    "override", ["reward.functions=['???']", "tracking.loggers=['???']", "profile.steps=['???']"]
)
def test_the_command_ends_with_a_user_error(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--fast", "configs/quickstart.yaml", override]) == 2
    error = capsys.readouterr().err
    assert "1 problem\n" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "key",
    [
        *("data.max_response_length", "actor.optim.lr", "model.dtype", "profile.steps", "placement.pools"),
        *("actor.lora.targets", "data.val_files", "agent.harness.command", "placement.roles"),
    ],
)
def test_an_escaped_reference_is_no_number_and_no_list(key: str) -> None:
    (problem,) = problems_of(rf"{key}=\${{x}}")
    assert problem.startswith(f"{key}: is '${{x}}', but must be ")


def test_an_escaped_reference_may_be_in_a_list_of_strings() -> None:
    config = load_config(PPOConfig, RUN, [r"actor.lora.targets=[q_proj, '\${x}']"])
    assert config.actor.lora.targets == ["q_proj", "${x}"]
