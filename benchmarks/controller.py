"""Compare the cost of a role's call with plain Ray: a batch is split for the ranks and sent, and results collected.

    python -m benchmarks.controller [--repeats 7] [--rows 256 2048 16384]

Rows are ragged, with 2,048 tokens on average: ids in int32, log-probs and advantages in float32. Two ranks
read one number of each column and return one column of float32. `ours` is a call of a RoleGroup. `Ray` puts
the parts, which are split before the clock starts, as lists of numpy arrays into plain actors and gets such
lists. The two alternate, and the fastest repeat of each counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.history.rows import at_most, record
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.dispatch import RULES, Dispatch
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, Worker, register

RANKS = 2
MEAN_TOKENS = 2048
LIMIT = 1.5
COLUMNS = ("responses", "old_log_probs", "advantages")


class ScoringWorker(Worker):
    @register(RULES[Dispatch.MEGATRON_MESH])  # the whole batch is split here
    def log_probs(self, batch: DataProto) -> DataProto:
        assert all(float(batch.ragged[name].flat()[-1]) == 1 for name in COLUMNS)
        return DataProto.from_dict({"log_probs": batch.ragged["old_log_probs"]})


class PlainActor:
    def log_probs(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        lengths, *columns = arrays
        assert all(float(column[-1]) == 1 for column in columns)
        return [lengths, columns[1]]


def make_batch(num_rows: int) -> DataProto:
    lengths = (
        np.random.default_rng(0).lognormal(np.log(MEAN_TOKENS) - 0.32, 0.8, num_rows).astype(np.int64) + 1
    )
    total = int(lengths.sum())
    values = (torch.ones(total, dtype=torch.int32), torch.ones(total), torch.ones(total))

    return DataProto.from_dict(
        {
            name: RaggedTensor.packed_rows(each, torch.from_numpy(lengths))
            for name, each in zip(COLUMNS, values, strict=True)
        }
    )


def as_arrays(part: DataProto) -> list[np.ndarray]:
    lengths = part.ragged[COLUMNS[0]].lengths.numpy()
    return [lengths, *(part.ragged[name].flat().numpy() for name in COLUMNS)]


def seconds(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def compare(
    group: RoleGroup, actors: Sequence[ray.actor.ActorHandle], num_rows: int, repeats: int
) -> tuple[float, float, float]:
    """Return the megabytes sent, and the seconds of ours and of Ray's."""
    batch = make_batch(num_rows)
    parts = [as_arrays(part) for part in batch.chunk(RANKS)]

    def of_ray() -> None:
        ray.get([actor.log_probs.remote(ray.put(part)) for actor, part in zip(actors, parts, strict=True)])

    def ours() -> None:
        group.call(ScoringWorker.log_probs, batch)

    times = [(seconds(ours), seconds(of_ray)) for _ in range(repeats + 1)][1:]

    return (
        sum(array.nbytes for part in parts for array in part) / 1e6,
        min(each[0] for each in times),
        min(each[1] for each in times),
    )


def main() -> int:
    """Run the comparison and return 1 if the limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 2048, 16384])
    arguments = parser.parse_args()
    start_ray(num_cpus=RANKS, object_store_mb=3000)

    try:
        group = RayWorkerGroup(
            RayResourcePool([RANKS], use_gpu=False, name="workers"), RayClassWithInitArgs(ScoringWorker)
        )
        plain: Any = ray.remote(num_cpus=0)(PlainActor)
        actors = [plain.remote() for _ in range(RANKS)]
        table = Table("rows", "MB there", "ours, ms", "Ray, ms", "ours / Ray")
        worst = 0.0
        for num_rows in arguments.rows:
            sent_mb, ours_s, ray_s = compare(group, actors, num_rows, arguments.repeats)
            worst = max(worst, ours_s / ray_s)
            table.add_row(
                f"{num_rows:,}",
                f"{sent_mb:.0f}",
                f"{1e3 * ours_s:.1f}",
                f"{1e3 * ray_s:.1f}",
                f"{ours_s / ray_s:.2f}",
            )
    finally:
        shutdown()

    console = Console()
    console.print(table)
    console.print(f"at most {worst:.2f}, limit {LIMIT}")
    record("benchmarks.controller", ratios={"ours / Ray": at_most(worst, LIMIT)})

    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main())
