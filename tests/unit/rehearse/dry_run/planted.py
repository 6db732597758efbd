"""Changes to the engine of simulated ranks, mainly mistakes, for models in a folder with the name of the change.

Imports no torch before it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_ready_with_mistakes() -> None:
    """Prepare the process from which megarl.rehearse.dry_run.processes forks ranks."""
    from megarl.rehearse.dry_run.processes import make_ready

    make_ready()
    from megarl.rehearse.dry_run import rank

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


def fused_layers(rank: int) -> None:
    """Assert that the layers are those of Transformer Engine. This is not a mistake."""
    from megarl.engine import engine

    built = engine.build_chunks

    def checked(*arguments: Any, **keywords: Any) -> Any:
        chunks = built(*arguments, **keywords)
        decoder = chunks[0].decoder
        fused = [module for module in decoder.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
        assert len(fused) == 4 * len(decoder.layers)  # queries, keys and values; output; the MLP's two
        for module in (*fused, decoder.final_layernorm):
            assert any(kind.__module__.startswith("transformer_engine.") for kind in type(module).__mro__)
        assert any(name.endswith("linear_qkv.layer_norm_weight") for name, _ in decoder.named_parameters())
        assert type(decoder.layers[-1]).__name__ == "DecoderLayer"
        assert chunks[0].config.apply_rope_fusion
        return chunks

    engine.build_chunks = checked


def an_argument_less_for_the_fused_norm(rank: int) -> None:
    """Call the compiled norm as an older version of Transformer Engine declared it."""
    import transformer_engine.pytorch.module._common as common
    import transformer_engine_torch as compiled

    forward = compiled.rmsnorm_fwd
    common.tex.rmsnorm_fwd = lambda *arguments: forward(*arguments[:-1])


def a_number_instead_of_a_tensor_for_rope(rank: int) -> None:
    import transformer_engine_torch as compiled

    forward = compiled.fused_rope_forward

    def planted(*arguments: Any) -> Any:
        return forward(*arguments[:2], 0, *arguments[3:])

    compiled.fused_rope_forward = planted  # type: ignore[attr-defined]


def an_unknown_name_for_a_fused_product(rank: int) -> None:
    import transformer_engine_torch as compiled

    product = compiled.generic_gemm

    def planted(*arguments: Any, **keywords: Any) -> Any:
        return product(*arguments, **keywords, accumulate_in_fp32=True)

    compiled.generic_gemm = planted  # type: ignore[attr-defined]


def another_shape_of_a_gradient_buffer(rank: int) -> None:
    """Give a weight a gradient buffer of another shape than the layer's product."""
    from megarl.engine import engine

    wrap = engine.wrap_models

    def planted(models: Any, *arguments: Any) -> Any:
        import torch

        wrapped = wrap(models, *arguments)
        weight = models[0].decoder.layers[0].mlp.linear_fc2.weight
        weight.main_grad = torch.zeros(weight.shape[0], weight.shape[1] + 1, device="cuda")
        return wrapped

    engine.wrap_models = planted


def separate_gradients(rank: int) -> None:
    from megarl.engine import model

    model.fuse_gradient_accumulation = lambda chunk: None


def unmarked_parameters(rank: int) -> None:
    """Drop the mark of a column-parallel layer."""
    from megarl.engine import model

    mark = model.mark_cut_parameters

    def planted(chunk: Any) -> None:
        mark(chunk)
        chunk.decoder.layers[0].mlp.linear_fc1.weight.tensor_model_parallel = False

    model.mark_cut_parameters = planted


def another_optimizer(rank: int) -> None:
    import torch
    from megatron.core import optimizer

    class Plain(torch.optim.AdamW):
        """Accepts the arguments that Megatron gives to Transformer Engine's optimizer."""

        def __init__(self, params: Any, *, lr: float, weight_decay: float, **others: Any) -> None:
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    optimizer.Adam = Plain


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
        fused_layers,
        an_argument_less_for_the_fused_norm,
        a_number_instead_of_a_tensor_for_rope,
        an_unknown_name_for_a_fused_product,
        another_shape_of_a_gradient_buffer,
        separate_gradients,
        unmarked_parameters,
        another_optimizer,
    )
}
