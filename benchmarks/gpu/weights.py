"""Measure the weight sync from a trainer process to an engine process on one GPU, compared with a copy of as many bytes.

    python -m benchmarks.gpu.weights [--repeats 5] [--bucket-mb 256]
    python -m benchmarks.gpu.weights --device cpu    # a dry run with few bytes and no limit

The weights are 1.03 GB in bfloat16, with the shapes of a Qwen2 model of eight layers. The engine is of the
kind hf, and the transport is `device`: IPC buffers in the GPU's memory, shared by CUDA IPC. Seconds are the
trainer's, from the start of a weight sync until the engine has received everything, the fastest of the
repeats; the first one includes initialization and does not count. Between two weight syncs the trainer copies
as many bytes within the GPU (memcpy), and the fastest counts as well.

IPC buffers copy all bytes twice, in and out, and two processes take turns on a GPU: the limit is half the
speed of memcpy. The target is half of that limit, as the ratio 2 x memcpy's seconds / the weight sync's
seconds. Below it the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.config.schema import Transport
from megarl.machine.usage import Stopwatch
from megarl.weights.plan import message_bytes
from tests.mortal_ranks import Place, mortal_ranks
from tests.shared_device import DTYPE, SharedSpec, TrainerProcess, answer, ask, save_model, serve_engine

TARGET = 0.5  # of the time of two copies
COPIES = 2  # into the IPC buffers and out of them
SIZES = {"cuda": (8, 2048), "cpu": (2, 256)}  # of the model: layers, hidden size


class Push(NamedTuple):
    """The times of a weight sync.

    Attributes:
        packing_s: Copying into the IPC buffers.
        waiting_s: Waiting for the engine.
    """

    seconds: float
    packing_s: float
    waiting_s: float
    nbytes: int


class MeasuredTrainer(TrainerProcess):
    def timed_push(self) -> Push:
        start_s = time.perf_counter()
        report = self.send([0])
        return Push(time.perf_counter() - start_s, report.packing_s, report.waiting_s, report.nbytes)

    def copy_seconds(self, nbytes: int) -> float:
        source, target = torch.ones(2, nbytes // DTYPE.itemsize, dtype=DTYPE, device=self.device)
        stopwatch = Stopwatch(self.device)
        target.copy_(source)
        with stopwatch:
            target.copy_(source)
        return stopwatch.seconds()


def serve_measured_trainer(spec: SharedSpec, place: Place) -> None:
    MeasuredTrainer(spec, place).obey()


def measure(spec: SharedSpec, repeats: int) -> tuple[Push, float]:
    """Return the fastest weight sync, and the seconds of the fastest copy of its bytes."""
    pushes = []
    copies = []

    with mortal_ranks(spec.folder, [partial(serve_measured_trainer, spec), partial(serve_engine, spec)]) as (
        trainer,
        engine,
    ):
        ask(engine, "join", ask(trainer, "serve", 0, ask(engine, "start")))
        for version in range(repeats + 1):
            engine.tell(("receive", version))
            push: Push = ask(trainer, "timed_push")
            answer(engine)
            seconds = ask(trainer, "copy_seconds", push.nbytes)
            if version:
                pushes.append(push)
                copies.append(seconds)
        if ask(engine, "checksums") != ask(trainer, "checksums"):
            raise SystemExit("the engine's weights are not the trainer's")

    return min(pushes), min(copies)


def main(options: Sequence[str] | None = None) -> int:
    """Run the benchmark and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=256.0, help="of resharding.bucket_mb, in MiB")
    arguments = parser.parse_args(options)
    is_cuda = arguments.device == "cuda"

    if is_cuda and not torch.cuda.is_available():
        print("torch sees no GPU; use --device cpu for a dry run")
        return 1

    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    print(
        f"{torch.cuda.get_device_name(device) if is_cuda else 'a CPU'}, torch {torch.__version__}, bucket "
        f"{arguments.bucket_mb:g} MiB"
    )

    with tempfile.TemporaryDirectory() as folder:
        num_layers, hidden_size = SIZES[arguments.device]
        save_model(Path(folder), num_layers, hidden_size, vocab_size=15 * hidden_size)
        buffer_bytes = message_bytes(Transport.device, int(arguments.bucket_mb * 2**20), is_cuda)
        push, copy_s = measure(SharedSpec(Path(folder), (device, device), buffer_bytes), arguments.repeats)

    ratio = COPIES * copy_s / push.seconds
    print(
        f"push   {push.nbytes / 1e9:.2f} GB in {push.seconds:.4f} s: packing {push.packing_s:.4f} s, "
        f"waiting {push.waiting_s:.4f} s"
    )
    print(
        f"memcpy {push.nbytes / 1e9:.2f} GB in {copy_s:.4f} s; ratio to one copy "
        f"{copy_s / push.seconds:.2f}, to two {ratio:.2f}"
    )

    if not is_cuda:
        verdict = f"limit {TARGET:g} not enforced: a dry run on a CPU"
    else:
        verdict = f"limit {TARGET:g} {'held' if ratio >= TARGET else 'MISSED'}"

    speeds = f"push {push.nbytes / 1e9 / push.seconds:.1f} GB/s, memcpy {push.nbytes / 1e9 / copy_s:.1f} GB/s"
    print(f"\n{speeds}, ratio to two copies {ratio:.2f} ({verdict})")
    return 1 if is_cuda and ratio < TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
