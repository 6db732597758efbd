"""How fast trained weights reach SGLang on this machine's CPU, beside two limits measured in the same run.

    python benchmarks/resharding.py [--repeats 5] [--bucket-mb 64] [--transports colocated broadcast disk] [--tensor-parallel 1 2]

A Qwen2-style model of 100 million parameters in float32, in real Megatron-Core ranks on Ray, is pushed into one real SGLang
engine by each transport, as a training step does: pause, load, finish, stamp, flush, resume; without verification. Measured
are the fastest of several pushes, in turns with the limits, so that what else runs on the machine slows all of them.

copy      of the same tensors to other memory, in SGLang's process
own       SGLang's `model.load_weights` of the same tensors, when they are already in its process
gloo      a broadcast of as many bytes, in the same buckets, from the trainer's process to the engine's worker, which does nothing else
files     writing and reading a file of as many bytes, in the same buckets, by one process, as far as the system's cache of files

Two limits are of memory. The last two are what the means of `broadcast` and `disk` take by themselves: such a transport
cannot be faster, however it is made. `of memory` is the speed over that of the slower limit of memory; `of limit` also takes the
limit of the transport's own means, where that is slower. The target is half.

`extra` is the most memory that a trainer rank took for a push, as the kernel counts it, in buckets; two are allowed. The stages
(see PushReport in megarl/roles/weight_sync.py) are shares of the push's time; they overlap.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from functools import partial
from math import prod
from pathlib import Path

import torch
from own_loading import MeasuredWorker, build_measured_engine
from own_means import MeasuredTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config.architecture import read_architecture
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
from megarl.roles.weight_sync import PushReport, WeightSource, WeightSync
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.bucket import GroupAddress

TARGET = 0.5  # of the slowest limit's speed
OWN_MEANS = {Transport.broadcast: ("gloo",), Transport.disk: ("files",)}


def save_model(folder: Path) -> int:
    """Random weights of 100 million parameters; returns how many there are."""
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
    return RayWorkerGroup(RayResourcePool([world_size], use_gpu=False, name=name), worker, role=name, phase_time_limit_s=600)


def start_engine(folder: Path) -> RoleGroup:
    rollout = RolloutConfig(engine=RolloutEngineKind.sglang, max_concurrency=4)
    spec = RolloutEngineSpec(model=ModelConfig(path=str(folder), dtype=DType.float32), rollout=rollout, device=Device.cpu)
    return start_group("rollout", 1, RayClassWithInitArgs(MeasuredWorker, partial(build_measured_engine, spec)))


def start_trainer(folder: Path, tensor_parallel_size: int, bucket_bytes: int) -> WeightSource:
    architecture = read_architecture(str(folder))
    parallel = ParallelConfig(tensor_parallel_size=tensor_parallel_size)
    spec = ModelSpec(
        path=str(folder),
        architecture=architecture,
        head="lm",
        dtype=DType.float32,
        parallel=parallel,
        engine=EngineConfig(),
        device=Device.cpu,
        seed=0,
    )
    group = start_group(f"trainer-tp{tensor_parallel_size}", tensor_parallel_size, RayClassWithInitArgs(MeasuredTrainer, spec))
    return WeightSource(group=group, architecture=architecture, parallel=parallel, dtype=DType.float32, bucket_bytes=bucket_bytes)


def measure_limits(engine: RoleGroup, source: WeightSource, transport: Transport, scratch: Path) -> dict[str, float]:
    """Seconds, by the limits' names: those of memory, and that of the transport's own means. The engine's weights are void afterwards."""
    shapes = [(name, meta.shape) for name, meta in source.manifest.items()]
    nbytes = sum(prod(shape) for _, shape in shapes) * 4
    copy_s, own_s = engine.call_rank(0, MeasuredWorker.limits, shapes).get()
    limits = {"copy": copy_s, "own": own_s}
    trainer = partial(source.group.call_rank, 0)
    if transport is Transport.broadcast:
        point = trainer(MeasuredTrainer.reserve_weight_group).get()
        address = GroupAddress("limit", point.host, point.port, 2, point.backend, 60.0)
        own = trainer(MeasuredTrainer.broadcast_seconds, address, nbytes, source.bucket_bytes)
        engines = engine.call_rank(0, MeasuredWorker.broadcast_seconds, address, nbytes, source.bucket_bytes)
        limits["gloo"] = max(gather(own, engines))
    if transport is Transport.disk:
        limits["files"] = trainer(MeasuredTrainer.files_seconds, str(scratch), nbytes, source.bucket_bytes).get()
    return limits


def show(name: str, report: PushReport, bucket_bytes: int, limits: dict[str, float]) -> bool:
    """Prints a line; returns whether the target is met."""
    of_memory, of_limit = max(limits["copy"], limits["own"]) / report.seconds, max(limits.values()) / report.seconds
    stages = "  ".join(
        f"{stage} {seconds / report.seconds:4.0%}"
        for stage, seconds in (
            ("gather", report.gather_s),
            ("convert", report.convert_s),
            ("transport", report.transport_s),
            ("load", report.load_s),
        )
    )
    speed = report.nbytes / 1e9 / report.seconds
    ratios = f"{of_memory:9.2f} {of_limit:8.2f} {report.extra_bytes / bucket_bytes:5.2f}"
    print(f"{name:<15} {report.nbytes / 1e6:5.0f} MB {report.seconds:6.3f} s {speed:5.2f} GB/s {ratios}  {stages}", flush=True)
    return of_limit >= TARGET


def measure(folder: Path, tensor_parallel_sizes: list[int], transports: list[Transport], repeats: int, bucket_bytes: int) -> bool:
    """Returns whether all targets are met."""
    engine = start_engine(folder)
    sources = {size: start_trainer(folder, size, bucket_bytes) for size in tensor_parallel_sizes}
    scratch = folder.parent / "scratch"
    pushes: dict[tuple[Transport, int], list[PushReport]] = defaultdict(list)
    fastest: dict[str, float] = {}
    for size, source in sources.items():
        for transport in transports:
            sync = WeightSync(source, transport=transport, verify=Verify.off, scratch_dir=scratch, config_dir=folder)
            for version in range(repeats + 1):
                report = sync.push([engine], version)
                limits = measure_limits(engine, source, transport, scratch)
                if version:  # the first has imports and first uses in it
                    pushes[transport, size].append(report)
                    fastest |= {name: min(seconds, fastest.get(name, seconds)) for name, seconds in limits.items()}
            sync.close()  # one set of weight groups at a time
    nbytes = next(iter(pushes.values()))[0].nbytes
    print("limits: " + "; ".join(f"{name} {seconds:.3f} s, {nbytes / 1e9 / seconds:.2f} GB/s" for name, seconds in fastest.items()))
    print(f"{'transport':<15} {'bytes':>8} {'time':>8} {'speed':>10}  of memory of limit extra  share of the time")
    met = True
    for (transport, size), reports in pushes.items():
        limits = {name: fastest[name] for name in ("copy", "own", *OWN_MEANS.get(transport, ()))}
        met &= show(f"{transport.value} TP{size}", min(reports, key=lambda report: report.seconds), bucket_bytes, limits)
    return met


def main() -> int:
    """Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    parser.add_argument("--transports", type=Transport, nargs="+", default=[Transport.colocated, Transport.broadcast, Transport.disk])
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2], help="sizes of the trainer")
    arguments = parser.parse_args()
    disable_progress_bar()
    load = os.getloadavg()[0]
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f}, torch {torch.__version__}, bucket {arguments.bucket_mb:g} MiB")
    start_ray(num_cpus=8, object_store_mb=256)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            num_parameters = save_model(Path(scratch) / "model")
            print(f"{num_parameters / 1e6:.1f} million parameters", flush=True)
            bucket_bytes = int(arguments.bucket_mb * 2**20)
            met = measure(Path(scratch) / "model", arguments.tensor_parallel, arguments.transports, arguments.repeats, bucket_bytes)
    finally:
        shutdown()
    print("every target is met" if met else f"target missed: {TARGET:g} of the slowest limit's speed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
