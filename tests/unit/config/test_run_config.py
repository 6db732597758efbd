"""The kinds of run: each has the sections that all have, and answers the same questions about itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from megarl.config.kinds import RolloutEngineKind
from megarl.config.load import load_config
from megarl.config.schema import (
    SCHEMAS,
    DPOConfig,
    PPOConfig,
    PreferenceConfig,
    RewardModelRunConfig,
    RunConfig,
    RunKind,
    SFTConfig,
)
from megarl.config.schema.keys import PathKind, leaves
from megarl.config.validate import RULES
from tests.unit.config.folders import pair_values, ppo_values, sft_values


def test_every_kind_has_a_schema_and_rules() -> None:
    assert set(SCHEMAS) == set(RunKind)
    own = [each.kind for each in RULES if each.kind is not RunConfig]
    assert all(any(issubclass(schema, kind) for kind in own) for schema in SCHEMAS.values())
    assert {kind: schema().kind for kind, schema in SCHEMAS.items()} == {kind: kind for kind in RunKind}


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_what_all_kinds_share_is_a_key_of_each(schema: type[RunConfig]) -> None:
    shared = {name for name, hint in RunConfig.__annotations__.items() if not hint.startswith("ClassVar")}
    assert {"model", "data", "actor", "trainer", "checkpoint"} < shared
    assert shared <= {entry.name for entry in fields(schema)}  # type: ignore[arg-type]


def code_of(run: RunConfig) -> list[tuple[str, Any]]:
    """Return the key and the path of each of the user's Python files."""
    return [
        (leaf.key, leaf.value)
        for leaf in leaves(run)
        if leaf.path in (PathKind.code, PathKind.function) and leaf.value
    ]


def test_what_a_reinforcement_learning_run_says_of_itself(tmp_path: Path) -> None:
    run = load_config(PPOConfig, ppo_values(tmp_path), ["agent.tools=[tool.py:t, calculator]"])
    assert (run.prompts_per_step, run.samples_per_prompt, run.samples_per_step) == (12, 4, 48)
    assert (run.updates_per_pass, run.passes_per_step) == (3, 2)
    assert (run.longest_prompt, run.longest_response, run.max_row_tokens, run.data.longest_row) == (
        16,
        8,
        24,
        16,
    )
    assert run.rollout_engine is RolloutEngineKind.hf
    assert list(run.trained_models) == ["actor", "critic"]
    assert code_of(run) == [
        ("reward.functions[0].path", str(tmp_path / "reward.py")),
        ("agent.tools", ["tool.py:t", "calculator"]),
    ]


def test_what_a_supervised_run_says_of_itself(tmp_path: Path) -> None:
    run = load_config(SFTConfig, sft_values(tmp_path))
    assert (run.prompts_per_step, run.samples_per_prompt, run.samples_per_step) == (8, 1, 8)
    assert (run.updates_per_pass, run.passes_per_step) == (1, 1)
    assert (run.max_row_tokens, run.data.longest_row) == (32, 32)
    assert (run.temperature, run.rollout_engine, code_of(run)) == (1.0, None, [])
    assert list(run.trained_models) == ["actor"]


@pytest.mark.parametrize("schema", [DPOConfig, RewardModelRunConfig])
def test_what_a_run_on_pairs_says_of_itself(schema: type[PreferenceConfig], tmp_path: Path) -> None:
    run = load_config(schema, pair_values(tmp_path))
    assert (run.prompts_per_step, run.samples_per_prompt, run.samples_per_step) == (3, 2, 6)
    assert (run.updates_per_pass, run.passes_per_step) == (1, 1)
    assert (run.rows_together, run.max_row_tokens, run.data.longest_row) == (2, 32, 32)
    assert (run.temperature, run.rollout_engine, code_of(run)) == (1.0, None, [])
    assert list(run.trained_models) == ["actor"]


@pytest.mark.parametrize("schema", SCHEMAS.values())
def test_the_keys_that_a_run_names_are_keys(schema: type[RunConfig], tmp_path: Path) -> None:
    run = schema()
    for key in (run.batch_key, *run.length_keys, *run.trained_models):
        section: object = run
        for name in key.split("."):
            assert hasattr(section, name), key
            section = getattr(section, name)


def test_other_sections_make_another_run_of_the_same_kind() -> None:
    run = SFTConfig()
    changed = run.with_sections(engine=PPOConfig().engine, trainer=run.trainer)
    assert isinstance(changed, SFTConfig)
    assert changed == run
