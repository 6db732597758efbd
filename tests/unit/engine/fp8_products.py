"""Matrix products in block-scaled FP8, emulated twice: in the stubs of Transformer Engine, and in transformers.

As its recipe `blockwise` has it, an input and an output's gradient have a scale for each token and 128 of
its numbers, and a weight one for each block of 128 x 128. The gradient of a weight is computed from the
values of the two other products, so that it does not depend on which tokens are next to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from megarl.config.schema import MegatronConfig
from tests.families import example_config

GROUP = 128
BLOCKWISE = MegatronConfig(transformer={"fp8": "e4m3", "fp8_recipe": "blockwise"})


def save_model_of_whole_blocks(folder: Path) -> None:
    """Write a model whose projections consist of whole blocks, also on each of two ranks.

    It has one layer, because elements that two emulations round to neighbors change what later layers round.
    """
    torch.manual_seed(0)
    config = example_config(
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=128,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


# ---- in the stubs of Transformer Engine


def _cast(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    scales = blocks.float().abs().amax(dims, keepdim=True).clamp_min(1e-12) / 448
    return (blocks.float() / scales).to(torch.float8_e4m3fn).float().mul(scales).to(blocks.dtype)


def cast_tokens(hidden: Tensor) -> Tensor:
    return _cast(hidden.unflatten(-1, (-1, GROUP)), (-1,)).flatten(-2)


def cast_weight(weight: Tensor) -> Tensor:
    blocks = weight.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    return _cast(blocks, (1, 3)).flatten(2, 3).flatten(0, 1)


class _Cast(torch.autograd.Function):
    """Replace a tensor by `forward_cast` of it, and its gradient by `backward_cast` of that."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward_cast: Callable[..., Tensor], backward_cast: Callable[..., Tensor]
    ) -> Tensor:
        ctx.backward_cast = backward_cast
        return forward_cast(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_cast(gradients[0]), None, None


def _same(tensor: Tensor) -> Tensor:
    return tensor.clone()


@contextmanager
def stubs_in_fp8(seen: list[int]) -> Generator[None]:
    """Make the stubs multiply in FP8, and keep the weights in FP8 as Transformer Engine does.

    Add the number of tokens of each product to `seen`.
    """
    from megatron.core.tensor_parallel import layers

    from tests.unit.engine.transformer_engine_stubs import StubColumn, StubNormColumn, StubRow

    name = "linear_with_grad_accumulation_and_async_allreduce"
    plain = getattr(layers, name)

    def product(input: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
        seen.append(input.shape[:-1].numel())
        hidden = _Cast.apply(input, cast_tokens, _same)
        output = plain(hidden, _Cast.apply(weight, cast_weight, _same), *arguments, **options)
        output = _Cast.apply(output, _same, cast_tokens)
        # On a CPU, the gated activation is a part of the layer.
        if getattr(weight, "partition_stride", 1) != 2:
            return output
        gate, up = output.chunk(2, -1)
        return silu(gate) * up

    def in_fp8(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: Any, *arguments: Any, **options: Any) -> Any:
            vars(module).setdefault("_fp8_workspaces", {})["weight"] = cast_weight(module.weight.detach())
            with mock.patch.object(layers, name, product):
                return forward(module, *arguments, **options)

        return run

    with ExitStack() as stack:
        for kind in (StubColumn, StubRow, StubNormColumn):
            stack.enter_context(mock.patch.object(kind, "forward", in_fp8(kind.forward)))
        yield


# ---- in transformers, block by block, with float64 quotients


def _rounded(values: Tensor) -> Tensor:
    scale = float((values.double().abs().max() / 448).float())
    if scale == 0:
        return values
    return (values.double() / scale).float().to(torch.float8_e4m3fn).float() * scale


def _by_blocks(matrix: Tensor, num_rows: int) -> Tensor:
    found = matrix.clone()
    for row in range(0, matrix.shape[0], num_rows):
        for column in range(0, matrix.shape[1], GROUP):
            where = (slice(row, row + num_rows), slice(column, column + GROUP))
            found[where] = _rounded(matrix[where])
    return found


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        inputs = _by_blocks(hidden.flatten(0, -2), 1)
        ctx.weight = _by_blocks(weight, GROUP)
        ctx.inputs = inputs
        return (inputs @ ctx.weight.T).view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        rounded = _by_blocks(gradient.flatten(0, -2), 1)
        to_hidden = (rounded @ ctx.weight).view(*gradient.shape[:-1], -1)
        return to_hidden, rounded.T @ ctx.inputs


def multiply_in_fp8(model: torch.nn.Module) -> None:
    """Make all projections of a language model of transformers multiply in FP8, except its output layer."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("_proj"):
            assert module.bias is None
            module.forward = lambda hidden, module=module: _Product.apply(hidden, module.weight)  # type: ignore[method-assign]
