"""The layers that replace Megatron's: the whole layer, its norm and its attention core.

They support padded and packed batches, on a CPU and on CUDA. None of them reads anything from the device: the
sequence lengths were known on the host when the batch was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megarl.engine.moe_router import RoutedTokens
from megarl.engine.packed_rows import AttentionPlan, PackedRows
from megarl.engine.shared_prompts import attend as attend_shared

_CAUSAL = (-1, 0)  # everything before a token, nothing after it
# torch's CPU kernel processes this many keys at a time, and does not skip masked keys within a block. Up to
# this length, responses with a shared prompt are one masked call; beyond it they are two, so that whole
# blocks are skipped.
KEY_BLOCK = 512


class RMSNorm(torch.nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019).

    On a CPU it rounds like Hugging Face: normalized in float32, rounded to the dtype of the weights, then
    scaled. On CUDA it is a single kernel that reads and writes the tokens once and rounds once, after
    scaling: in bfloat16, an element can differ from Hugging Face's by one unit in the last place.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens. Megatron sums the gradients of
        # marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]

    def forward(self, hidden: Tensor) -> Tensor:
        # One plus the weight would be rounded in 16 bits.
        if self.is_zero_centered:
            weight = 1.0 + self.weight.float()
            if hidden.dtype == torch.float32:
                return _CPUNorm.apply(hidden, weight, self.eps)
            return _WideNorm.apply(hidden, weight, self.eps)
        if hidden.device.type == "cuda":
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        if hidden.dtype == torch.float32:
            return _CPUNorm.apply(hidden, self.weight, self.eps)
        return self.weight * F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype)


class _CPUNorm(torch.autograd.Function):
    """RMSNorm for CPUs, where torch's own consists of small operations and twice as many in backward.

    n = x / rms(x); dx = (g w - n mean(g w n)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        # In place, except for what the backward pass needs.
        mean_square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normalized = hidden * scale
        ctx.save_for_backward(normalized, scale, weight)
        return normalized * weight

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normalized, scale, weight = ctx.saved_tensors

        # The same products give the weight's gradient and the projection in the input's gradient.
        products = (gradient * normalized).flatten(0, -2)
        projection = (products @ weight).div_(weight.shape[0]).view(scale.shape)
        grad_hidden = (gradient * weight).addcmul_(normalized, projection, value=-1).mul_(scale)
        return grad_hidden, products.sum(0), None


class _WideNorm(torch.autograd.Function):
    """RMSNorm of 16-bit tokens with a float32 weight. It rounds once, and saves the tokens in 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = hidden.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, scale, weight)
        return wide.mul_(scale).mul_(weight).to(hidden.dtype)

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, scale, weight = ctx.saved_tensors
        # With s = 1 / rms(h), n = h s and y = n w: dh = s (g w - n mean(g w n)), and dw = sum(g n).
        normalized = hidden.float().mul_(scale)
        products = (gradient * normalized).flatten(0, -2)
        projection = (products @ weight).div_(weight.shape[0]).view(scale.shape)
        grad_hidden = (gradient * weight).addcmul_(normalized, projection, value=-1).mul_(scale)
        return grad_hidden.to(hidden.dtype), products.sum(0), None


class AttentionCore(torch.nn.Module):
    """Causal attention that replaces Megatron's `core_attention`.

    On CUDA it uses torch's `varlen_attn` for all sequences of a packed batch at once. On a CPU, and for
    float32, it uses `scaled_dot_product_attention`.

    Padded: query (S, b, heads, D), key and value (S, b, groups, D) -> (S, b, heads * D). Sequences start at
    position 0 and are padded on the right, so the causal mask is sufficient. Values may be narrower.
    Packed: query (T, heads, D), key and value (T, groups, D) -> (T, heads * D), with the boundaries in
    `packed_seq_params`. With context parallelism, each rank has its own queries and attends to the keys and
    values of all ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert config.attention_dropout == 0.0
        self.context: dist.ProcessGroup | None = (
            pg_collection.cp if config.context_parallel_size > 1 else None
        )
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        assert attention_bias is None
        assert attention_mask is None

        # A padded batch is one call, for which the causal mask is sufficient.
        if packed_seq_params is None:
            sequence, batch = query.shape[:2]
            width = value.shape[-1]
            # The kernels require one head size. Megatron pads the values of packed batches itself.
            if width < query.shape[-1]:
                value = F.pad(value, (0, query.shape[-1] - width))
            mixed = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
            return mixed[..., :width].permute(2, 0, 1, 3).reshape(sequence, batch, -1)

        on_cuda = query.device.type == "cuda"

        # With context parallelism, this rank's queries see the keys and values of all ranks.
        if self.context is not None:
            key, value = whole_keys(key, value, self.context)

        # One masked call for float32 on CUDA, and on a CPU if no whole block of keys could be skipped.
        by_mask = query.dtype == torch.float32 if on_cuda else packed_seq_params.max_seqlen_kv <= KEY_BLOCK
        if packed_seq_params.shared is not None and not by_mask:
            return attend_shared(query, key, value, packed_seq_params.shared, self.softmax_scale)
        if on_cuda and query.dtype != torch.float32:
            if self.context is not None:
                return attend_pieces(query, key, value, packed_seq_params, self.softmax_scale)
            return self.attend_varlen(query, key, value, packed_seq_params)

        return self.attend_packed(query, key, value, packed_seq_params.attention_plan)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend to all keys before the first query's own, and causally to the rest.

        Args:
            query: (b, heads, S, D).
            key: (b, groups, before + S, D).
            value: (b, groups, before + S, D).

        Returns:
            (b, heads, S, D).
        """
        # With keys before the first query the mask is shifted, which `is_causal` cannot express.
        before = key.shape[2] - query.shape[2]
        mask = (
            torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(before)
            if before
            else None
        )

        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=not before,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def attend_varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        boundaries = packed.cu_seqlens_q
        longest = packed.max_seqlen_q
        mixed = varlen_attn(
            query,
            key,
            value,
            boundaries,
            boundaries,
            longest,
            longest,
            scale=self.softmax_scale,
            window_size=_CAUSAL,
        )

        return mixed.flatten(1)

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        calls, gather, gather_keys, scatter = plan
        heads, dim = query.shape[1:]
        queries = query
        keys = key
        values = value

        # Arrange the pieces of each call side by side, padded to one length.
        if gather is not None and gather_keys is not None:
            gathered = ((query, gather), (key, gather_keys), (value, gather_keys))
            queries, keys, values = (tensor.flatten(1).index_select(0, at) for tensor, at in gathered)

        # Each piece has its own keys after those that all of its tokens see.
        query_shapes = [(sequences, length) for sequences, length, _ in calls]
        key_shapes = [(sequences, before + length) for sequences, length, before in calls]
        mixed = []

        for call in zip(
            _cut(queries, query_shapes, dim),
            _cut(keys, key_shapes, dim),
            _cut(values, key_shapes, dim),
            strict=True,
        ):
            mixed.append(self._attend(*call).transpose(1, 2).reshape(-1, heads * dim))

        # Restore the order of the batch and drop the padding.
        joined = torch.cat(mixed) if len(mixed) > 1 else mixed[0]
        return joined if scatter is None else joined.index_select(0, scatter)


def _cut(heads: Tensor, shapes: list[tuple[int, int]], dim: int) -> Iterator[Tensor]:
    """Split heads (N, heads, dim) or (N, heads * dim) into (count, heads, length, dim) for each shape."""
    # The gradient of a split is a copy, even with a single part.
    parts = heads.split([count * length for count, length in shapes]) if len(shapes) > 1 else [heads]
    for part, shape in zip(parts, shapes, strict=True):
        yield part.view(*shape, -1, dim).transpose(1, 2)


def whole_keys(key: Tensor, value: Tensor, context: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values, (T / C, groups, D) each, to (T, groups, D) each, in rank order.

    Gradients are summed over the ranks.
    """
    # Keys and values share one collective.
    both = gather_from_sequence_parallel_region(
        torch.cat([key, value], 1), tensor_parallel_output_grad=True, group=context
    )
    whole = both.split(key.shape[1], dim=1)
    return whole[0], whole[1]


def attend_pieces(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scale: float | None
) -> Tensor:
    """Attend with context parallelism and without shared prompts, on CUDA in 16-bit dtypes.

    Args:
        query: This rank's queries, (T / C, heads, D).
        key: All keys (T, groups, D), from `whole_keys`.
        value: All values (T, groups, D), from `whole_keys`.

    Returns:
        (T / C, heads * D).
    """
    places, sequences = packed.key_places
    # The maxima are known on the host, so the device is not asked for them.
    mixed = varlen_attn(
        query,
        key.index_select(0, places),
        value.index_select(0, places),
        sequences.query_bounds,
        sequences.key_bounds,
        max(sequences.queries),
        max(sequences.keys),
        scale=scale,
        window_size=_CAUSAL,  # counted from the last query and the last key of each piece
    )
    return mixed.flatten(1)


def varlen_attn(query: Tensor, key: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Call torch's function of this name, also with fewer key heads than query heads.

    Its module is imported here because it loads torch's compiler: 0.7 s of processor time in each process,
    and only CUDA needs it.
    """
    from torch.nn.attention import varlen

    mixed = varlen.varlen_attn(query, key, *arguments, enable_gqa=query.shape[1] != key.shape[1], **options)
    assert isinstance(mixed, Tensor), "only the output was requested"

    return mixed


def sharing_prompts(attention: type) -> Any:
    """Extend Transformer Engine's attention, in which sequences are independent, to shared prompts."""

    class SharingAttention(attention):
        def __init__(
            self,
            config: TransformerConfig,
            *arguments: Any,
            softmax_scale: float | None = None,
            pg_collection: Any = None,
            **options: Any,
        ) -> None:
            super().__init__(
                config, *arguments, softmax_scale=softmax_scale, pg_collection=pg_collection, **options
            )
            self.own_scale = softmax_scale
            self.context: dist.ProcessGroup | None = (
                pg_collection.cp if config.context_parallel_size > 1 else None
            )
            self.gathers = self.context is not None and config.cp_comm_type == "all_gather"

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            *arguments: Any,
            packed_seq_params: PackedRows | None = None,
            **options: Any,
        ) -> Tensor:
            # Transformer Engine's kernels treat sequences as independent. Its ring expects the tokens where
            # `context` has them.
            if packed_seq_params is not None and (packed_seq_params.shares_prompts or self.gathers):
                if self.context is not None:
                    key, value = whole_keys(key, value, self.context)
                if packed_seq_params.shared is None:
                    return attend_pieces(query, key, value, packed_seq_params, self.own_scale)
                return attend_shared(query, key, value, packed_seq_params.shared, self.own_scale)
            return super().forward(
                query, key, value, *arguments, packed_seq_params=packed_seq_params, **options
            )

    return SharingAttention


class DecoderLayer(TransformerLayer):
    """Megatron's layer with what some models need in all or some of their layers.

    It passes the routed tokens to its router and its indexer, if it has them. The first layers of a model
    that reads images add features of images to their output (see `Deepstack`). The last layer keeps, after
    its attention, only the tokens of packed rows that predict another; for the attention, all tokens are keys
    and values.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if isinstance(self.mlp, MoELayer):
            self.mlp.register_forward_pre_hook(_tell, with_kwargs=True)
            # Recomputed as a whole, so that the router receives the tokens again.
            self.recompute_mlp = self.mlp.moe_layer_recompute
            self.mlp.moe_layer_recompute = False

    def forward(
        self,
        *arguments: Any,
        attention_bias: RoutedTokens | None = None,
        packed_seq_params: PackedRows | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        # Dense layers also receive the routers' tokens as an attention bias, which they must not apply.
        options["padding_mask"] = attention_bias
        core: Any = getattr(self.self_attention, "core_attention", None)
        if hasattr(core, "indexer"):
            core.tokens = attention_bias
        outputs: Any = super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        deepstack = None if packed_seq_params is None else packed_seq_params.deepstack
        if deepstack is None or self.layer_number > len(deepstack[0]):
            return outputs

        hidden, context = outputs
        features, places = deepstack
        return hidden.index_add(0, places, features[self.layer_number - 1][:, None]), context

    def _forward_attention(
        self, *arguments: Any, packed_seq_params: PackedRows | None = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """Run the attention: hidden (T, 1, H), in the last layer -> (K, 1, H). Also returns the context."""
        hidden, context = super()._forward_attention(
            *arguments, packed_seq_params=packed_seq_params, **options
        )
        predicting = None if packed_seq_params is None else packed_seq_params.predicting
        if predicting is not None and self.layer_number == self.config.num_layers:
            hidden = hidden.index_select(0, predicting)
        return hidden, context


def _tell(
    experts: MoELayer, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    router: Any = experts.router
    router.tokens = options.pop("padding_mask", None)
    return arguments, options
