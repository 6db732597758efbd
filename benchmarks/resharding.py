"""How fast trained weights reach SGLang on this machine's CPU, beside two limits measured in the same run.

    python benchmarks/resharding.py [--repeats 5] [--bucket-mb 64] [--tensor-parallel 1 2]

A Qwen2-style model of 100 million parameters in float32, in real Megatron-Core ranks on Ray, is pushed into one real SGLang
engine by each transport, as a training step does: pause, load, finish, stamp, flush, resume; without verification. Measured
are the fastest of several pushes, in turns with the limits, so that what else runs on the machine slows all of them.

copy      of the same tensors to other memory, in SGLang's process
own       SGLang's `model.load_weights` of the same tensors, when they are already in its process

The target is half the speed of the slower limit. `extra` is the most memory that a trainer rank took for a push, as the
kernel counts it, in buckets; two are allowed. The stages (see PushReport in megarl/workers/weight_sync.py) are shares of the
push's time; they overlap.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from own_loading import MeasuredWorker, build_measured_engine
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import disable_progress_bar

from megarl.config.architecture import read_architecture
from megarl.config.schema import (
    Device,
    DType,
    EngineConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutEngineKind,
    Transport,
    Verify,
)
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker_class import RayClassWithInitArgs
from megarl.workers.engines import EngineSpec
from megarl.workers.megatron import MegatronWorker, ModelSpec
from megarl.workers.weight_sync import PushReport, WeightSource, WeightSync

TARGET = 0.5  # of the slower limit's speed
TRANSPORTS = (Transport.colocated, Transport.broadcast, Transport.disk)


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
    spec = EngineSpec(path=str(folder), dtype=DType.float32, device=Device.cpu, rollout=rollout)
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
    group = start_group(f"trainer-tp{tensor_parallel_size}", tensor_parallel_size, RayClassWithInitArgs(MegatronWorker, spec))
    return WeightSource(group=group, architecture=architecture, parallel=parallel, dtype=DType.float32, bucket_bytes=bucket_bytes)


def show(name: str, report: PushReport, bucket_bytes: int, limit_s: float) -> bool:
    """Prints a line; returns whether the target is met."""
    share = limit_s / report.seconds
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
    extra = report.extra_bytes / bucket_bytes
    print(
        f"{name:<15} {report.nbytes / 1e6:5.0f} MB {report.seconds:6.3f} s {speed:5.2f} GB/s {share:5.2f}   {extra:4.2f}   {stages}",
        flush=True,
    )
    return share >= TARGET


def measure(folder: Path, tensor_parallel_sizes: list[int], repeats: int, bucket_bytes: int) -> bool:
    """Returns whether all targets are met."""
    engine = start_engine(folder)
    sources = {size: start_trainer(folder, size, bucket_bytes) for size in tensor_parallel_sizes}
    shapes = [(name, meta.shape) for name, meta in next(iter(sources.values())).manifest.items()]
    syncs = {
        f"{transport.value} TP{size}": WeightSync(
            source, transport=transport, verify=Verify.off, scratch_dir=folder.parent / "scratch", config_dir=folder
        )
        for size, source in sources.items()
        for transport in TRANSPORTS
    }
    pushes: dict[str, list[PushReport]] = {name: [] for name in syncs}
    limits = []
    for version in range(repeats + 1):
        for name, sync in syncs.items():
            report = sync.push([engine], version)
            sync.close()  # one set of weight groups at a time
            if version:  # the first has imports and first uses in it
                pushes[name].append(report)
        limits.append(engine.execute_rank_zero_sync("limits", shapes))
    copy_s, load_s = (min(seconds) for seconds in zip(*limits[1:], strict=True))
    nbytes = next(iter(pushes.values()))[0].nbytes
    print(f"limits: copy {copy_s:.3f} s, {nbytes / 1e9 / copy_s:.2f} GB/s; own {load_s:.3f} s, {nbytes / 1e9 / load_s:.2f} GB/s")
    print(f"{'transport':<15} {'bytes':>8} {'time':>8} {'speed':>10}  of limit extra   share of the time")
    return all(
        [show(name, min(reports, key=lambda report: report.seconds), bucket_bytes, max(copy_s, load_s)) for name, reports in pushes.items()]
    )


def main() -> int:
    """Returns 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=64.0)
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
            met = measure(Path(scratch) / "model", arguments.tensor_parallel, arguments.repeats, int(arguments.bucket_mb * 2**20))
    finally:
        shutdown()
    print("every target is met" if met else f"target missed: {TARGET:g} of the slower limit's speed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
