"""Test gated delta nets on a GPU, by flash-linear-attention and by torch: errors and time.

tests/unit/engine/test_one_device_delta_nets.py runs these tests on the CPU, so that they stay valid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from megarl.config.schema import Device
from megarl.engine import platform
from megarl.models.architecture import DeltaNet

if TYPE_CHECKING:
    from megarl.engine.delta_mixing import DeltaRows

# Rows of many chunks, of less than one, and of a single token.
LENGTHS = (700, 90, 1, 333, 64)
# The heads of Qwen3-Next on one of eight ranks, and smaller ones for a CPU.
HEADS = DeltaNet(
    num_key_heads=2, num_value_heads=4, key_head_dim=128, value_head_dim=128, conv_kernel_dim=4, layers=(0,)
)
SIZES = {"cuda": HEADS, "cpu": replace(HEADS, key_head_dim=16, value_head_dim=12)}
EPS = 1e-6
# The norm of the error in bfloat16, relative to that of the result. Kernels round more than torch's own code.
TOLERANCE = 0.02
GRADIENT_TOLERANCE = 0.05
REPEATS = 5


@pytest.fixture(params=["fla", "torch"])
def mixing(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select who mixes the tokens."""
    if device.type == "cuda":
        platform.activate(Device.cuda)
    from megatron.core.ssm.gated_delta_net import common

    if request.param == "torch":
        monkeypatch.setattr(common, "HAVE_FLA", False)
        return "torch"
    if device.type != "cuda":
        pytest.skip("flash-linear-attention is for CUDA")
    if find_spec("fla") is None:
        pytest.skip("flash-linear-attention is not installed")
    assert common.HAVE_FLA, "flash-linear-attention is installed, but Megatron cannot import it"
    return "fla"


def inputs(sizes: DeltaNet, device: torch.device) -> list[Tensor]:
    """Return the tokens, and the weights of the convolution, of decays and of the norm, in float32."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return [
        tensor.to(device)
        for tensor in (
            draw(sum(LENGTHS), sum(sizes.parts)),
            draw(sum(sizes.channels), 1, sizes.conv_kernel_dim) * 0.5,
            -3 * torch.rand(sizes.num_value_heads, generator=generator),
            draw(sizes.num_value_heads) * 0.1,
            1 + draw(sizes.value_head_dim) * 0.2,
        )
    ]


def rows_of(device: torch.device) -> DeltaRows:
    from megarl.engine.delta_mixing import DeltaRows, row_chunks

    bounds = torch.tensor((0, *LENGTHS)).cumsum(0).to(device)
    return DeltaRows(None, None, bounds, row_chunks(LENGTHS, device))


def with_gradients(given: list[Tensor], sizes: DeltaNet, dtype: torch.dtype) -> list[Tensor]:
    """Return what the tokens become, and the gradients of a weighted sum of it."""
    from megarl.engine.delta_mixing import mix

    tokens, convolution, a_log, dt_bias, norm = (tensor.detach().requires_grad_() for tensor in given)
    # As in a layer, only what decays are computed from stays in float32.
    cast = (tokens.to(dtype), convolution.to(dtype), a_log, dt_bias, norm.to(dtype))
    output = mix(*cast, rows_of(tokens.device), sizes, EPS)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    wanted = (tokens, convolution, a_log, dt_bias, norm)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), wanted)]


def test_delta_nets_in_bfloat16_are_near_to_float32_by_torch(
    mixing: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    from megatron.core.ssm.gated_delta_net import common

    sizes = SIZES[device.type]
    given = inputs(sizes, device)
    got = with_gradients(given, sizes, torch.bfloat16)
    seconds = []
    for _ in range(REPEATS):
        wait_for(device)
        begin_s = time.perf_counter()
        with_gradients(given, sizes, torch.bfloat16)
        wait_for(device)
        seconds.append(time.perf_counter() - begin_s)

    monkeypatch.setattr(common, "HAVE_FLA", False)
    want = with_gradients(given, sizes, torch.float32)
    names = ("output", "tokens", "convolution", "A_log", "dt_bias", "norm")
    errors = {
        name: float((mine.float() - exact.float()).norm() / exact.float().norm())
        for name, mine, exact in zip(names, got, want, strict=True)
    }
    said = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    record_property(f"{mixing}: errors in bfloat16", said)
    record_property(
        f"{mixing}: forward and backward of {sum(LENGTHS)} tokens", f"{min(seconds) * 1e3:.2f} ms"
    )
    assert all(math.isfinite(error) for error in errors.values()), said
    assert 0 < errors.pop("output") < TOLERANCE, said
    assert max(errors.values()) < GRADIENT_TOLERANCE, said


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
