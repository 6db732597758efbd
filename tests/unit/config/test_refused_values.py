"""Values that do not fit the schema.

Everything else of the configuration is still checked, and nothing is reported twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import main
from megarl.config.load import read_config
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.config.schema.keys import leaves
from megarl.config.sources import read_layers
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import ppo_values, sft_values, write_yaml

NO_VALUE = "{no: value}"  # fits no key that holds a single value


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    return write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path))


def problems_of(schema: type[PPOConfig] | type[SFTConfig], path: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_for_plan(schema, path, overrides)
    return list(caught.value.problems)


def single_values(schema: type[PPOConfig] | type[SFTConfig]) -> list[str]:
    """Every key of the schema but `kind`, and those whose value is a mapping."""
    return [leaf.key for leaf in leaves(schema()) if leaf.key != "kind" and not isinstance(leaf.value, dict)]


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_a_value_of_the_wrong_type_is_one_problem_whichever_key_has_it(
    schema: type[Any], tmp_path: Path
) -> None:
    """The default takes its place, about which nothing may be said."""
    values = ppo_values(tmp_path) if schema is PPOConfig else sft_values(tmp_path)
    path = write_yaml(tmp_path / "run.yaml", values)
    several = {
        key: found
        for key in single_values(schema)
        if len(found := problems_of(schema, path, f"{key}={NO_VALUE}")) != 1
    }
    assert several == {}


def test_a_wrong_type_hides_no_rule_and_no_placement(ppo: str) -> None:
    found = problems_of(
        PPOConfig,
        ppo,
        "actor.optim.lr=abc",
        "trainer.lr=1",
        "trainer.updates_per_step=5",
        "rollout.n=0",
        "placement.devices_per_node=2",
        "data.train_files=[notes.txt, '*.parquet']",
    )
    said = [
        "actor.optim.lr: is 'abc'",
        "trainer.lr: unknown key",
        "updates_per_step 5",
        "rollout.n: is 0",
        "the roles need",
        "patterns are",
    ]
    missing = [text for text in said if not any(text in problem for problem in found)]
    assert missing == ["updates_per_step 5"], found  # which depends on rollout.n


def test_an_unknown_preset_hides_nothing_else(ppo: str) -> None:
    found = problems_of(
        PPOConfig,
        ppo,
        "algorithm=grpoo",
        "actor.optim.lr=abc",
        "actor.parallel.tensor_parallel_size=3",
        "fast",
        "a=[1",
    )
    said = [
        "algorithm=grpoo: there is no such preset",
        "'abc'",
        "not divide by tensor_parallel_size 3",
        "'fast' is not an override",
        "'a=[1': ",
    ]
    assert [text for text in said if not any(text in problem for problem in found)] == []


def test_a_reference_to_nothing_hides_nothing_else(ppo: str) -> None:
    references = [
        "trainer.output_dir=${nothing}",
        "data.max_prompt_length=${nothing}",
        "data.train_files=['${nothing}']",
    ]
    found = problems_of(PPOConfig, ppo, *references[:2], "trainer.updates_per_step=5", "actor.optim.lr=abc")

    for said in (
        "trainer.output_dir: Interp",
        "data.max_prompt_length: Interp",
        "updates_per_step 5",
        "actor.optim.lr: is 'abc'",
    ):
        assert [said in problem for problem in found].count(True) == 1, found

    assert len(found) == 4
    (only,) = problems_of(PPOConfig, ppo, references[2])
    assert "Interpolation key 'nothing' not found" in only


@pytest.mark.parametrize("schema", [PPOConfig, SFTConfig])
def test_all_missing_keys_are_listed(schema: type[Any], tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "run.yaml", {"kind": "ppo" if schema is PPOConfig else "sft"})
    found = problems_of(
        schema, path, *(["reward.functions=[{}]", "teachers=[{}]"] if schema is PPOConfig else [])
    )
    missing = [problem.partition(":")[0] for problem in found if ": is required" in problem]
    of_lists = {"teachers[0].name", "reward.functions[0].path"} if schema is PPOConfig else set()
    assert set(missing) == {"data.train_files", "model.path"} | of_lists
    assert len(missing) == len(set(missing))


@pytest.mark.parametrize("missing", ["model", "data"])
def test_a_missing_key_hides_nothing_else(missing: str, tmp_path: Path) -> None:
    values = ppo_values(tmp_path)
    del values[missing]
    lengths = ["data.max_prompt_length=16", "data.max_response_length=8"]
    found = problems_of(
        PPOConfig, write_yaml(tmp_path / "run.yaml", values), *lengths, "trainer.updates_per_step=5"
    )
    assert len(found) == 2
    assert ": is required" in found[0]
    assert "updates_per_step 5" in found[1]


def test_refused_keys_cover_their_sections(ppo: str) -> None:
    reading = read_config(PPOConfig, ppo, ["actor.optim=3", "reward.functions=[{weight: abc}]"])
    assert reading.refuses(["actor.optim.lr"])
    assert reading.refuses(["actor"])
    assert reading.refuses(["reward.functions[0].path"])
    assert not reading.refuses(["actor.parallel", "critic.optim.lr", "act"])
    assert read_layers(ppo, ["algorithm=grpoo"])[-1].refused[0][0] == "algorithm"


def test_files_are_examined_beside_a_wrong_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One call of `check` reports the schema, a rule, the data and the reward function."""
    values = ppo_values(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
    assert (
        main(
            [
                "check",
                write_yaml(tmp_path / "run.yaml", values),
                "actor.optim.lr=abc",
                "trainer.updates_per_step=5",
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    for said in ("actor.optim.lr: is 'abc'", "updates_per_step 5", "reward.functions: ", "model.path: "):
        assert said in err


def test_an_algorithm_is_no_kind_of_run(ppo: str) -> None:
    (problem,) = problems_of(PPOConfig, ppo, "kind=dapo")
    assert problem == (
        "kind: is 'dapo', but that is an algorithm; use kind=ppo and algorithm=dapo [command line]"
    )
