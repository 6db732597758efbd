"""Measure how fast trained weights reach engines on this machine's CPU, compared with limits of the same run.

    python benchmarks/weights.py [--repeats 5] [--bucket-mb 64] [--transports device group folder] [--tensor-parallel 1 2]
    python benchmarks/weights.py --planning    # only where tensors go
    python benchmarks/weights.py --adapters    # only syncs of a model with adapters
    python benchmarks/weights.py --delta       # only syncs of what changed

A Qwen2-style model of 100 million parameters in float32, in real Megatron-Core ranks on Ray, is sent to one
real SGLang engine by each transport, as in a training step: pause, receive, stamp, flush, resume; without
verification. The fastest of several weight syncs counts. They alternate with the limits, so that other load
on the machine slows all of them.

copy      a copy of the same tensors to other memory, in SGLang's process own       SGLang's
`model.load_weights` of the same tensors, when they are already in its process gloo      as many bytes point
to point, in the same messages, from the trainer's process to the engine's worker, and nothing else files
writing and reading a file of as many bytes in one process, through the system's file cache

`of limit` is the speed relative to the slowest limit: of memory (copy, own) for `device`, of the transport's
own means (gloo, files) for the others. Targets: half for `device` from a trainer of the same layout; for
`group` seven tenths if the trainer's slices are contiguous (TP1) and half if they must be packed (TP2: some
are columns).

Then one trainer rank sends to 1, 2 and 4 engines of transformers by `group`, in alternation: seconds per
byte, relative to one engine. The target is 1.3 at most.

Then a trainer with adapters of rank 32 on every projection sends to an engine that applies them itself: a
later sync of adapters alone (actor.lora.sync: adapter), next to syncs of merged weights by the same trainer.

Then the model in bfloat16 is sent to an engine of transformers by `group` after none, 1, 10 and 100 % of its
elements changed: everything, and only what changed (resharding.delta). Targets: the changed values and nine
bits for each position at 1 %, six at 10 %, and a thousandth more than a full sync if everything changed.

Last, the benchmark measures how long an SGLang engine takes to locate the tensors of Qwen3-30B-A3B and
Qwen3-235B-A22B (engine_planning.py): 5 processor seconds at most in the first weight sync, and 0.2 in every
later one.

`extra` is the most memory that a trainer rank needed for a weight sync, as the kernel counts it, in buckets.
Packing and waiting are shares of the time on the slowest trainer rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import torch
from engine_planning import measure_planning
from own_loading import MeasuredWorker, build_measured_engine
from own_means import MeasuredTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config.schema import (
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutEngineKind,
    Transport,
    Verify,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.futures import gather
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.engine.spec import ModelSpec
from megarl.models.architecture import LoRA
from megarl.models.families import read_architecture
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.plan import RankLocation
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import PushReport, WeightSync

LIMITS = {Transport.device: ("copy", "own"), Transport.group: ("gloo",), Transport.folder: ("files",)}
# (transport, tensor-parallel size) -> share of the limit
TARGETS = {(Transport.device, 1): 0.5, (Transport.group, 1): 0.7, (Transport.group, 2): 0.5}
MOST_PER_BYTE = 1.3  # with several engines, relative to one
# Share of changed elements -> bytes sent, relative to those of all weights.
MOST_SENT = {0.0: 0.001, 0.01: 0.01 * (1 + 9 / 16), 0.1: 0.1 * (1 + 6 / 16), 1.0: 1.001}


def save_model(folder: Path) -> int:
    """Save a model of 100 million random parameters and return their exact number."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=10,
        num_attention_heads=12,
        num_key_value_heads=4,
        vocab_size=16384,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)

    return sum(parameter.numel() for parameter in model.parameters())


def start_group(name: str, world_size: int, worker: RayClassWithInitArgs) -> RoleGroup:
    return RayWorkerGroup(
        RayResourcePool([world_size], use_gpu=False, name=name), worker, role=name, phase_time_limit_s=600
    )


def start_engine(folder: Path, lora: LoRA | None = None) -> RoleGroup:
    rollout = RolloutConfig(engine=RolloutEngineKind.sglang, max_concurrency=4)
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.float32),
        rollout=rollout,
        device=Device.cpu,
        lora=lora,
    )
    return start_group(
        "rollout", 1, RayClassWithInitArgs(MeasuredWorker, partial(build_measured_engine, spec))
    )


def start_trainer(
    folder: Path,
    tensor_parallel_size: int,
    bucket_bytes: int,
    lora: LoRA | None = None,
    pushes_adapters: bool = False,
    dtype: DType = DType.float32,
) -> WeightSource:
    architecture = replace(read_architecture(str(folder)), lora=lora)
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel_size)
    spec = ModelSpec(
        path=str(folder),
        architecture=architecture,
        head="lm",
        dtype=dtype,
        parallel=parallel,
        engine=EngineConfig(),
        device=Device.cpu,
        seed=0,
        pushes_adapters=pushes_adapters,
    )
    group = start_group(
        f"trainer-tp{tensor_parallel_size}", tensor_parallel_size, RayClassWithInitArgs(MeasuredTrainer, spec)
    )

    return WeightSource(
        group=group,
        architecture=architecture if pushes_adapters else architecture.base,
        parallel=parallel,
        dtype=dtype,
        bucket_bytes=bucket_bytes,
    )


def measure_limits(
    engine: RoleGroup, source: WeightSource, transport: Transport, scratch: Path
) -> dict[str, float]:
    """Return the seconds of each limit by name: those of memory, and that of the transport's own means.

    The engine's weights are invalid afterwards.
    """
    shapes = [(name, meta.shape) for name, meta in source.manifest.items()]
    nbytes = sum(prod(shape) for _, shape in shapes) * 4
    copy_s, own_s = engine.call_rank(0, MeasuredWorker.limits, shapes).get()
    limits = {"copy": copy_s, "own": own_s}

    if transport is Transport.group:
        address = source.group.call_rank(0, MeasuredTrainer.reserve, 60.0).get()
        own = source.group.call_rank(
            0, MeasuredTrainer.messages_seconds, address, nbytes, source.bucket_bytes
        )
        engines = engine.call_rank(0, MeasuredWorker.messages_seconds, address, nbytes, source.bucket_bytes)
        limits["gloo"] = max(gather(own, engines))

    if transport is Transport.folder:
        limits["files"] = source.group.call_rank(
            0, MeasuredTrainer.files_seconds, str(scratch), nbytes, source.bucket_bytes
        ).get()

    return limits


def show(
    transport: Transport, size: int, report: PushReport, bucket_bytes: int, limits: dict[str, float]
) -> bool:
    """Print a line and return whether the target is met, if there is one."""
    of_limit = max(limits[name] for name in LIMITS[transport]) / report.seconds
    target = TARGETS.get((transport, size), 0.0)
    speed = report.nbytes / 1e9 / report.seconds
    stages = (
        f"packing {report.packing_s / report.seconds:4.0%}  waiting {report.waiting_s / report.seconds:4.0%}"
    )
    print(
        f"{transport.value:<8} TP{size} {report.nbytes / 1e6:5.0f} MB {report.seconds:6.3f} s {speed:5.2f} "
        f"GB/s {of_limit:8.2f} "
        f"{target or '':>6} {report.extra_bytes / bucket_bytes:5.2f}  {stages}",
        flush=True,
    )

    return of_limit >= target


def sync_of(
    source: WeightSource,
    transport: Transport,
    num_replicas: int,
    scratch: Path,
    folder: Path,
    sends_changes: bool = False,
) -> WeightSync:
    """Start a weight sync. With `device`, the engines are on the devices of the first trainer ranks, else on their own."""
    name = "device" if transport is Transport.device else "engine"
    return WeightSync(
        source,
        [RankLocation("node", f"device-{rank}") for rank in range(len(source.group.mesh))],
        [[RankLocation("node", f"{name}-{replica}")] for replica in range(num_replicas)],
        transport=transport,
        verify=Verify.off,
        scratch_dir=scratch,
        config_dir=folder,
        limit_s=600.0,
        sends_changes=sends_changes,
    )


def push(sync: WeightSync, engines: list[RoleGroup], version: int) -> PushReport:
    report, lost = sync.push(dict(enumerate(engines)), version)
    assert report is not None, lost
    assert not lost, lost
    return report


def measure(
    folder: Path,
    tensor_parallel_sizes: list[int],
    transports: list[Transport],
    repeats: int,
    bucket_bytes: int,
) -> bool:
    """Return whether all targets are met."""
    engine = start_engine(folder)
    sources = {size: start_trainer(folder, size, bucket_bytes) for size in tensor_parallel_sizes}
    scratch = folder.parent / "scratch"
    pushes: dict[tuple[Transport, int], list[PushReport]] = defaultdict(list)
    fastest: dict[str, float] = {}

    for size, source in sources.items():
        for transport in transports:
            sync = sync_of(source, transport, 1, scratch, folder)
            for version in range(repeats + 1):
                report = push(sync, [engine], version)
                limits = measure_limits(engine, source, transport, scratch)
                if version:  # the first one includes imports and initialization
                    pushes[transport, size].append(report)
                    fastest |= {
                        name: min(seconds, fastest.get(name, seconds)) for name, seconds in limits.items()
                    }
            sync.close()  # one trainer at a time

    nbytes = next(iter(pushes.values()))[0].nbytes
    print(
        "limits: "
        + "; ".join(
            f"{name} {seconds:.3f} s, {nbytes / 1e9 / seconds:.2f} GB/s" for name, seconds in fastest.items()
        )
    )
    print("transport          bytes     time      speed of limit target extra  share of the time")
    met = [
        show(*key, min(reports, key=lambda report: report.seconds), bucket_bytes, fastest)
        for key, reports in pushes.items()
    ]
    engine.shutdown()

    return all(met) and measure_replicas(folder, sources[min(sources)], repeats, scratch)


def measure_replicas(folder: Path, source: WeightSource, repeats: int, scratch: Path) -> bool:
    """Return whether the target is met."""
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.float32),
        rollout=RolloutConfig(max_concurrency=4),
        device=Device.cpu,
    )
    engines = [
        start_group(f"hf-{number}", 1, RayClassWithInitArgs(RolloutWorker, partial(build_engine, spec)))
        for number in range(4)
    ]
    syncs = {count: sync_of(source, Transport.group, count, scratch, folder) for count in (1, 2, 4)}
    per_byte: dict[int, list[float]] = defaultdict(list)

    for version in range(repeats + 1):
        for count, sync in syncs.items():
            report = push(sync, engines[:count], version)
            sync.close()
            if version:
                per_byte[count].append(report.load_s / report.nbytes)

    ratios = {count: min(seconds) / min(per_byte[1]) for count, seconds in per_byte.items()}
    print(
        "seconds per byte, relative to one engine: "
        + ", ".join(f"{count} engines {ratio:.2f}" for count, ratio in ratios.items())
    )
    return max(ratios.values()) <= MOST_PER_BYTE


def measure_adapters(folder: Path, repeats: int, bucket_bytes: int) -> None:
    """Print bytes and seconds of a sync of merged weights and of adapters alone, the fastest of several."""
    lora = LoRA(rank=32, alpha=32)
    for separate in (False, True):
        engine = start_engine(folder, lora if separate else None)
        source = start_trainer(folder, 1, bucket_bytes, lora, separate)
        sync = sync_of(source, Transport.group, 1, folder.parent / "scratch", folder)
        reports = [push(sync, [engine], version) for version in range(repeats + 1)]
        fastest = min(reports[1:], key=lambda report: report.seconds)
        print(
            f"{'adapters alone' if separate else 'merged':<14} {fastest.nbytes / 1e6:7.1f} MB "
            f"{fastest.seconds:6.3f} s; the first sync {reports[0].nbytes / 1e6:.1f} MB",
            flush=True,
        )
        sync.close()
        source.group.shutdown()
        engine.shutdown()


def measure_delta(folder: Path, repeats: int, bucket_bytes: int) -> bool:
    """Print bytes and seconds of syncs of everything and of what changed. Returns whether targets are met."""
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.bfloat16),
        rollout=RolloutConfig(max_concurrency=4),
        device=Device.cpu,
    )
    worker = RayClassWithInitArgs(RolloutWorker, partial(build_engine, spec))
    engine = start_group("hf-delta", 1, worker)
    source = start_trainer(folder, 1, bucket_bytes, dtype=DType.bfloat16)
    met = []

    for sends_changes in (False, True):
        sync = sync_of(source, Transport.group, 1, folder.parent / "scratch", folder, sends_changes)
        push(sync, [engine], 0)
        for share in MOST_SENT if sends_changes else (1.0,):
            reports = []
            for version in range(repeats):
                source.group.call_rank(0, MeasuredTrainer.change_weights, share).get()
                reports.append(push(sync, [engine], version))
            fastest = min(reports, key=lambda report: report.seconds)
            sent = max(report.sent_share or 1.0 for report in reports)
            name = f"{share:.0%} changed" if sends_changes else "everything"
            print(
                f"{name:<13} {fastest.nbytes / 1e6:7.2f} MB {sent:8.3%} {fastest.seconds:6.3f} s, packing "
                f"{fastest.packing_s:.3f} s",
                flush=True,
            )
            met.append(not sends_changes or sent <= MOST_SENT[share])
        sync.close()

    source.group.shutdown()
    engine.shutdown()
    return all(met)


def _measure_all(arguments: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = save_model(Path(scratch) / "model")
        print(f"{num_parameters / 1e6:.1f} million parameters", flush=True)
        bucket_bytes = int(arguments.bucket_mb * 2**20)
        if arguments.delta:
            return measure_delta(Path(scratch) / "model", arguments.repeats, bucket_bytes)
        met = arguments.adapters or measure(
            Path(scratch) / "model",
            arguments.tensor_parallel,
            arguments.transports,
            arguments.repeats,
            bucket_bytes,
        )
        measure_adapters(Path(scratch) / "model", arguments.repeats, bucket_bytes)
        if arguments.adapters:
            return True
        met = measure_delta(Path(scratch) / "model", arguments.repeats, bucket_bytes) and met
    return measure_planning() and met


def main() -> int:
    """Run the benchmark and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument(
        "--transports",
        type=Transport,
        nargs="+",
        default=[Transport.device, Transport.group, Transport.folder],
    )
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2], help="sizes of the trainer")
    parser.add_argument(
        "--planning", action="store_true", help="measure only how long it takes to locate tensors"
    )
    parser.add_argument("--adapters", action="store_true", help="measure only a model with adapters")
    parser.add_argument("--delta", action="store_true", help="measure only syncs of what changed")
    arguments = parser.parse_args()
    disable_progress_bar()
    load = os.getloadavg()[0]
    print(
        f"{len(os.sched_getaffinity(0))} cores, load {load:.1f}, torch {torch.__version__}, bucket "
        f"{arguments.bucket_mb:g} MiB"
    )
    start_ray(num_cpus=8, object_store_mb=256)

    try:
        met = measure_planning() if arguments.planning else _measure_all(arguments)
    finally:
        shutdown()

    print("every target is met" if met else "a target is missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
