"""FlashAttention 3 and 4 under torch's operators: torch's adapters get what they need from shared prompts.

The kernels are replaced by slow ones for a CPU, with the arguments that torch's adapters pass to the packages.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa3, _fa4

from megarl.config.schema import Device, FlashAttention
from tests.ranks import RankPool
from tests.unit.engine.comparison import max_difference
from tests.unit.engine.test_layers import (
    GROUPS,
    HEADS,
    SHARING,
    Attended,
    Heads,
    SlowFlashOperators,
    dense_attention,
    make_heads,
)


def run_fa4_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    return_lse: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: None,
    page_table: None,
    num_splits: int,
    out: None,
) -> Any:
    """Replace flash_attn.cute.interface._flash_attn_fwd of flash-attn-4 4.0.0b36."""
    assert return_lse
    assert (seqused_k, page_table, num_splits, out) == (None, None, 1, None)
    assert (window_size_left, window_size_right) == (None, 0 if causal else None)
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return slow_forward(query, key, value, bounds, causal, softmax_scale)[:2]


def run_fa4_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    gradient: Tensor,
    log_sum: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    window_size_left: int | None,
    window_size_right: int | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    """Replace flash_attn.cute.interface._flash_attn_bwd, which derives the maxima from the boundaries."""
    assert (window_size_left, window_size_right) == (None, 0 if causal else None)
    assert not deterministic
    assert log_sum.shape == (query.shape[1], query.shape[0])
    bounds = (cu_seqlens_q, cu_seqlens_k, int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max()))
    return slow_backward(gradient, query, key, value, out, log_sum, bounds, causal, softmax_scale)


def run_fa3_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Replace torch.ops.flash_attn_3.fwd, whose arguments have positions only."""
    assert len(rest) == 31
    bounds = (rest[4], rest[5], rest[9], rest[10])
    scale, causal, left, right = rest[20:24]
    assert (left, right) == (-1, 0 if causal else -1)
    assert {rest[index] for index in (0, 1, 2, 3, 6, 7, 8)} == {None}
    output, log_sum, *_ = slow_forward(query, key, value, bounds, causal, scale)
    return output, log_sum, None, None


def run_fa3_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor, *rest: Any
) -> None:
    """Replace torch.ops.flash_attn_3.bwd, which writes into given tensors."""
    *totals, cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, left, right = rest[:13]
    assert (used_q, used_k, left, right) == (None, None, -1, 0 if causal else -1)
    found = slow_backward(
        gradient, query, key, value, output, log_sum, (cu_q, cu_k, max_q, max_k), causal, scale
    )
    for total, part in zip(totals, found, strict=True):
        total.copy_(part)


def window(causal: bool) -> dict[str, int]:
    return {"window_size_left": -1, "window_size_right": 0 if causal else -1}


def slow_forward(query: Tensor, key: Tensor, value: Tensor, bounds: Any, causal: bool, scale: float) -> Any:
    return SlowFlashOperators().forward(
        query, key, value, *bounds, 0.0, causal, False, scale=scale, **window(causal)
    )


def slow_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    bounds: Any,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = (torch.tensor(7), torch.empty(0))
    return SlowFlashOperators().backward(
        gradient,
        query,
        key,
        value,
        output,
        log_sum,
        *bounds,
        0.0,
        causal,
        *unused,
        scale=scale,
        **window(causal),
    )


def adapters(kind: FlashAttention) -> list[Any]:
    """Return patches after which torch's operators on a CPU are the adapters of a package's kernels."""
    if kind is FlashAttention.fa3:
        return [
            mock.patch.object(_fa3, "_FA3_CUDA_FWD", run_fa3_forward),
            mock.patch.object(_fa3, "_FA3_CUDA_BWD", run_fa3_backward),
            mock.patch.object(_fa3, "_fa3_forward_support_error", return_value=None),
            mock.patch.object(_fa3, "_fa3_backward_support_error", return_value=None),
            mock.patch.object(
                torch.ops.aten, "_flash_attention_forward", _fa3._fa3_flash_attention_forward_impl_default
            ),
            mock.patch.object(
                torch.ops.aten, "_flash_attention_backward", _fa3._fa3_flash_attention_backward_impl
            ),
        ]

    package = SimpleNamespace(_flash_attn_fwd=run_fa4_forward, _flash_attn_bwd=run_fa4_backward)
    return [
        mock.patch.object(_fa4, "_FA4_MODULE_PATH", "a package"),
        mock.patch.object(_fa4, "_fa4_import_module", return_value=package),
        mock.patch.object(_fa4, "_fa4_forward_support_error", return_value=None),
        mock.patch.object(_fa4, "_fa4_backward_support_error", return_value=None),
        mock.patch.object(torch.ops.aten, "_flash_attention_forward", _fa4._fa4_flash_attention_forward_impl),
        mock.patch.object(
            torch.ops.aten, "_flash_attention_backward", _fa4._fa4_flash_attention_backward_impl
        ),
    ]


def attend_by(
    kind: FlashAttention, heads: Heads, lengths: list[int], prompt_of: list[int | None], scale: float
) -> Attended:
    """Run in a rank: attend with shared prompts, as on CUDA."""
    from contextlib import ExitStack

    from megarl.engine import platform

    platform.activate(Device.cpu)
    from megarl.engine import shared_prompts
    from megarl.engine.packed_rows import PackedRows

    query, key, value = (tensor.clone().requires_grad_() for tensor in heads[:3])
    packed = PackedRows(lengths, torch.device("cpu"), prompt_of)

    with ExitStack() as stack:
        for patch in adapters(kind):
            stack.enter_context(patch)
        stack.enter_context(
            mock.patch.object(shared_prompts, "kernel_for", return_value=shared_prompts.VarlenKernel)
        )
        assert packed.shared is not None
        mixed = shared_prompts.attend(query, key, value, packed.shared, scale)
        (mixed * heads.weight).sum().backward()

    return Attended(mixed.detach(), query.grad, key.grad, value.grad)


@pytest.mark.parametrize("kind", [FlashAttention.fa3, FlashAttention.fa4])
@pytest.mark.parametrize("num_heads", [HEADS, GROUPS])
def test_torchs_adapters_get_what_the_kernels_need(
    kind: FlashAttention, num_heads: int, rank_pool: RankPool
) -> None:
    lengths, prompt_of = SHARING[0]
    heads = make_heads(sum(lengths), num_heads)
    (got,) = rank_pool.run(
        attend_by, world_size=1, kind=kind, heads=heads, lengths=lengths, prompt_of=prompt_of, scale=0.3
    )
    for key, value in dense_attention(heads, lengths, 0.3, prompt_of)._asdict().items():
        assert max_difference(getattr(got, key), value) < 1e-5, key


def test_kernels_are_activated_once_and_given_back() -> None:
    from megarl.engine import platform

    active: list[str] = []
    done = []

    def activate(name: str) -> None:
        done.append(name)
        active[:] = [name]

    def restore() -> None:
        done.append("restored")
        active.clear()

    def current() -> str | None:
        return active[0] if active else None

    with (
        mock.patch.object(platform, "activate_flash_attention_impl", activate),
        mock.patch.object(platform, "restore_flash_attention_impl", restore),
        mock.patch.object(platform, "current_flash_attention_impl", current),
        mock.patch.object(platform, "missing_flash_attention", return_value=None),
    ):
        for asked in (FlashAttention.fa2, FlashAttention.fa4, FlashAttention.fa4, FlashAttention.fa2):
            platform.activate_flash_attention(asked)
    assert done == ["FA4", "restored"]


@pytest.mark.parametrize(
    ("asked", "package"), [(FlashAttention.fa3, "flash-attn-3"), (FlashAttention.fa4, "flash-attn-4")]
)
def test_kernels_that_are_not_installed_are_refused(asked: FlashAttention, package: str) -> None:
    from importlib import metadata

    from megarl.engine import platform

    with (
        mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError),
        pytest.raises(ValueError, match=rf"flash_attention={asked.value}, .*{package} is not installed"),
    ):
        platform.activate_flash_attention(asked)
