"""What a message about memory recommends is allowed, is not set already, and fits."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.dotted import value_at
from megarl.config.schema import RunConfig
from megarl.config.validate import read_architectures, validate
from megarl.doctor.checks import load_for_plan
from megarl.machine.errors import ConfigError
from megarl.plan.placement.memory import budget_problems, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.remedies import memory_remedies, with_values

ROOT = Path(__file__).parents[4]


@cache
def load(run: str, *overrides: str) -> RunConfig:
    return load_for_plan(RunConfig, str(ROOT / f"configs/{run}.yaml"), overrides).config


def remedies(config: RunConfig) -> tuple[str, list[tuple[dict[str, Any], str]]]:
    """Return the sentence, and the changes that it recommends with the memory that each needs."""
    said = memory_remedies(config, read_architectures(config)[0])
    listed = re.findall(r"(?:: |; )((?:[\w.]+=[^ ]+ )+)\(([\d.]+ [KMG]iB)", said)
    return said, [
        (
            {key: yaml.safe_load(text) for key, _, text in (each.partition("=") for each in values.split())},
            size,
        )
        for values, size in listed
    ]


@pytest.mark.parametrize(
    ("run", "overrides", "budget"),
    [
        ("qwen2.5_7b_grpo", ("actor.recompute=none", "actor.micro_batch.max_tokens=32768"), 72),
        ("qwen2.5_7b_grpo", (), 30),
        ("qwen2.5_7b_grpo", (), 20),
        ("qwen2.5_7b_grpo", ("rollout.sglang.server_args.mem_fraction_static=0.12",), 72),
        ("qwen2.5_7b_ppo", (), 25),
        ("qwen2.5_7b_ppo_split", (), 30),
        ("qwen3_30b_a3b_grpo", (), 30),
        ("qwen3_8b_grpo_128k", (), 25),
        ("qwen3_vl_8b_grpo", (), 40),
    ],
)
def test_what_is_recommended_fits(run: str, overrides: tuple[str, ...], budget: float) -> None:
    config = with_values(
        load(run, "placement.over_budget=warn", *overrides), {"placement.device_memory_gb": budget}
    )
    architectures, _ = read_architectures(config)
    assert budget_problems(config, plan_memory(config, plan_placement(config), architectures))

    said, listed = remedies(config)
    assert listed, said
    for values, _ in listed:
        assert all(value_at_or_none(config, key) != value for key, value in values.items()), values
        command = [f"{key}={str(value).lower()}" for key, value in values.items()]
        changed = load(run, *overrides, f"placement.device_memory_gb={budget}", *command)
        assert list(validate(changed)) == []
        memory = plan_memory(changed, plan_placement(changed), architectures)
        assert budget_problems(changed, memory) == [], values


def value_at_or_none(config: RunConfig, key: str) -> object:
    try:
        return value_at(config, key)
    except AttributeError:  # an argument of an engine's server
        return None


def test_more_devices_are_recommended_where_the_same_ones_cannot_hold_the_model() -> None:
    """7.6 billion parameters with 18 bytes each are 17 GiB on each of 8 devices."""
    config = with_values(
        load("qwen2.5_7b_grpo", "placement.over_budget=warn"), {"placement.device_memory_gb": 14.2}
    )
    said, listed = remedies(config)
    assert all("placement.num_nodes" in values for values, _ in listed), said
    assert "devices instead of 8" in said


def test_a_run_that_no_layout_saves_is_told_so() -> None:
    config = with_values(
        load("qwen2.5_7b_grpo", "placement.over_budget=warn"), {"placement.device_memory_gb": 0.5}
    )
    said, listed = remedies(config)
    assert listed == []
    assert said.startswith(
        "no layout, recomputation, micro-batch or placement that was tried fits; the closest, "
    )
    assert "use devices with more memory" in said


def test_the_error_ends_with_what_fits() -> None:
    overrides = ["actor.recompute=none", "actor.micro_batch.max_tokens=32768"]
    with pytest.raises(ConfigError) as error:
        load_for_plan(RunConfig, str(ROOT / "configs/qwen2.5_7b_grpo.yaml"), overrides)
    (problem,) = error.value.problems
    assert "needs 106.55 GiB (actor 106.52, reference 0.03), but has 72; one of these fits: " in problem
    assert "actor.micro_batch.max_tokens=16384 (" in problem
    assert problem.endswith("or start anyway with placement.over_budget=warn")
