"""RMS norms that Megatron-Core and Transformer Engine lack: of a block's output, and of all heads together.

Both are used with local layers and with those of Transformer Engine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.architecture import Architecture, QKNorm
from megarl.models.layers import routes_tokens


class AllHeadsNorm(torch.nn.Module):
    """RMS norm over all heads of a token, which tensor parallelism distributes over ranks.

    The weight is sharded like the heads. The ranks add up their sums of squares. With `qk_layernorm`,
    Megatron would add up the gradients of the weight over tensor-parallel ranks, which is wrong for a sharded
    one, so it is built with `qk_l2_norm`, which takes any norm (tests/unit/engine/test_megatron_evidence.py).
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **unused: Any
    ) -> None:
        """Create the norm.

        Args:
            eps: Added to the mean square.
            num_heads: The number of heads of all ranks together.
        """
        super().__init__()
        self.eps = eps
        group: Any = get_tensor_model_parallel_group()  # declared as None
        self.tensor_group = group
        self.width = num_heads * hidden_size
        size = self.width // self.tensor_group.size()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize this rank's heads, (..., heads, D)."""
        group = self.tensor_group if self.tensor_group.size() > 1 else None
        normalized: Tensor = _AllHeads.apply(heads.flatten(-2), self.weight, self.eps, self.width, group)
        return normalized.view(heads.shape)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Describe the weight for Megatron's checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


class _AllHeads(torch.autograd.Function):
    """RMSNorm in float32 that is rounded once. Saves its input and one number per token.

    n = x / rms(x); dx = (g w - n mean(g w n)) / rms(x). Both means are over `width` numbers, of which the
    ranks of a group may have parts.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, eps: float, width: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        squares = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32).square_()
        if group is not None:
            dist.all_reduce(squares, group=group)
        scale = squares.div_(width).add_(eps).rsqrt_()

        ctx.save_for_backward(hidden, weight, scale)
        ctx.rest = width, group
        return (hidden * scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, scale = ctx.saved_tensors
        width, group = ctx.rest
        normalized = hidden * scale
        products = gradient * normalized

        projection = (products @ weight.float()).unsqueeze(-1)
        if group is not None:
            dist.all_reduce(projection, group=group)

        of_hidden = (gradient.float() * weight).addcmul_(normalized, projection.div_(width), value=-1)
        of_weight = products.flatten(0, -2).sum(0).to(weight.dtype)
        return of_hidden.mul_(scale).to(hidden.dtype), of_weight, None, None, None


def with_normed_output(linear: type, norm: Any) -> type:
    """Extend a row-parallel layer by a norm of its output, `post_layernorm`.

    Its output is complete on each rank, or the rank's tokens under sequence parallelism.

    Args:
        linear: The class of the layer.
        norm: Builds the norm.
    """

    class NormedLinear(linear):
        linear_class = linear

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any):
            super().__init__(input_size, output_size, config=config, **options)
            self.post_layernorm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)
            self.register_forward_hook(_normalize_output)

    return NormedLinear


def _normalize_output(
    linear: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, None]:
    """Apply the norm. A hook, so that adapters are added before it."""
    output, bias = outputs
    assert bias is None
    return linear.post_layernorm(output), None


def linear_class(module: torch.nn.Module) -> type:
    """Return the class of a linear layer without the norm that `with_normed_output` added."""
    return getattr(type(module), "linear_class", type(module))


def set_norms(layer: ModuleSpec, architecture: Architecture, norm: Any) -> None:
    """Give a layer the norms of an architecture other than those before blocks and of each head.

    Args:
        layer: The layer, whose modules are replaced.
        norm: Builds a norm.
    """
    modules: Any = layer.submodules
    attention = modules.self_attention.submodules
    if architecture.norms.after:
        assert not routes_tokens(architecture), "experts have no norm of their output"
        feed_forward = modules.mlp.keywords["submodules"]  # a functools.partial
        attention.linear_proj = with_normed_output(attention.linear_proj, norm)
        feed_forward.linear_fc2 = with_normed_output(feed_forward.linear_fc2, norm)

    if architecture.qk_norm and architecture.qk_norm_kind is QKNorm.all_heads:
        attention.q_layernorm = partial(AllHeadsNorm, num_heads=architecture.num_attention_heads)
        attention.k_layernorm = partial(AllHeadsNorm, num_heads=architecture.num_key_value_heads)


def drop_norms_before_blocks(layer: ModuleSpec, column_parallel_linear: type) -> None:
    """Remove the norms of both blocks' inputs.

    Args:
        layer: The layer, whose modules are replaced.
        column_parallel_linear: The class of a linear layer without a norm of its input.
    """
    modules: Any = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = IdentityOp
    modules.self_attention.submodules.linear_qkv = column_parallel_linear
    modules.mlp.keywords["submodules"].linear_fc1 = column_parallel_linear
