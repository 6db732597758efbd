"""Measure the memory of a rank that trains on batches of changing shapes: `python -m tests.soak.rss`, a
minute or two of CPU.

One process trains a tiny model on the engine, in the environment of a megarl worker without a GPU. oneDNN and
torch's layer above it cache the kernels of each shape, and packing makes every micro-batch a new shape. The
resident memory, as medians over windows of 20 steps, must be flat within 2 % from step 100. Otherwise the
allocator must be the cause: resident memory minus the free memory that it caches is flat. If neither holds,
the status is 1. `--unbounded` leaves the two caches at their default sizes, for comparison: memory then grows
until they are full.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megarl.controller.environment import fill_in

if TYPE_CHECKING:  # torch is imported after the environment is set, as in a worker
    from tests.unit.engine.rank_side import Rows

TOLERANCE = 0.02
WINDOW = 20
FIRST = 100
CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
MAX_PROMPT = 32
MAX_RESPONSE = 64


class _HeapStatistics(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def heap_mib() -> tuple[float, float]:
    """Return the MiB that glibc has allocated from its arenas, and the free memory that it keeps in them."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _HeapStatistics
    found = mallinfo()
    return found.uordblks / 2**20, found.fordblks / 2**20


def batch_of(step: int) -> tuple[Rows, list[list[int]]]:
    """Return rows and lengths. They, and the tokens of each micro-batch, differ from step to step."""
    import torch

    from tests.unit.engine.models import VOCAB_SIZE
    from tests.unit.engine.rank_side import deal, unpadded

    draw = random.Random(step)
    num_rows = draw.randint(6, 12)
    length = MAX_PROMPT + MAX_RESPONSE
    mask = torch.zeros(num_rows, length, dtype=torch.long)
    for row in mask:
        row[MAX_PROMPT - draw.randint(1, MAX_PROMPT) : MAX_PROMPT + draw.randint(1, MAX_RESPONSE)] = 1
    response_mask = mask[:, MAX_PROMPT:].float()
    ids = torch.randint(VOCAB_SIZE, (num_rows, length), generator=torch.Generator().manual_seed(step))
    rows = {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": response_mask,
        "weight/log_probs": response_mask / 100,
    }

    return unpadded(rows), deal(num_rows, draw.randint(2, 3))


def train(folder: Path, num_steps: int) -> Iterator[float]:
    """Yield the resident MiB after each step."""
    import torch.distributed as dist

    from megarl.config.schema import OptimConfig, ParallelConfig
    from tests.unit.engine import rank_side
    from tests.unit.engine.models import save_model

    save_model("qwen2", folder / "model")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    groups = rank_side.start(ParallelConfig())
    engine = rank_side.build(groups, str(folder / "model"), optim=OptimConfig(lr=1e-5), chunk_tokens=64)
    loss = rank_side.weighted_sum(("log_probs",))

    for step in range(1, num_steps + 1):
        batch, micro_batches = batch_of(step)
        engine.forward(batch, micro_batches)
        engine.forward_backward(batch, micro_batches, loss, ())
        engine.step()
        yield resident_mib()

    dist.destroy_process_group()


def num_tensors() -> int:
    import torch

    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def growth(resident: list[float]) -> float:
    """Return the highest relative to the lowest median of a window, from step FIRST."""
    medians = [
        median(resident[start : start + WINDOW]) for start in range(FIRST, len(resident) - WINDOW + 1, WINDOW)
    ]
    return max(medians) / min(medians) - 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--unbounded", action="store_true")
    arguments = parser.parse_args()
    fill_in(os.environ, "127.0.0.1", use_gpu=False)

    if arguments.unbounded:
        for name in CACHES:
            del os.environ[name]

    print(*(f"{name}={os.environ.get(name, 'unset')}" for name in CACHES))
    print(
        "| step | resident MiB | in use by glibc's count | kept by glibc | tensors | seconds of CPU "
        "|\n|---|---|---|---|---|---|"
    )
    resident: list[float] = []
    without_free: list[float] = []

    with tempfile.TemporaryDirectory() as temporary:
        for mib in train(Path(temporary), arguments.steps):
            used, kept = heap_mib()
            resident.append(mib)
            without_free.append(mib - kept)
            step = len(resident)
            if step == WINDOW or step % 100 == 0:
                shown = median(resident[-WINDOW:])
                print(
                    f"| {step} | {shown:.0f} | {used:.0f} | {kept:.0f} | {num_tensors()} | "
                    f"{time.process_time():.0f} |",
                    flush=True,
                )

    found = growth(resident)
    held = growth(without_free)
    print(
        f"\nfrom step {FIRST} to {arguments.steps}: {found:.1%}, without what glibc keeps free {held:.1%}; "
        f"allowed {TOLERANCE:.0%}"
    )

    return int(min(found, held) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
