"""Time how an SGLang engine locates the tensors of a large MoE model: a part of benchmarks/weights.py.

The models have the layers and experts of the real ones, so the same number of tensors and parameters, but
tiny random matrices: the work depends on their number, not on their size. All times are processor seconds of
SGLang's scheduler and of the engine's worker.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from own_loading import MeasuredWorker, PlanningSeconds, build_measured_engine
from transformers import Qwen3MoeConfig

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, RolloutEngineKind
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.models.families import read_architecture
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.manifest import manifest_of


class MoEShape(NamedTuple):
    name: str
    num_layers: int
    num_experts: int


SHAPES = (MoEShape("Qwen3-30B-A3B", 48, 128), MoEShape("Qwen3-235B-A22B", 94, 128))
MOST_AT_FIRST_S = 5.0
MOST_LATER_S = 0.2  # in every later weight sync, also after the engine has slept


def measure_planning() -> bool:
    """Print a row for each model and return whether all targets are met."""
    print(
        "planning where tensors go: processor seconds; `of limit` is relative to SGLang's own loading of as "
        "many tensors"
    )
    columns = "model            tensors     own  first of limit  later  after sleep  checksums"
    print(f"{columns}   target {MOST_AT_FIRST_S:g}, then {MOST_LATER_S:g}")
    with tempfile.TemporaryDirectory() as folder:
        return all([_measure(shape, Path(folder) / shape.name) for shape in SHAPES])


def _measure(shape: MoEShape, folder: Path) -> bool:
    _save_config(shape, folder)
    manifest = manifest_of(read_architecture(str(folder)), torch.float32)
    rollout = RolloutConfig(engine=RolloutEngineKind.sglang, max_concurrency=4)
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.float32), rollout=rollout, device=Device.cpu
    )
    pool = RayResourcePool([1], use_gpu=False, name=shape.name)
    worker = RayClassWithInitArgs(MeasuredWorker, partial(build_measured_engine, spec))
    engine = RayWorkerGroup(pool, worker, role=shape.name, phase_time_limit_s=1800)

    try:
        found: PlanningSeconds = engine.call_rank(0, MeasuredWorker.planning_seconds, manifest).get()
    finally:
        engine.shutdown()
        pool.release()

    print(
        f"{shape.name:<16} {len(manifest):>7} {found.own:7.2f} {found.first:6.2f} "
        f"{found.first / found.own:8.2f} {found.later:6.2f} "
        f"{found.after_sleep:12.2f} {found.checksums:10.2f}",
        flush=True,
    )
    return found.first <= MOST_AT_FIRST_S and max(found.later, found.after_sleep) <= MOST_LATER_S


def _save_config(shape: MoEShape, folder: Path) -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        num_experts_per_tok=8,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,  # pyrefly: ignore[unexpected-keyword]  # in **kwargs
        vocab_size=128,
        max_position_embeddings=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
