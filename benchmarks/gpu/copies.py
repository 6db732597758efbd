"""Measure copies from a GPU to the host: large ones, as snapshots make them, and many small ones, as weight syncs do.

    python -m benchmarks.gpu.copies [--gib 4] [--tensors 2000]
    python -m benchmarks.gpu.copies --device cpu --gib 0.05 --tensors 20    # a dry run

Large: into pinned memory, which is the limit; into a mapped file in memory, directly, and through the two
pinned buffers of snapshots (megarl/engine/snapshot.py). Small: tensors of 256 KiB within the GPU, each by a
call of its own, against one copy of all bytes. The fastest of three repeats counts. There is no target: the
figures tell whether snapshots have to be staged, and whether fusing the copies of a round would be worth it.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Callable, Sequence

import torch

from megarl.config.schema import Device
from megarl.engine import platform
from megarl.machine.memory_files import MemoryFiles

SMALL_BYTES = 2**18
REPEATS = 3


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest of some repeats, after one that does not count."""
    work()
    found = []
    for _ in range(REPEATS):
        _wait(device)
        begin_s = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - begin_s)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def large_copies(nbytes: int, device: torch.device) -> dict[str, float]:
    """Return the seconds of each way to the host."""
    from megarl.engine.snapshot import Staging

    source = torch.empty(nbytes, dtype=torch.uint8, device=device).random_()
    pinned = torch.empty(nbytes, dtype=torch.uint8)
    platform.current().pin(pinned)
    found = {"pinned memory": seconds_of(lambda: pinned.copy_(source, non_blocking=True), device)}
    staging = Staging()
    with open(MemoryFiles().path("copies"), "r+b") as file:
        file.truncate(nbytes)
        memory = mmap.mmap(file.fileno(), nbytes)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "a mapped file": lambda: mapped.copy_(source),
        "a mapped file, through two pinned buffers": lambda: staging.copy(source, mapped),
    }
    for name, way in ways.items():
        mapped.zero_()
        found[name] = seconds_of(way, device)
        if not torch.equal(mapped, pinned):
            raise SystemExit(f"{name}: the copy differs")
    return found


def small_copies(count: int, device: torch.device) -> tuple[float, float, float]:
    """Return the seconds of many small copies, of the same in one call of torch, and of one copy."""
    whole = torch.ones(count * SMALL_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(whole)
    sources = list(whole.split(SMALL_BYTES))
    places = list(target.split(SMALL_BYTES))

    def one_by_one() -> None:
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)

    return (
        seconds_of(one_by_one, device),
        seconds_of(lambda: torch._foreach_copy_(places, sources), device),
        seconds_of(lambda: target.copy_(whole), device),
    )


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gib", type=float, default=4.0, help="of a large copy")
    parser.add_argument("--tensors", type=int, default=2000, help="small ones")
    given = parser.parse_args(options)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU; use --device cpu --gib 0.05 --tensors 20 for a dry run")
        return 1

    device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
    platform.activate(Device(given.device))
    print("\n" + measured(device, int(given.gib * 2**30), given.tensors))
    return 0


def measured(device: torch.device, nbytes: int, count: int) -> str:
    """Measure, and return a line for each way."""
    large = large_copies(nbytes, device)
    each_s, foreach_s, whole_s = small_copies(count, device)
    lines = []
    for name, seconds in large.items():
        lines.append(f"{nbytes / 1e9:.2f} GB into {name}: {nbytes / 1e9 / seconds:.1f} GB/s")
    lines.append(
        f"{count} copies of {SMALL_BYTES // 1024} KiB: {each_s / count * 1e6:.1f} us each, "
        f"{foreach_s / count * 1e6:.1f} us in one call, {whole_s / count * 1e6:.1f} us as one copy"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
