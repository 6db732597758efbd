"""The two layers Megatron has no CPU version of: RMSNorm and the attention core, for padded and for packed batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# What a call of attention costs beside its work, as pairs of tokens: sequences share a padded call where that costs less.
CALL_COST = 1024


class RMSNorm(torch.nn.Module):
    """Root mean square norm with Hugging Face's rounding: normalised in float32, cast, then scaled (Zhang & Sennrich 2019)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens: Megatron sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.dtype == torch.float32 and hidden.device.type == "cpu":
            return _CPUNorm.apply(hidden, self.weight, self.eps)
        if hidden.dtype == torch.float32:
            return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        return self.weight * F.rms_norm(hidden.float(), self.weight.shape, None, self.eps).to(hidden.dtype)


class _CPUNorm(torch.autograd.Function):
    """torch's own is made of small operations on a CPU, and its gradient of twice as many as these.

    n = x / rms(x); dx = (g w - n mean(g w n)) / rms(x).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
        scale = mean_square.add_(eps).rsqrt_()
        normalised = hidden * scale
        ctx.save_for_backward(normalised, scale, weight)
        return normalised * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        normalised, scale, weight = ctx.saved_tensors
        grad_weight = (gradient * normalised).flatten(0, -2).sum(0)
        grad_hidden = gradient * weight
        projection = (grad_hidden * normalised).mean(-1, keepdim=True)
        return grad_hidden.sub_(normalised * projection).mul_(scale), grad_weight, None


class AttentionCore(torch.nn.Module):
    """Causal attention on `scaled_dot_product_attention`, in the place of Megatron's `core_attention`.

    Padded: query (S, b, heads, D), key and value (S, b, groups, D) -> (S, b, heads * D); sequences start at position 0
    and are padded on the right, so the causal mask is enough. Packed: (T, heads, D) -> (T, heads * D), with the
    boundaries in `packed_seq_params`.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        assert config.context_parallel_size == 1
        assert config.attention_dropout == 0.0
        self.softmax_scale = softmax_scale

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(b, heads, S, D), (b, groups, S, D) x 2 -> (b, heads, S, D)."""
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert attention_bias is None
        assert attention_mask is None
        if packed_seq_params is not None:
            return self._forward_packed(query, key, value, attention_plan(packed_seq_params))
        sequence, batch = query.shape[:2]
        mixed = self._attend(*(tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)))
        return mixed.permute(2, 0, 1, 3).reshape(sequence, batch, -1)

    def _forward_packed(self, query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan) -> Tensor:
        tokens, heads, dim = query.shape
        parts = [tensor.flatten(1) for tensor in (query, key, value)]
        if plan.gather is not None:
            parts = [tensor.index_select(0, plan.gather) for tensor in parts]
        sizes = [count * length for count, length in plan.shapes]
        mixed = []
        for shape, *call in zip(plan.shapes, *(tensor.split(sizes) for tensor in parts), strict=True):
            batch = (tensor.view(*shape, -1, dim).transpose(1, 2) for tensor in call)
            mixed.append(self._attend(*batch).transpose(1, 2).reshape(-1, heads * dim))
        joined = torch.cat(mixed)
        return joined if plan.scatter is None else joined.index_select(0, plan.scatter)


class AttentionPlan(NamedTuple):
    """The calls that attend a packed batch of T tokens, each a batch of sequences padded to one length.

    shapes: (sequences, length) of each call. gather: (N,) the tokens of all calls, N - T of them padding; scatter: (T,)
    where each token stands among them. Both None where that is the order in which the tokens already are.
    """

    shapes: list[tuple[int, int]]
    gather: Tensor | None
    scatter: Tensor | None


def attention_plan(packed: PackedSeqParams) -> AttentionPlan:
    """Made once per micro-batch and kept on `packed`, because every layer asks.

    Padding repeats a sequence's last token: it comes after all real ones, so that causal attention keeps it from
    them, and what is computed for it is dropped, so that its gradient is zero.
    """
    kept = getattr(packed, "megarl_attention_plan", None)
    if kept is not None:
        return kept
    boundaries = packed.cu_seqlens_q.long()
    starts, lengths = boundaries[:-1], boundaries.diff()
    shapes, gathered, real = [], [], []
    for members in _share_calls(lengths.tolist()):
        rows = torch.tensor(members, device=boundaries.device)
        length = lengths[rows].max()
        shapes.append((len(members), int(length)))
        offset = torch.arange(int(length), device=boundaries.device)
        last = lengths[rows, None] - 1
        gathered.append((starts[rows, None] + torch.minimum(offset, last)).flatten())
        real.append((offset <= last).flatten())
    gather, is_real = torch.cat(gathered), torch.cat(real)
    tokens = torch.arange(int(boundaries[-1]), device=boundaries.device)
    if torch.equal(gather, tokens):
        plan = AttentionPlan(shapes, None, None)
    else:
        scatter = torch.empty_like(tokens)
        scatter[gather[is_real]] = is_real.nonzero()[:, 0]
        plan = AttentionPlan(shapes, gather, scatter)
    packed.megarl_attention_plan = plan  # type: ignore[attr-defined]
    return plan


def _share_calls(lengths: list[int]) -> list[list[int]]:
    """Sequences by the call they share: longest first, one joins those before it unless padding it costs more than a call."""
    calls: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        assert lengths[number] > 0, "a packed batch holds no empty sequence"
        if calls and lengths[calls[-1][0]] ** 2 - lengths[number] ** 2 <= CALL_COST:
            calls[-1].append(number)
        else:
            calls.append([number])
    return sorted(sorted(members) for members in calls)
