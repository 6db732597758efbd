"""Generate the table of the shipped runs for clusters, in `docs/launch.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.cli.tables.placement import fullest_devices
from megarl.config.schema import Device, PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters, num_parameters
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import assumed_profile
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts


def shipped_runs() -> str:
    """Return a row for each file of `configs` that needs GPUs, from the smallest model to the largest."""
    configs = {file: load_for_plan(PPOConfig, str(file)).config for file in _files()}
    by_size = sorted(configs.items(), key=lambda item: (num_parameters(_actor(item[1])), item[0].stem))
    head = "| file | billion parameters | nodes x 8 | GPU | placement | GiB of the budget | predicted step |"
    return "\n".join(
        [head, "|---|---|---|---|---|---|---|", *(_row(file, config) for file, config in by_size)]
    )


def _files() -> Iterator[Path]:
    """Yield the files of runs on GPUs. Those of the quickstart have tiny models, on a CPU."""
    for file in sorted(CONFIGS_DIR.glob("*.yaml")):
        if not file.stem.startswith("quickstart"):
            yield file


def _actor(config: PPOConfig) -> Architecture:
    return read_architectures(config)[0]["actor"]


def _row(file: Path, config: PPOConfig) -> str:
    assert config.device is Device.cuda, file
    plan = plan_placement(config)
    architectures, _ = read_architectures(config)
    memory = fullest_devices(plan_memory(config, plan, architectures))
    budget_gb = config.placement.device_memory_gb
    device = assumed_profile(config)
    step = PredictedCosts(device, expected_lengths(config)).predict_step(config, plan, architectures)
    total, active = (count(_actor(config)) / 1e9 for count in (num_parameters, num_active_parameters))
    used = ", ".join(f"{pool} {fullest.peak / 2**30:.1f}" for pool, fullest in memory.items())
    cells = (
        f"`{file.name}`",
        f"{total:,.1f}" if total == active else f"{total:,.1f}, {active:,.1f} active",
        str(config.placement.num_nodes),
        device.name,
        config.placement.strategy.value,
        f"{used} of {budget_gb:g}",
        f"{step.seconds:,.0f} s",
    )
    return f"| {' | '.join(cells)} |"
