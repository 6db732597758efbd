"""Measure what snapshots of the training state in memory cost a training step (`recovery.enabled`).

    python -m benchmarks.snapshots [--model 10M] [--rows 64] [--repeats 7] [--threads 1]

A step scores a batch and trains on it, with an optimizer step, in one process on a CPU, as a rank does in
megarl/roles/megatron_worker.py. Steps with and without a snapshot alternate, also in which comes first. A snapshot
begins after a step, is copied while the next step scores its batch, and must be complete before the update.
The overhead is the median of the ratios of neighboring steps, minus 1. It is given for the time on the clock
and for the processor time, because other load on the machine disturbs the first. The size is compared with the plan
(megarl/plan/placement/model_state.py).

The limit of 3 % holds for steps that are bound by computation: at least a thousand tokens for each of the
model's layers, far less than in a run.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.engine import LONGEST, MODELS, Contest, make_batch
from benchmarks.history.rows import at_most, record
from megarl.batch.data_proto import DataProto
from megarl.engine.snapshot import PendingSnapshot
from megarl.machine.memory_files import MemoryFiles

MOST_OVERHEAD = 0.03
MOST_MEMORY_ERROR = 0.02
_BYTES_PER_PARAMETER = 4 + 12  # float32 weights, and the optimizer's two moments and masters
_MICRO_BATCH_ROWS = 8


class Steps:
    """Training steps of one model, with and without snapshots."""

    def __init__(self, size: str, num_rows: int) -> None:
        self._contest = Contest(size)
        self.num_parameters = self._contest.num_parameters
        self._batch = make_batch([LONGEST] * num_rows, MODELS[size].vocab_size)
        self._rows = [
            range(start, start + _MICRO_BATCH_ROWS) for start in range(0, num_rows, _MICRO_BATCH_ROWS)
        ]
        self._train = self._contest.engine_step(self._batch, self._rows)
        self._engine = self._contest.engine("packed")
        self._files = MemoryFiles()
        self._paths = [self._files.path(f"rank-{slot}") for slot in range(2)]
        self._pending: PendingSnapshot | None = None
        self._number = 0

    @property
    def snapshot_bytes(self) -> int:
        return next(iter(self._files.complete().values())).nbytes

    def run(self, with_snapshot: bool) -> None:
        """Run a step. A snapshot of the state before it is copied in the meantime."""
        self._number += 1
        if with_snapshot:
            path = self._paths[self._number % 2]
            self._pending = PendingSnapshot(path, self._number, self._engine)
        with torch.no_grad():
            self._engine.forward(DataProto.from_dict(self._batch).ragged, self._rows, ())
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._train()
        self._engine.step()


def overheads(steps: Steps, repeats: int) -> dict[str, float]:
    """Return the overhead on each clock, as a share of a step without a snapshot."""
    for with_snapshot in (True, True, False):  # both files get their memory
        steps.run(with_snapshot)
    clocks = {"clock": time.perf_counter, "processors": time.process_time}
    ratios: dict[str, list[float]] = {name: [] for name in clocks}
    order = [True, False]
    for _ in range(repeats):
        spent: dict[bool, dict[str, float]] = {}
        for with_snapshot in order:
            begin = {name: clock() for name, clock in clocks.items()}
            steps.run(with_snapshot)
            spent[with_snapshot] = {name: clock() - begin[name] for name, clock in clocks.items()}
        for name, of_clock in ratios.items():
            of_clock.append(spent[True][name] / spent[False][name])
        order.reverse()
    return {name: median(of_clock) - 1 for name, of_clock in ratios.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.snapshots")
    parser.add_argument("--model", choices=MODELS, default="10M")
    parser.add_argument("--rows", type=int, default=64, help=f"rows of {LONGEST} tokens in a step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parsed = parser.parse_args()

    torch.set_num_threads(parsed.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    steps = Steps(parsed.model, parsed.rows)
    found = overheads(steps, parsed.repeats)
    planned = steps.num_parameters * _BYTES_PER_PARAMETER
    error = steps.snapshot_bytes / planned - 1
    print(
        f"{steps.num_parameters / 1e6:.1f} million parameters, {parsed.rows * LONGEST:,} tokens a step, "
        f"snapshot of {steps.snapshot_bytes / 2**20:,.1f} MiB"
    )
    for name, overhead in found.items():
        print(f"overhead, {name:<11} {overhead:7.2%}")
    print(f"memory over plan       {error:7.2%}")
    record(
        "benchmarks.snapshots",
        ratios={
            "overhead": at_most(found["processors"], MOST_OVERHEAD),
            "memory over plan": at_most(abs(error), MOST_MEMORY_ERROR),
        },
    )
    return int(found["processors"] > MOST_OVERHEAD or abs(error) > MOST_MEMORY_ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
