"""Changes to the engine of simulated ranks, mainly mistakes, for models in a folder with the name of the change.

Imports no torch before it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_ready_with_mistakes() -> None:
    """Prepare the process from which megarl.rehearsal.processes forks ranks."""
    from megarl.rehearsal.processes import make_ready

    make_ready()
    from megarl.rehearsal import rank

    rehearse = rank.rehearse

    def planted(request: Any, *report: Any) -> Any:
        plant = PLANTS.get(Path(request.config.model.path).name)
        if plant is not None:
            plant(request.rank)
        return rehearse(request, *report)

    rank.rehearse = planted  # type: ignore[assignment]


def weight_of_the_head_on_the_host(rank: int) -> None:
    from megarl.engine.model import ModelChunk

    weight = ModelChunk.output_weight
    ModelChunk.output_weight = lambda model: weight(model).detach().cpu()  # type: ignore[method-assign]


def another_order_on_rank_one(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megarl.engine import engine

    score = engine.MegatronEngine.score

    def planted(self: Any, *arguments: Any) -> Any:
        numbers = torch.ones(3, device="cuda")
        flags = torch.ones(5, device="cuda")
        for tensor in (flags, numbers) if rank == 1 else (numbers, flags):
            dist.all_reduce(tensor, group=self.groups.tensor)
        return score(self, *arguments)

    engine.MegatronEngine.score = planted  # type: ignore[method-assign]


def another_order_between_groups_on_rank_one(rank: int) -> None:
    import torch
    import torch.distributed as dist

    from megarl.engine import engine

    score = engine.MegatronEngine.score

    def planted(self: Any, *arguments: Any) -> Any:
        groups = self.groups.tensor, dist.group.WORLD
        for group in reversed(groups) if rank == 1 else groups:
            dist.all_reduce(torch.ones(3, device="cuda"), group=group)
        return score(self, *arguments)

    engine.MegatronEngine.score = planted  # type: ignore[method-assign]


def a_number_that_nobody_knows(rank: int) -> None:
    from megarl.engine import engine

    score = engine.MegatronEngine.score

    def planted(self: Any, micro_batch: Any, hidden: Any, *arguments: Any) -> Any:
        assert hidden.argmax(-1).tolist()
        return score(self, micro_batch, hidden, *arguments)

    engine.MegatronEngine.score = planted  # type: ignore[method-assign]


def a_call_less_on_rank_one(rank: int) -> None:
    from megarl.engine import data_parallel

    if rank == 1:
        data_parallel.finalize_gradients = lambda chunks, *arguments, **keywords: None


def gradients_in_sixteen_bits(rank: int) -> None:
    from megarl.engine import data_parallel

    made = data_parallel.DistributedDataParallelConfig
    data_parallel.DistributedDataParallelConfig = lambda **settings: made(
        **{**settings, "grad_reduce_in_fp32": False}
    )


def a_token_less_from_the_first_stage(rank: int) -> None:
    from megarl.engine.model import ModelChunk

    forward = ModelChunk.forward

    def planted(model: Any, *arguments: Any, **keywords: Any) -> Any:
        hidden = forward(model, *arguments, **keywords)
        return hidden if model.post_process else hidden[:-1].contiguous()

    ModelChunk.forward = planted  # type: ignore[method-assign]


def another_shape_than_the_layout(rank: int) -> None:
    import torch

    from megarl.engine.layers import RMSNorm

    made = RMSNorm.__init__

    def planted(norm: Any, config: Any, hidden_size: int, *arguments: Any, **keywords: Any) -> None:
        made(norm, config, hidden_size, *arguments, **keywords)
        norm.weight = torch.nn.Parameter(torch.ones(hidden_size + 1, dtype=config.params_dtype))

    RMSNorm.__init__ = planted  # type: ignore[method-assign]


def transformer_engine(rank: int) -> None:
    """Use layers of stubs of Transformer Engine's modules. This is not a mistake."""
    from tests.unit.engine import transformer_engine_stubs

    transformer_engine_stubs.install(True)
    from megarl.engine import engine

    built = engine.build_chunks

    def planted(*arguments: Any, **keywords: Any) -> Any:
        chunks = built(*arguments, **keywords)
        assert any(name.endswith("linear_qkv.layer_norm_weight") for name, _ in chunks[0].named_parameters())
        assert chunks[0].config.apply_rope_fusion
        return chunks

    engine.build_chunks = planted


PLANTS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        weight_of_the_head_on_the_host,
        another_order_on_rank_one,
        another_order_between_groups_on_rank_one,
        a_number_that_nobody_knows,
        a_call_less_on_rank_one,
        gradients_in_sixteen_bits,
        a_token_less_from_the_first_stage,
        another_shape_than_the_layout,
        transformer_engine,
    )
}
