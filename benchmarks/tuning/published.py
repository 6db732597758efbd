"""Predict published step times, with constants that were fitted to the other models only.

    python -m benchmarks.tuning.published            # fit, and predict the rows that constants are fitted to
    python -m benchmarks.tuning.published --write    # also write all rows to docs/static/published_steps.csv

Rows that nothing is fitted to are predicted with the constants of all fitted ones, or for another device with those of
its file. --write also keeps the constants, with which a test predicts the rows again.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.history.rows import at_most, record
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.plan.placement.memory import engine_weights, pushed_bytes
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import DeviceProfile, Efficiency, PhaseTime, load_device
from megarl.plan.step_time.generation import generation_time
from megarl.plan.step_time.lengths import Lengths, assumed_lengths
from megarl.plan.step_time.measured_run import fit_device
from megarl.plan.step_time.role_time import PassWork, role_work, times_of
from megarl.plan.step_time.step import GENERATION, PUSH, PredictedStep, combine, moved_items, offload_times

ROWS_FILE = Path(__file__).parent / "published_steps.json"
CONSTANTS_FILE = Path(__file__).parent / "published_constants.json"
TABLE_FILE = Path(__file__).parents[2] / "docs" / "static" / "published_steps.csv"
FITTED_DEVICE = "h100_80gb"
ALL = "all"  # the constants that are fitted to all models
MISS = 1.25  # a prediction that is further off needs a note
_FOLDERS = {
    "Llama-3.1-8B": "Llama-3.1-8B-Instruct",
    "Qwen3-32B": "Qwen3-32B",
    "Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "Qwen3-235B-A22B": "Qwen3-235B-A22B",
    "DeepSeek-V3": "DeepSeek-V3.1-BF16",
}
# Runs that recompute all layers, and the micro-batches of scoring in rows of maximum length, by staleness, from
# the recipes of the same releases.
_RECOMPUTED = ("Llama-3.1-8B", "Qwen3-235B-A22B", "DeepSeek-V3")
_SCORED_ROWS = {
    ("Llama-3.1-8B", 0): 2,
    ("Qwen3-32B", 0): 4,
    ("Qwen3-30B-A3B", 0): 4,
    ("Qwen3-30B-A3B", 1): 4,
    ("DeepSeek-V3", 1): 2,
}
# These runs move parameters and optimizer state by Tensor.to("cpu"), which copies to pageable memory. Bytes per
# second of such copies from all devices of a node at once, in 10**9.
_PAGEABLE_GB_S = 6.0
MEDIAN_ERROR = 0.25
WORST_FACTOR = 1.7
_TRAINING = ("old_log_prob", "ref", "update_actor")
# Shares that kernels and rings reach alone, from FlashAttention-3 (arXiv:2407.08608) and NCCL's documentation.
_PRIOR = Efficiency(gemm=0.7, attention=0.5, memory=0.8, links=0.8, training_layer_us=500, decode_layer_us=20)
# The constants that are fitted.
FITTED = (
    "efficiency.gemm",
    "efficiency.memory",
    "efficiency.links",
    "efficiency.decode_layer_us",
    "sample_ms",
)


class PublishedRun(NamedTuple):
    """A published run.

    Attributes:
        model: The name of the model.
        staleness: The steps by which generation is ahead.
        measured_s: The published step time.
        config: The run as a configuration of megarl.
        plan: Its placement.
        policy: The model.
        work: What the ranks of each role do.
        lengths: The lengths of prompts and responses.
    """

    model: str
    staleness: int
    measured_s: float
    config: PPOConfig
    plan: PlacementPlan
    policy: Architecture
    work: tuple[Mapping[str, PassWork], ...]
    lengths: Lengths


def read_runs(part: str = "rows") -> list[PublishedRun]:
    """Return the runs that constants are fitted to, or the `others`."""
    return [_run(row) for row in json.loads(ROWS_FILE.read_text(encoding="utf-8"))[part]]


def _run(row: Mapping[str, Any]) -> PublishedRun:
    name = row["model"]
    layout = row["train"]
    pipeline = layout.get("pp", 1)
    replica = layout.get("tp", 1) * layout.get("cp", 1) * pipeline
    # Runs that generate ahead split the devices, in half unless the recipe specifies another split.
    engines = row.get("gen_gpus", row["gpus"] // 2) if row["staleness"] else row["gpus"]
    trainers = row["gpus"] - engines if row["staleness"] else row["gpus"]
    device = load_device(row.get("device", FITTED_DEVICE))
    longest = row["max_length"]
    tokens = row["tokens_per_s_per_gpu"] * row["step_s"] * row["gpus"] / row["samples"]
    prompt = max(50, round(tokens - row["mean_response"]))
    contents = {
        "kind": "ppo",
        "algorithm": "grpo",
        "model": {
            "path": str(CONFIGS_DIR / "models" / _FOLDERS[name]),
            "dtype": "bfloat16",
            "trust_remote_code": True,
        },
        "data": {
            "train_files": ["train.parquet"],
            "max_prompt_length": 512,
            "max_response_length": longest,
        },
        "actor": {
            "parallel": {
                "tensor_parallel_size": layout.get("tp", 1),
                "context_parallel_size": layout.get("cp", 1),
                "pipeline_parallel_size": pipeline,
                "pipeline_layout": layout.get("stages"),
                "expert_parallel_size": layout.get("ep", 1),
                "data_parallel_size": trainers // replica,
                "sequence_parallel": layout.get("tp", 1) > 1,
            },
            "micro_batch": {"max_tokens": longest // layout.get("cp", 1)},
            "recompute": "full" if name in _RECOMPUTED else "none",
        },
        "reference": {"micro_batch": {"max_tokens": longest * _SCORED_ROWS.get((name, row["staleness"]), 1)}},
        "rollout": {
            "engine": "sglang",
            "num_replicas": engines // row["gen_tp"],
            "tensor_parallel_size": row["gen_tp"],
            "n": 32,
            "max_concurrency": 1024,
            "max_staleness": row["staleness"],
        },
        "reward": {"functions": [{"path": "reward.py"}]},
        "placement": {
            "strategy": "split_collocate" if row["staleness"] else "hybrid",
            "num_nodes": row["gpus"] // device.devices_per_node,
            "devices_per_node": device.devices_per_node,
            "device_memory_gb": round(0.95 * device.memory_gb),
        },
        "engine": {"share_prompts": False},
        "trainer": {
            "prompts_per_step": row["samples"] // 32,
            "updates_per_step": row["samples"] // row["train_batch"],
            "total_steps": 1,
            "output_dir": "outputs",
        },
        "device": "cuda",
    }
    config = load_config(PPOConfig, contents)
    policy = read_architectures(config)[0]["actor"]
    lengths = assumed_lengths(prompt, row["mean_response"], longest)
    return PublishedRun(
        name,
        row["staleness"],
        row["step_s"],
        config,
        plan_placement(config),
        policy,
        tuple(_scored_twice(role_work(config, role, policy, lengths)) for role in model_roles(config)),
        lengths,
    )


def _scored_twice(phases: Mapping[str, PassWork]) -> dict[str, PassWork]:
    """Return the work with the log-probs before the update, which these releases compute in every step."""
    return {
        name: phase._replace(num_passes=1) if name == "old_log_prob" else phase
        for name, phase in phases.items()
    }


def predict(run: PublishedRun, device: DeviceProfile) -> PredictedStep:
    config, plan, policy = run.config, run.plan, run.policy
    sync = _sync_time(run, device)
    device = replace(device, host_gb_s=_PAGEABLE_GB_S)
    times = {GENERATION: generation_time(config, policy, device, run.lengths, run.staleness)}
    for work in run.work:
        times |= times_of(work, device)
    times[PUSH] = sync
    architectures = {role.name: policy for role in model_roles(config)}
    moves = offload_times(config, moved_items(plan), architectures, device)
    return combine(config, plan, times, moves, device, run.lengths)


def _sync_time(run: PublishedRun, device: DeviceProfile) -> PhaseTime:
    """Return the time of a weight sync of the published runs, in which every GPU receives the whole model.

    Engines that take turns with training sleep: vLLM's level 1 copies their weights to pinned memory and back.
    """
    rate = device.between_nodes.gb_s * device.efficiency.links * 1e9
    slept = 0 if run.staleness else 2 * engine_weights(run.config, run.policy)
    return PhaseTime.of(
        messages=pushed_bytes(run.config, run.policy) / rate, offload=slept / (device.host_gb_s * 1e9)
    )


def observe(runs: Sequence[PublishedRun]) -> list[tuple[Callable[[DeviceProfile], float], float]]:
    return [(lambda device, run=run: predict(run, device).seconds, run.measured_s) for run in runs]


def fitted_without(device: DeviceProfile, runs: Sequence[PublishedRun], model: str) -> DeviceProfile:
    """Return the device with constants that are fitted to all other models."""
    return fit_device(device, observe([run for run in runs if run.model != model]), FITTED)


def prior() -> DeviceProfile:
    """Return an H100 with constants from data sheets and literature, which know nothing of these runs."""
    device = load_device(FITTED_DEVICE)
    return replace(device, efficiency=_PRIOR, sample_ms=2.0)


def factor(run: PublishedRun, step: PredictedStep) -> float:
    """Return the factor by which a prediction is too high or too low, at least 1."""
    return math.exp(abs(math.log(step.seconds / run.measured_s)))


def misordered(runs: Sequence[PublishedRun], steps: Sequence[PredictedStep]) -> list[tuple[str, str]]:
    """Return the pairs of runs that differ by more than 20 %, and whose prediction has the wrong order."""
    pairs = combinations(zip(runs, steps, strict=True), 2)
    return [
        (one.model, other.model)
        for (one, first), (other, second) in pairs
        if abs(math.log(one.measured_s / other.measured_s)) > math.log(1.2)
        and (one.measured_s < other.measured_s) != (first.seconds < second.seconds)
    ]


def print_table(runs: Sequence[PublishedRun], steps: Sequence[PredictedStep]) -> bool:
    """Print the predictions, and return whether they are within the limits."""
    print(
        "| model | staleness | published s | predicted s | predicted / published | generation s | training s |"
    )
    print("|---|---|---|---|---|---|---|")
    for run, step in zip(runs, steps, strict=True):
        generation_s = step.phases[GENERATION].seconds
        training_s = sum(step.phases[name].seconds for name in _TRAINING if name in step.phases)
        print(
            f"| {run.model} | {run.staleness} | {run.measured_s:g} | {step.seconds:.1f} | "
            f"{step.seconds / run.measured_s:.2f} | {generation_s:.1f} | {training_s:.1f} |"
        )

    factors = [factor(run, step) for run, step in zip(runs, steps, strict=True)]
    wrong = misordered(runs, steps)
    print(
        f"\nmedian error {median(factors) - 1:.0%} (limit {MEDIAN_ERROR:.0%}), worst factor {max(factors):.2f}"
    )
    print(f"(limit {WORST_FACTOR}), {counted(len(wrong), 'pair')} in the wrong order {wrong or ''}")
    record(
        "benchmarks.tuning.published",
        ratios={
            "median error": at_most(median(factors) - 1, MEDIAN_ERROR),
            "worst factor": at_most(max(factors), WORST_FACTOR),
            "pairs in the wrong order": at_most(len(wrong), 0),
        },
    )
    return median(factors) - 1 <= MEDIAN_ERROR and max(factors) <= WORST_FACTOR and not wrong


def table_rows(constants: Mapping[str, Mapping[str, float]]) -> list[dict[str, str]]:
    """Predict all published rows, and return them with their columns.

    Args:
        constants: Fitted constants by the model that they know nothing of, and those of ALL.
    """
    columns = []
    published = json.loads(ROWS_FILE.read_text(encoding="utf-8"))
    for part in ("rows", "others"):
        for row, run in zip(published[part], read_runs(part), strict=True):
            device = load_device(row.get("device", FITTED_DEVICE))
            if part == "rows" or row["device"] == FITTED_DEVICE:
                device = _with_constants(device, constants[run.model if part == "rows" else ALL])
            step = predict(run, device)
            training_s = sum(step.phases[name].seconds for name in _TRAINING if name in step.phases)
            columns.append(
                {
                    "model": run.model,
                    "GPUs": f"{row['gpus']} {device.name.split()[0]}",
                    "steps ahead": str(run.staleness),
                    "fitted": "to the other models" if part == "rows" else "no",
                    "published s": f"{run.measured_s:g}",
                    "predicted s": f"{step.seconds:.1f}",
                    "predicted / published": f"{step.seconds / run.measured_s:.2f}",
                    "generation s": f"{step.phases[GENERATION].seconds:.1f}",
                    "training s": f"{training_s:.1f}",
                    "weight sync s": f"{step.phases[PUSH].seconds:.1f}",
                    "note": row.get("note", ""),
                }
            )
    return columns


def _with_constants(device: DeviceProfile, constants: Mapping[str, float]) -> DeviceProfile:
    efficiency = {name: value for name, value in constants.items() if name != "sample_ms"}
    return replace(device, efficiency=Efficiency(**efficiency), sample_ms=constants["sample_ms"])


def _write(devices: Mapping[str, DeviceProfile]) -> None:
    """Write the constants and the table of all rows."""
    constants = {
        model: {**asdict(device.efficiency), "sample_ms": device.sample_ms}
        for model, device in devices.items()
    }
    CONSTANTS_FILE.write_text(json.dumps(constants, indent=1) + "\n", encoding="utf-8")
    rows = table_rows(constants)
    with TABLE_FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"\nwritten: {CONSTANTS_FILE.name}, {TABLE_FILE.name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table of the documentation")
    writes = parser.parse_args().write
    device = prior()
    runs = read_runs()
    fits = {model: fitted_without(device, runs, model) for model in dict.fromkeys(run.model for run in runs)}
    print("Each model is predicted with constants that were fitted to the other models.\n")
    passed = print_table(runs, [predict(run, fits[run.model]) for run in runs])
    fitted = fit_device(device, observe(runs), FITTED)
    print(f"\nFitted to all runs: {fitted.efficiency}, sample_ms={fitted.sample_ms:.3g}")
    if writes:
        _write(fits | {ALL: fitted})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
