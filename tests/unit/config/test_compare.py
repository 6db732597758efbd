"""Differences from a checkpoint's configuration, and which of them are allowed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megarl.config.load import ABSENT, FIXED, Difference, differences, dump_config, load_config
from megarl.config.schema import SCHEMAS, CheckpointConfig, PPOConfig, TrainerConfig
from megarl.config.schema.keys import leaves
from tests.unit.config.folders import ppo_values, write_yaml


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    return load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path)))


def test_the_same_configuration_has_no_differences(config: PPOConfig, tmp_path: Path) -> None:
    dump_config(config, tmp_path / "saved.yaml")
    assert differences(tmp_path / "saved.yaml", config) == []
    resumed = replace(config, checkpoint=CheckpointConfig(resume=str(tmp_path)))
    assert differences(tmp_path / "saved.yaml", resumed) == []


def test_differences_have_both_values_and_say_whether_they_may_be(config: PPOConfig, tmp_path: Path) -> None:
    dump_config(config, tmp_path / "saved.yaml")
    trainer = TrainerConfig(**{**vars(config.trainer), "total_steps": 20, "seed": 3})
    found = differences(tmp_path / "saved.yaml", replace(config, trainer=trainer))
    assert found == [Difference("trainer.seed", 0, 3), Difference("trainer.total_steps", 10, 20)]
    assert [change.key in FIXED for change in found] == [True, False]


def test_keys_of_another_version_are_differences_too(config: PPOConfig, tmp_path: Path) -> None:
    dump_config(config, tmp_path / "saved.yaml")
    values = yaml.safe_load((tmp_path / "saved.yaml").read_text())
    del values["rollout"]["restart_limit"]
    values["rollout"]["of_old"] = [1]
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(values))
    assert differences(tmp_path / "saved.yaml", config) == [
        Difference("rollout.of_old", [1], ABSENT),
        Difference("rollout.restart_limit", ABSENT, 3),
    ]


def test_fixed_keys_exist_in_a_schema() -> None:
    known = {leaf.key for schema in SCHEMAS.values() for leaf in leaves(schema())}
    assert set(FIXED) <= known
