"""Gated delta net layers for padded and packed rows, with tensor, sequence and context parallelism.

Megatron's own module requires CUDA and flash-linear-attention to be built at all, and one kernel per length
for shared prompts. This one has Megatron's parameters and calls the same kernels if they are installed and
the tokens are on a GPU. Otherwise it computes with torch, and once more in the backward pass.

A row begins with an empty state, so a response that shares a prompt has the prompt's tokens before its own
again: only the projections are computed once.

Shapes: S tokens of a rank, R tokens of all rows, F outputs of the input projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.ssm.gated_delta_net import common as megatron_delta_net
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.engine.context import whole_order
from megarl.engine.gated_delta_rule import RowChunks, causal_convolution, gated_delta_rule, row_chunks
from megarl.engine.packed_rows import PackedRows
from megarl.engine.platform import to_device
from megarl.models.architecture import DeltaNet


class DeltaRows(NamedTuple):
    """The rows of a batch, each with all tokens that its state depends on.

    Attributes:
        tokens: (R,) the tokens of all rows among those of the batch in rank order. None: the batch in order.
        own: For each token of the batch in rank order, its index among R. None: the batch in order.
        bounds: (rows + 1,) int64, the boundaries of the rows among R.
        chunks: The chunks of the rows.
    """

    tokens: Tensor | None
    own: Tensor | None
    bounds: Tensor
    chunks: RowChunks


class Sizes(NamedTuple):
    """The parts of the input projection of one rank, and its heads."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def channels(self) -> list[int]:
        """Queries, keys and values, which the convolution sees."""
        key = self.key_heads * self.key_head_dim
        return [key, key, self.value_heads * self.value_head_dim]

    @property
    def parts(self) -> list[int]:
        """Queries, keys, values, gates, and two numbers of each value head."""
        return [*self.channels, self.channels[-1], self.value_heads, self.value_heads]

    def over(self, ranks: int) -> Sizes:
        """Return the sizes of one of several ranks among which the heads are distributed."""
        return self._replace(key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)


class GatedDeltaNet(torch.nn.Module):
    """A layer that replaces Megatron's attention. Its parameters have the names of Megatron's module.

    Args of the constructor are those that Megatron passes to attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        delta_net: DeltaNet,
        input_layer: Any,
        output_layer: Any,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.tensor_group = pg_collection.tp
        self.context_group = pg_collection.cp
        self.eps = config.layernorm_epsilon

        whole = Sizes(
            delta_net.num_key_heads,
            delta_net.num_value_heads,
            delta_net.key_head_dim,
            delta_net.value_head_dim,
        )
        self.sizes = sizes = whole.over(self.tensor_group.size())
        common: dict[str, Any] = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": self.tensor_group,
        }
        self.in_proj = build_module(
            input_layer,
            config.hidden_size,
            sum(whole.parts),
            init_method=config.init_method,
            gather_output=False,
            **common,
        )
        self.out_proj = build_module(
            output_layer,
            delta_net.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            **common,
        )

        # All values are loaded from a folder.
        channels = sum(sizes.channels)
        self.conv1d = torch.nn.Module()
        self.conv1d.weight = torch.nn.Parameter(self._empty(channels, 1, delta_net.conv_kernel_dim))
        self.dt_bias = torch.nn.Parameter(self._empty(sizes.value_heads))
        self.A_log = torch.nn.Parameter(self._empty(sizes.value_heads))
        self.out_norm = torch.nn.Module()
        self.out_norm.weight = torch.nn.Parameter(self._empty(delta_net.value_head_dim))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.config.params_dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """Mix the tokens of each row: (S or S / tp, b, H) -> the same shape. Also returns no bias."""
        projected, _ = self.in_proj(hidden_states)
        length, batch = projected.shape[:2]

        # A padded batch has rows of one length. Padding comes after the tokens of a row.
        if packed_seq_params is None:
            rows = _equal_rows(batch, length, projected.device)
            mixed = self._mix(projected.transpose(0, 1).flatten(0, 1), rows)
            mixed = mixed.unflatten(0, (batch, length)).transpose(0, 1)
        else:
            mixed = self._mix_packed(projected[:, 0], packed_seq_params)[:, None]

        output, _ = self.out_proj(mixed.contiguous())
        return output, None

    def _mix_packed(self, projected: Tensor, packed: PackedRows) -> Tensor:
        """Map a rank's tokens (S, F) to (S, values of the rank).

        With context parallelism, ranks exchange tokens for heads, as in Megatron's module.
        """
        ranks = self.context_group.size()
        if ranks > 1:
            parts = projected.split(self.sizes.parts, -1)
            heads = torch.cat([part.unflatten(-1, (ranks, -1)) for part in parts], -1)  # (S, ranks, F / ranks)
            projected = all_to_all(self.context_group, heads.transpose(0, 1).contiguous()).flatten(0, 1)

        rows = delta_rows(packed)
        tokens = projected if rows.tokens is None else projected.index_select(0, rows.tokens)
        mixed = self._mix(tokens, rows)
        if rows.own is not None:
            mixed = mixed.index_select(0, rows.own)

        if ranks > 1:
            mixed = all_to_all(self.context_group, mixed.unflatten(0, (ranks, -1)))
            mixed = mixed.transpose(0, 1).flatten(1)
        return mixed

    def _mix(self, tokens: Tensor, rows: DeltaRows) -> Tensor:
        """Map the tokens of all rows (R, F) to (R, values), for the heads of this rank."""
        ranks = self.context_group.size()
        rank = self.context_group.rank()
        sizes = self.sizes.over(ranks)
        convolution = torch.cat(
            [
                part.unflatten(0, (ranks, -1))[rank]
                for part in self.conv1d.weight.split(self.sizes.channels)
            ]
        )
        a_log, dt_bias = (
            parameter.unflatten(0, (ranks, -1))[rank] for parameter in (self.A_log, self.dt_bias)
        )
        # Each rank's heads contribute to the gradient of the norm, with or without sequence parallelism.
        norm = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.tensor_group)

        arguments = (tokens, convolution, a_log, dt_bias, norm)
        if tokens.device.type == "cuda" and megatron_delta_net.HAVE_FLA:
            return _mix_by_kernels(*arguments, rows, sizes, self.eps)
        mixed: Tensor = _Recomputed.apply(_mix_by_torch, (rows, sizes, self.eps), *arguments)
        return mixed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters for Megatron's checkpoints. The parts of a projection are separate slices."""
        own = {
            name: parameter
            for name, parameter in self.state_dict(prefix="", keep_vars=True).items()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        described: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"conv1d.weight": 0, "dt_bias": 0, "A_log": 0},
            sharded_offsets,
            tp_group=self.tensor_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        for name in ("in_proj", "out_proj"):
            described |= sharded_state_dict_default(
                getattr(self, name),
                f"{prefix}{name}.",
                sharded_offsets,
                metadata,
                tp_group=self.tensor_group,
            )

        for name, sections in (("in_proj", self.sizes.parts), ("conv1d", self.sizes.channels)):
            key = f"{prefix}{name}.weight"
            described[key] = _in_sections(described[key], sections, self.tensor_group.size())
        return described


def _in_sections(entry: ShardedTensor, sections: list[int], ranks: int) -> ShardedTensorFactory:
    """Describe a shard of rows that consists of a part of each section of the whole tensor."""
    axis = entry.prepend_axis_num
    rank = entry.global_offset[axis] // sum(sections)

    def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        built = []
        whole = 0
        for part in tensor.split(sections):
            offset = list(entry.global_offset)
            offset[axis] = whole * ranks + rank * len(part)
            built.append(
                ShardedTensor(
                    key=key,
                    data=part,
                    dtype=part.dtype,
                    local_shape=tuple(part.shape),
                    global_shape=entry.global_shape,
                    global_offset=tuple(offset),
                    axis_fragmentations=None,
                    replica_id=replica_id,
                    prepend_axis_num=axis,
                )
            )
            whole += len(part)
        return built

    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)


def delta_rows(packed: PackedRows) -> DeltaRows:
    """Return the rows of a packed batch. They are determined once per micro-batch and cached."""
    if packed.delta_rows is None:
        packed.delta_rows = _rows_with_prompts(packed)
    return packed.delta_rows


def _rows_with_prompts(packed: PackedRows) -> DeltaRows:
    device = packed.cu_seqlens_q.device
    starts = [sum(packed.lengths[:number]) for number in range(len(packed.lengths))]
    in_order = packed.place.size == 1 and not packed.shares_prompts

    # Positions in the batch of each row's prompt and of its own tokens.
    lengths = []
    positions = []
    own = []
    total = 0
    for start, length, prompt in zip(starts, packed.lengths, packed.prompts, strict=True):
        total += len(prompt)
        positions += [torch.arange(prompt.start, prompt.stop), torch.arange(start, start + length)]
        own.append(torch.arange(total, total + length))
        lengths.append(len(prompt) + length)
        total += length

    bounds = torch.tensor(lengths).cumsum(0)
    bounds = to_device(torch.cat((bounds.new_zeros(1), bounds)), device)
    chunks = row_chunks(lengths, device)
    if in_order:
        return DeltaRows(None, None, bounds, chunks)

    # Ranks exchange their tokens in rank order.
    order = whole_order(packed.lengths, packed.place.size)
    tokens = order[torch.cat(positions)]
    own_in_rank_order = torch.empty_like(order)
    own_in_rank_order[order] = torch.cat(own)
    return DeltaRows(to_device(tokens, device), to_device(own_in_rank_order, device), bounds, chunks)


def _equal_rows(count: int, length: int, device: torch.device) -> DeltaRows:
    bounds = torch.arange(0, count * length + 1, length, device=device)
    return DeltaRows(None, None, bounds, row_chunks([length] * count, device))


def _mix_by_torch(
    tokens: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Sizes,
    eps: float,
) -> Tensor:
    channels, gate, strength, decay = _split(tokens, sizes)
    channels = causal_convolution(channels, convolution, rows.chunks.offsets)
    query, key, value = _heads(channels, sizes)
    mixed = gated_delta_rule(
        query, key, value, _log_decay(decay, a_log, dt_bias), strength.sigmoid(), rows.chunks
    )
    return _gated_norm(mixed, gate, norm, eps)


def _mix_by_kernels(
    tokens: Tensor,
    convolution: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    rows: DeltaRows,
    sizes: Sizes,
    eps: float,
) -> Tensor:
    """Compute the same as `_mix_by_torch` by flash-linear-attention, called as Megatron's module does."""
    channels, gate, strength, decay = _split(tokens, sizes)
    channels, _ = megatron_delta_net.causal_conv1d(
        x=channels[None],
        weight=convolution[:, 0],
        bias=None,
        activation="silu",
        initial_state=None,
        output_final_state=False,
        cu_seqlens=rows.bounds,
    )
    query, key, value = _heads(channels[0], sizes)
    mixed, _ = megatron_delta_net.chunk_gated_delta_rule(
        megatron_delta_net.l2norm(query.contiguous())[None],
        megatron_delta_net.l2norm(key.contiguous())[None],
        value.contiguous()[None],
        g=_log_decay(decay, a_log, dt_bias)[None],
        beta=strength.sigmoid()[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=rows.bounds,
    )
    return _gated_norm(mixed[0], gate, norm, eps)


def _split(tokens: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """Split (R, F) into what the convolution sees, gates, and two numbers of each value head."""
    return tokens.split([sum(sizes.channels), *sizes.parts[3:]], -1)


def _heads(channels: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (R, value heads, size). Value heads share queries and keys."""
    query, key, value = channels.split(sizes.channels, -1)
    shared = sizes.value_heads // sizes.key_heads
    query, key = (
        part.unflatten(-1, (sizes.key_heads, -1)).repeat_interleave(shared, 1) for part in (query, key)
    )
    return query, key, value.unflatten(-1, (sizes.value_heads, -1))


def _log_decay(decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the logarithm of each head's decay (R, value heads), in float32."""
    return -a_log.float().exp() * F.softplus(decay.float() + dt_bias)


def _gated_norm(mixed: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize each head (R, value heads, D), scale it and multiply it by SiLU of its gate: (R, values).

    It rounds like Hugging Face.
    """
    normalized = weight * F.rms_norm(mixed.float(), weight.shape, None, eps).to(mixed.dtype)
    gated = normalized * F.silu(gate.float()).view_as(mixed)
    return gated.to(mixed.dtype).flatten(1)


class _Recomputed(torch.autograd.Function):
    """A function of tensors that saves its inputs only, and computes its output again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], rest: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.call = function, rest
        return function(*tensors, *rest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        function, rest = ctx.call
        inputs = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad():
            output = function(*inputs, *rest)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in inputs)
