"""Code that runs in the ranks of the tests: each saves its part of a real GPTModel like Megatron's own
programs, in both formats."""

from __future__ import annotations

import multiprocessing
import queue
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import ParallelConfig
from megarl.models.families import read_architecture
from tests.unit.engine.rank_side import build, start

_WITH_TRANSFORMER_ENGINE = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def save_classic(
    parallel: ParallelConfig, model: str, folder: Path, head: str, dtype: torch.dtype, engine_names: bool
) -> None:
    """Save the classic format in a rank.

    With `engine_names`, use the names and extra states of Transformer Engine layers.
    """
    groups = start(parallel)
    engine = build(groups, model, head=head, dtype=dtype)
    states = [_renamed(chunk.state_dict()) if engine_names else chunk.state_dict() for chunk in engine.models]
    pipeline = parallel.pipeline_parallel_size
    name = f"mp_rank_{groups.tensor_rank:02d}" + (f"_{groups.pipeline_rank:03d}" if pipeline > 1 else "")
    (folder / name).mkdir(parents=True)
    content: dict[str, Any] = (
        {"model": states[0]}
        if len(states) == 1
        else {f"model{number}": state for number, state in enumerate(states)}
    )
    torch.save(
        {
            "args": arguments(parallel, model),
            "checkpoint_version": 3.0,
            "iteration": 7,
            "optimizer": {
                "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1e-6}]}
            },
            "rng_state": [{"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.get_rng_state()}],
            **content,
        },
        folder / name / "model_optim_rng.pt",
    )


def save_distributed(
    parallel: ParallelConfig, model: str, folder: Path, head: str, dtype: torch.dtype
) -> None:
    """Save in a rank with Megatron's own writer, with the arguments that its programs store."""
    groups = start(parallel)
    engine = build(groups, model, head=head, dtype=dtype)
    from megatron.core import dist_checkpointing

    names = (
        ["model"] if len(engine.models) == 1 else [f"model{number}" for number in range(len(engine.models))]
    )
    models = {name: chunk.sharded_state_dict() for name, chunk in zip(names, engine.models, strict=True)}
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with _children_allowed():
        dist_checkpointing.save({"args": arguments(parallel, model), "iteration": 7, **models}, str(folder))


@contextmanager
def _children_allowed() -> Iterator[None]:
    """Allow child processes, which ranks of the pool may not have but Megatron's writer starts, together with
    a server for a queue used by one process."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    settings["daemon"] = False

    try:
        yield
    finally:
        settings["daemon"] = True
        filesystem_async._results_queue = before


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    renamed = {}
    for name, value in state.items():
        for plain, fused in _WITH_TRANSFORMER_ENGINE.items():
            name = name.replace(plain, fused)
        renamed[name] = value
    return {**renamed, "decoder.layers.0.self_attention.core_attention._extra_state": None}


def arguments(parallel: ParallelConfig, model: str) -> Namespace:
    from megatron.core.transformer.enums import AttnBackend

    architecture = read_architecture(model)
    return Namespace(
        rank=dist.get_rank(),
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        num_layers=architecture.num_hidden_layers,
        hidden_size=architecture.hidden_size,
        group_query_attention=True,
        num_query_groups=architecture.num_key_value_heads,
        num_experts=None,
        rotary_base=architecture.rope_theta,
        rotary_percent=architecture.partial_rotary_factor,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.auto,
        data_path=None,
    )
