"""Measure how long `megarl tune` searches, by the number of devices.

    python -m benchmarks.tuning.search_time

Each row is one search in processor seconds of one core, on nodes of eight H100, with the samples of the shipped run.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

from benchmarks.tuning.shipped import read_run
from megarl.plan.search.search import search
from megarl.plan.search.space import Space, pinned_keys
from megarl.plan.step_time.device import load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts

_DEVICES_PER_NODE = 8


class Case(NamedTuple):
    """A search: the shipped run, the number of devices, and the limit of its time in seconds."""

    run: str
    num_devices: int
    limit_s: float


CASES = (
    Case("qwen3_32b_grpo", 128, 60),
    Case("qwen3_30b_a3b_grpo", 128, 60),
    Case("qwen2.5_7b_ppo", 128, 60),
    Case("qwen3_32b_grpo", 1024, 300),
    Case("qwen3_32b_grpo", 10_000, 900),
)


def search_s(case: Case) -> tuple[float, float]:
    """Return the time of a search, and the predicted step of its result, in seconds."""
    config = read_run(case.run)
    space = Space(
        config=config,
        pinned=pinned_keys(config, (), ()),
        num_nodes=case.num_devices // _DEVICES_PER_NODE,
        devices_per_node=_DEVICES_PER_NODE,
        max_staleness=0,
    )
    began_s = time.process_time()
    (best, *_), _ = search(space, PredictedCosts(load_device("h100_80gb"), expected_lengths(config)))
    return time.process_time() - began_s, best.seconds


def main() -> int:
    """Print one row for each case, and return 1 if a limit is exceeded."""
    print("| run | devices | search s | limit s | predicted step s |")
    print("|---|---|---|---|---|")
    is_slow = False
    for case in CASES:
        seconds, step_s = search_s(case)
        is_slow |= seconds > case.limit_s
        print(
            f"| {case.run} | {case.num_devices:,} | {seconds:.0f} | {case.limit_s:g} | {step_s:.4g} |",
            flush=True,
        )
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
