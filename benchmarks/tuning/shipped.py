"""Compare each shipped run with the fastest configuration that `megarl tune` finds for the same devices.

    python -m benchmarks.tuning.shipped [--configs qwen3_32b_grpo ...]

The device is the smallest of H100, H200 and B300 that has the run's memory budget. Lengths are those that `megarl check --plan` assumes, and
`rollout.max_staleness` stays as it is.
`memory` is the peak of the fullest device by the plan.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import NamedTuple

from megarl.config.load import load_config, schema_of
from megarl.config.schema import Device, PPOConfig
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.search.search import search
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import Space, pinned_keys
from megarl.plan.step_time.device import DeviceProfile, load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts

DEVICES = ("h100_80gb", "h200", "b300")
PINNED = ("rollout.max_staleness",)


class Shown(NamedTuple):
    """A configuration in the table: its predicted step in seconds, its memory in GiB, and its layout."""

    seconds: float
    memory_gb: float
    layout: str


def shipped_runs() -> list[str]:
    """Return the names of the shipped RL runs on GPUs."""
    files = [file for file in sorted(CONFIGS_DIR.glob("*.yaml")) if schema_of(str(file)) is PPOConfig]
    return [file.stem for file in files if load_config(PPOConfig, file).device is not Device.cpu]


def read_run(name: str) -> PPOConfig:
    path = CONFIGS_DIR / f"{name}.yaml"
    return with_published_models(load_config(PPOConfig, path), str(path))[0]


def device_of(config: PPOConfig) -> DeviceProfile:
    """Return the smallest device with the memory budget of a run, or the largest of all."""
    budget_gb = config.placement.device_memory_gb
    assert budget_gb is not None, "every shipped run has a budget"
    devices = [load_device(name) for name in DEVICES]
    return next((device for device in devices if budget_gb <= device.memory_gb), devices[-1])


def as_shipped(config: PPOConfig, device: DeviceProfile) -> Shown:
    plan = plan_placement(config)
    architectures = read_architectures(config)[0]
    costs = PredictedCosts(device, expected_lengths(config))
    step = costs.predict_step(config, plan, architectures)
    peak = max(each.peak for each in plan_memory(config, plan, architectures))
    return Shown(step.seconds, peak / 2**30, layout_of(config))


def tuned(config: PPOConfig, device: DeviceProfile) -> Shown:
    plan = plan_placement(config)
    space = Space(
        config=config,
        pinned=pinned_keys(config, PINNED, ()),
        num_nodes=plan.num_nodes,
        devices_per_node=plan.devices_per_node,
        max_staleness=config.rollout.max_staleness,
    )
    best: Solution = search(space, PredictedCosts(device, expected_lengths(config)))[0][0]
    peak = max(each.peak for each in best.memory)
    return Shown(best.seconds, peak / 2**30, layout_of(best.config))


def layout_of(config: PPOConfig) -> str:
    parallel = config.actor.parallel
    sizes = {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    actor = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    rollout = config.rollout
    return (
        f"{config.placement.strategy.value}; {actor}, {config.actor.recompute.value}; "
        f"{rollout.num_replicas} x TP{rollout.tensor_parallel_size}"
    )


def main() -> int:
    """Print one row for each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", nargs="+", default=shipped_runs(), metavar="NAME")
    print(
        "| run | devices | of | shipped s | tuned s | speedup | shipped GiB | tuned GiB | shipped | tuned | search s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in parser.parse_args().configs:
        config = read_run(name)
        device = device_of(config)
        before = as_shipped(config, device)
        began_s = time.process_time()
        after = tuned(config, device)
        search_s = time.process_time() - began_s
        print(
            f"| {name} | {plan_placement(config).num_devices} | {device.name} | {before.seconds:.4g} | {after.seconds:.4g} | "
            f"{before.seconds / after.seconds:.2f} | {before.memory_gb:.1f} | {after.memory_gb:.1f} | "
            f"{before.layout} | {after.layout} | {search_s:.0f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
