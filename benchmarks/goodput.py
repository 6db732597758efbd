"""Simulate the goodput of a long run on a large cluster with and without recovery in place.

    python -m benchmarks.goodput [--plot goodput.svg]

Failures arrive at random, at the rate that Llama 3 405B saw: 419 unexpected interruptions in 54 days on 16,384
GPUs, 78 % of them by hardware (The Llama 3 Herd of Models, section 3.3.4). The rate is proportional to the
number of GPUs. After a hardware failure the node is in repair. The goodput is the share of the time of all GPUs,
spare ones included, in which steps are trained that are not trained again.

Two ways to recover are compared, each with and without spare nodes:

- Checkpoints on disk alone. The scheduler starts the whole run again, which repeats the steps since the last
  checkpoint. The interval is the one of Young, sqrt(2 * blocked time * time between failures), which is optimal
  to first order.
- Snapshots in memory after every step. The lost processes start again in place, and the interrupted step is
  repeated.

A run without a spare node waits until one in repair is back.

Two failures of neighbors while the first is recovered from lose both copies of a snapshot; the run then
continues from the checkpoint on disk.
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

_DAY_S = 86_400.0
FAILURES_PER_GPU_S = 419 / (54 * _DAY_S * 16_384)
HARDWARE_SHARE = 0.78
GPUS_PER_NODE = 8
CLUSTERS = (1_024, 4_096, 16_384)
DAYS = 54


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a run in seconds. The defaults are assumptions, except where the measurement is named.

    Attributes:
        step_s: A training step.
        blocked_s: How long a checkpoint on disk blocks training.
        restart_s: From a failure to the first step of the whole run that was started again: noticing it,
            the scheduler, imports, NCCL, engines and loading.
        recover_s: From a failure to the repeated step with recovery in place: noticing a lost node (about 20
            s), new ranks, NCCL, and loading a snapshot.
        repair_s: Until a node that failed is back: a reboot or an exchange by the operator.
        snapshot_share: The share of a step that a snapshot costs.
    """

    step_s: float = 120.0
    blocked_s: float = 5.0
    restart_s: float = 600.0
    recover_s: float = 90.0
    repair_s: float = 3_600.0
    snapshot_share: float = 0.01


class Policy(NamedTuple):
    name: str
    in_place: bool
    has_spares: bool


POLICIES = (
    Policy("disk checkpoints", in_place=False, has_spares=False),
    Policy("snapshots in memory", in_place=True, has_spares=False),
    Policy("disk checkpoints, spare nodes", in_place=False, has_spares=True),
    Policy("snapshots in memory, spare nodes", in_place=True, has_spares=True),
)


def time_between_failures_s(num_gpus: int) -> float:
    return 1 / (FAILURES_PER_GPU_S * num_gpus)


def checkpoint_interval_s(num_gpus: int, costs: Costs) -> float:
    """Return the interval that is optimal to first order (Young, 1974)."""
    return sqrt(2 * costs.blocked_s * time_between_failures_s(num_gpus))


def num_spares(num_nodes: int) -> int:
    """Return the spare nodes of a cluster: one in a hundred, at least one."""
    return max(1, num_nodes // 100)


def simulate(num_gpus: int, policy: Policy, costs: Costs, seed: int, days: float = DAYS) -> float:
    """Return the goodput of a run over a number of days, as a share of the time of all GPUs."""
    chance = random.Random(seed)
    end_s = days * _DAY_S
    between_s = time_between_failures_s(num_gpus)
    interval_s = checkpoint_interval_s(num_gpus, costs)
    num_nodes = num_gpus // GPUS_PER_NODE
    spares = num_spares(num_nodes) if policy.has_spares else 0
    overhead = costs.blocked_s / interval_s + (costs.snapshot_share if policy.in_place else 0.0)

    now_s = 0.0
    useful_s = 0.0
    repairs: list[float] = []  # when the nodes in repair are back
    while now_s < end_s:
        # Train until the next failure.
        trained_s = min(chance.expovariate(1 / between_s), end_s - now_s)
        now_s += trained_s
        useful_s += trained_s / (1 + overhead)
        if now_s >= end_s:
            break

        # The work since the last state that survives is repeated.
        is_lost = chance.random() < 1 / num_nodes and chance.expovariate(1 / between_s) < costs.recover_s
        unsaved_s = chance.uniform(0, costs.step_s if policy.in_place and not is_lost else interval_s)
        useful_s -= min(unsaved_s, trained_s) / (1 + overhead)
        now_s += costs.recover_s if policy.in_place else costs.restart_s

        # A node in repair leaves its place to a spare one, or the run waits for the first that is back.
        if chance.random() < HARDWARE_SHARE:
            heapq.heappush(repairs, now_s + costs.repair_s)
        while repairs and repairs[0] <= now_s:
            heapq.heappop(repairs)
        while len(repairs) > spares:
            now_s = max(now_s, heapq.heappop(repairs))

    return max(0.0, useful_s) / max(now_s, end_s) * num_nodes / (num_nodes + spares)


def goodput(num_gpus: int, policy: Policy, costs: Costs, num_runs: int = 20) -> float:
    """Return the mean goodput of several simulated runs."""
    return fmean(simulate(num_gpus, policy, costs, seed) for seed in range(num_runs))


def table(costs: Costs) -> str:
    """Return the table of the documentation."""
    lines = [
        "| GPUs | time between failures | checkpoint interval | "
        + " | ".join(each.name for each in POLICIES)
        + " |",
        "|---|---|---|" + "---|" * len(POLICIES),
    ]
    for num_gpus in CLUSTERS:
        shares = [f"{goodput(num_gpus, policy, costs):.1%}" for policy in POLICIES]
        times = [
            f"{time_between_failures_s(num_gpus) / 3600:.1f} h",
            f"{checkpoint_interval_s(num_gpus, costs) / 60:.0f} min",
        ]
        lines.append(f"| {num_gpus:,} | " + " | ".join([*times, *shares]) + " |")
    return "\n".join(lines)


def plot(costs: Costs, path: Path) -> None:
    """Draw the goodput over the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "goodput"  # the same file in every run
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    sizes = [1_024 * 2 ** (number / 2) for number in range(10)]
    counts = [round(size / GPUS_PER_NODE) * GPUS_PER_NODE for size in sizes]
    for policy in POLICIES:
        axes.plot(counts, [100 * goodput(count, policy, costs) for count in counts], label=policy.name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1_024 * 2**number for number in range(5)])
    axes.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.set_ylim(0, 100)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("goodput, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw to a .svg or .png file")
    parsed = parser.parse_args()
    print(table(Costs()))
    if parsed.plot is not None:
        plot(Costs(), parsed.plot)


if __name__ == "__main__":
    main()
