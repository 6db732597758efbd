"""Test the kernels that a run selects: flash attention, logits in float32, and Transformer Engine's ring.

The ring needs two GPUs, the others one.
tests/unit/engine/test_one_device_kernels.py runs these tests on the CPU, so that they stay valid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.layers import has_transformer_engine, missing_flash_attention
from megarl.config.schema import CPCommType, Device, FlashAttention, Layers, OptimConfig, ParallelConfig
from megarl.engine import platform
from tests.unit.engine.models import make_batch, save_model
from tests.unit.engine.rank_side import Tensors, build, hf_gradients, unpadded, weighted_sum

HEADS = 16
GROUPS = 4
DIM = 64
SCALE = DIM**-0.5
LENGTHS = [200, 300, 170, 90, 250, 410, 33]
PROMPT_OF = [None, 0, 0, None, None, 4, None]
# The error of a kernel relative to float64 may be this many times that of FlashAttention 2.
ROUNDING = 1.5
REPEATS = 10

Record = Callable[[str, object], None]


@pytest.fixture(params=FlashAttention)
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Iterator[FlashAttention]:
    """Activate kernels in this process, and the usual ones afterwards."""
    kind: FlashAttention = request.param
    if kind is not FlashAttention.fa2 and device.type != "cuda":
        pytest.skip(f"{kind.value} is for CUDA")
    if (missing := missing_flash_attention(kind)) is not None:
        pytest.skip(f"{missing[0]} is not installed")
    platform.activate_flash_attention(kind)
    yield kind
    platform.activate_flash_attention(FlashAttention.fa2)


def test_kernels_of_shared_prompts_are_as_near_to_float64_as_fa2(
    kernels: FlashAttention, device: torch.device, record_property: Record
) -> None:
    from megarl.engine import shared_prompts
    from megarl.engine.context import ALONE, pieces

    heads = draw_heads(device)
    starts = list(accumulate(LENGTHS, initial=0))
    prompts = [
        range(0) if prompt is None else range(starts[prompt], starts[prompt + 1]) for prompt in PROMPT_OF
    ]
    shared = shared_prompts.shared_prompts(pieces(LENGTHS, prompts, ALONE), None, device)
    assert shared is not None

    def attend(*given: Tensor) -> Tensor:
        return shared_prompts.attend(*given, shared, SCALE)

    want = gradients(dense, [tensor.double() for tensor in heads])
    # In a full pass, with the rounding of bfloat16 alone: the reference of the error.
    rounded = gradients(dense, heads)
    got = gradients(attend, heads)

    for name, mine, theirs, exact in zip(
        ("output", "query", "key", "value"), got, rounded, want, strict=True
    ):
        error, expected = (float((each.double() - exact).norm() / exact.norm()) for each in (mine, theirs))
        record_property(
            f"{kernels.value}: error of {name}, and of explicit products", f"{error:.2e}, {expected:.2e}"
        )
        assert error <= ROUNDING * expected, name

    record_property(f"{kernels.value}: forward and backward", f"{milliseconds(attend, heads, device):.2f} ms")


def draw_heads(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(sum(LENGTHS), count, DIM, generator=generator).to(device, torch.bfloat16)
        for count in (HEADS, GROUPS, GROUPS)
    ]


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by explicit products: (T, heads, D), (T, groups, D), (T, groups, D) -> (T, heads * D)."""
    tokens = torch.arange(sum(LENGTHS), device=query.device)
    sequence = torch.repeat_interleave(torch.tensor(LENGTHS)).to(query.device)
    prompts = torch.tensor([-1 if prompt is None else prompt for prompt in PROMPT_OF], device=query.device)
    is_seen = (sequence[:, None] == sequence) & (tokens[:, None] >= tokens)
    is_seen |= prompts[sequence][:, None] == sequence
    keys, values = (tensor.repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for tensor in (key, value))
    scores = (query.transpose(0, 1) @ keys.transpose(1, 2) * SCALE).masked_fill(~is_seen, float("-inf"))
    weights = scores.double().softmax(-1).to(query.dtype)
    return (weights @ values).transpose(0, 1).flatten(1)


def gradients(attend: Callable[..., Tensor], heads: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of a weighted sum of it."""
    given = [tensor.clone().requires_grad_() for tensor in heads]
    output = attend(*given)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, given, weight.to(output))]


def milliseconds(attend: Callable[..., Tensor], heads: list[Tensor], device: torch.device) -> float:
    gradients(attend, heads)
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(REPEATS):
        gradients(attend, heads)
    wait_for(device)
    return (time.perf_counter() - begin) / REPEATS * 1e3


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def test_logits_in_float32_are_not_rounded(device: torch.device, record_property: Record) -> None:
    from megarl.engine.cpu_kernels import product, product_in_float32

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 1024, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(5000, 1024, generator=generator).to(device, torch.bfloat16)
    exact = (hidden.double() @ weight.double().t()).log_softmax(-1)
    errors = {
        kind: float((logits.double().log_softmax(-1) - exact).abs().max())
        for kind, logits in (
            ("float32", product_in_float32(hidden, weight)),
            ("rounded", product(hidden, weight)),
        )
    }
    for kind, error in errors.items():
        record_property(f"largest error of log-probs from {kind} logits", f"{error:.2e} nats")
    assert errors["float32"] < 1e-3 < errors["rounded"]


def run_ranks(folder: Path, device: torch.device, layers: Layers, cp_comm_type: CPCommType) -> list[Tensors]:
    """Score and train on two context-parallel ranks, and return the outputs and gradients of each."""
    store = folder / f"store_{cp_comm_type.value}"
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        ranks = [
            pool.submit(run_rank, rank, str(folder), str(store), device.type, layers, cp_comm_type)
            for rank in range(2)
        ]
        return [rank.result() for rank in ranks]


def run_rank(
    rank: int, folder: str, store: str, device: str, layers: Layers, cp_comm_type: CPCommType
) -> Tensors:
    """Run in a process: return the outputs and the gradients by Hugging Face's names."""
    import os

    os.environ["LOCAL_RANK"] = str(rank)
    active = platform.activate(Device(device))
    dist.init_process_group(
        active.distributed_backend, init_method=f"file://{store}", rank=rank, world_size=2
    )
    from megarl.engine import groups as engine_groups

    groups = engine_groups.initialize(ParallelConfig(context_parallel_size=2), seed=0)
    engine = build(
        groups,
        folder,
        dtype=torch.bfloat16,
        layers=layers,
        cp_comm_type=cp_comm_type,
        optim=OptimConfig(),
    )
    batch = weighted_batch()
    micro_batches = [[0, 3, 2], [1, 4], [5], [6]]
    outputs = engine.forward(batch, micro_batches)
    engine.forward_backward(batch, micro_batches, weighted_sum(("log_probs",)))
    assert outputs is not None

    found: dict[str, Any] = {"log_probs": outputs["log_probs"].padded(), **hf_gradients(engine)}
    results = {name: tensor.detach().float().cpu() for name, tensor in found.items()}
    dist.destroy_process_group()
    return results


def weighted_batch() -> Any:
    batch = make_batch()
    weights = torch.randn(batch["response_mask"].shape, generator=torch.Generator().manual_seed(2))
    return unpadded({**batch, "weight/log_probs": weights * batch["response_mask"]})


def test_a_ring_gives_the_numbers_of_gathered_keys(
    two_devices: tuple[torch.device, torch.device], tmp_path: Path, record_property: Record
) -> None:
    device = two_devices[0]
    if device.type == "cuda" and not has_transformer_engine():
        pytest.skip("Transformer Engine is not installed")
    layers = Layers.transformer_engine if device.type == "cuda" else Layers.local
    ring = CPCommType.p2p if device.type == "cuda" else CPCommType.auto
    save_model("qwen2", tmp_path)

    rings, gathers = (run_ranks(tmp_path, device, layers, kind) for kind in (ring, CPCommType.all_gather))
    for mine, theirs in zip(rings, gathers, strict=True):
        for name, tensor in theirs.items():
            distance = float((mine[name] - tensor).norm() / tensor.norm().clamp(min=1e-6))
            assert distance < 0.05, name
    difference = float((rings[0]["log_probs"] - gathers[0]["log_probs"]).abs().max())
    record_property("ring and gathered keys: largest difference of log-probs", f"{difference:.2e} nats")
