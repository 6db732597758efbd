"""Measures the rates of one device: matrix products, attention, and copies."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from megarl.calibration.measurements import ProductTime
from megarl.calibration.request import ProductShape
from megarl.config.schema import DType
from megarl.engine.cpu_kernels import product
from megarl.machine.usage import Stopwatch
from megarl.models.architecture import Architecture

# Tokens of all rows whose attention is measured.
_CUDA_TOKENS = 16_384
_CPU_TOKENS = 1024

_REPEATS = 5
_LEAST_S = 0.01  # of a repeat, so that the resolution of clocks does not matter
_MOST_CALLS = 1000


def product_times(
    shapes: Sequence[ProductShape], dtype: DType, device: torch.device
) -> tuple[ProductTime, ...]:
    """Time matrix products with the kernel that the training engine uses."""
    return tuple(ProductTime(shape, dtype.value, _product_seconds(shape, dtype, device)) for shape in shapes)


def _product_seconds(shape: ProductShape, dtype: DType, device: torch.device) -> float:
    options = {"dtype": getattr(torch, dtype.value), "device": device}
    left = torch.randn(shape.rows, shape.inner, **options)
    right = torch.randn(shape.columns, shape.inner, **options)
    return seconds_per_call(lambda: product(left, right), device)


def attention_tflops(
    architecture: Architecture, num_tokens: int, dtype: DType, device: torch.device
) -> float:
    """Return the rate of causal attention, forward and backward, in 10**12 operations per second.

    Only the operations that the mask leaves count, three times those of the forward pass.
    """
    heads = architecture.num_attention_heads
    num_rows = max(1, (_CUDA_TOKENS if device.type == "cuda" else _CPU_TOKENS) // num_tokens)
    options = {"dtype": getattr(torch, dtype.value), "device": device, "requires_grad": True}
    queries, keys, values = (
        torch.randn(num_rows, heads, num_tokens, size, **options)
        for size in (architecture.head_dim, architecture.head_dim, architecture.value_dim)
    )
    gradient = torch.ones_like(values).detach()

    def attend() -> None:
        F.scaled_dot_product_attention(queries, keys, values, is_causal=True).backward(gradient)

    # A causal mask leaves n (n + 1) / 2 pairs of a query and a key.
    pairs = num_rows * heads * num_tokens * (num_tokens + 1) / 2
    flops = 3 * 2 * pairs * (architecture.head_dim + architecture.value_dim)
    return flops / seconds_per_call(attend, device) / 1e12


def copy_gb_s(num_bytes: int, device: torch.device) -> float:
    """Return the bytes that a copy on the device reads and writes per second, in 10**9."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_per_call(lambda: target.copy_(source), device) / 1e9


def host_gb_s(num_bytes: int, device: torch.device) -> float:
    """Return the bytes per second that are copied to the host's memory, in 10**9. The memory is pinned."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return num_bytes / seconds_per_call(lambda: target.copy_(source, non_blocking=True), device) / 1e9


def storage_gb_s(num_bytes: int, folder: Path) -> float:
    """Return the bytes per second at which a file is written and flushed to its device, in 10**9."""
    # Random bytes, because a file system may compress others.
    data = os.urandom(2**20) * (num_bytes // 2**20)

    with tempfile.NamedTemporaryFile(dir=folder, prefix=".megarl-calibrate-") as file:
        begin = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return len(data) / (time.perf_counter() - begin) / 1e9


def seconds_per_call(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call in the fastest repeat, of as many calls as take ten milliseconds."""
    # The first call may compile or allocate; the second one finds the number of calls.
    work()
    once = _seconds(work, 1, device)
    num_calls = min(_MOST_CALLS, max(1, round(_LEAST_S / max(once, 1e-7))))
    return min(_seconds(work, num_calls, device) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object], num_calls: int, device: torch.device) -> float:
    if device.type == "cpu":
        begin = processor_s()
        for _ in range(num_calls):
            work()
        return (processor_s() - begin) / num_calls

    stopwatch = Stopwatch(device)
    with stopwatch:
        for _ in range(num_calls):
            work()
    return stopwatch.seconds() / num_calls


def processor_s() -> float:
    """Return the processor seconds of this process so far, shared by its threads."""
    return time.process_time() / torch.get_num_threads()
