"""Measure the rates of devices (matrix products, attention, copies, collectives), and whole layers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Device, DType, ParallelConfig, RoutingReplay
from megarl.engine import groups as engine_groups
from megarl.engine.cpu_kernels import product
from megarl.engine.engine import MegatronEngine
from megarl.engine.groups import ParallelGroups
from megarl.engine.spec import ModelSpec
from megarl.machine.usage import Stopwatch
from megarl.models.architecture import Architecture
from megarl.plan.step_time.counts import Product
from megarl.rehearse.calibration.measurements import (
    CalibrationRequest,
    CollectiveTime,
    ProductTime,
    most_layers,
    write_reduced,
)

# Tokens of all rows whose attention is measured.
_CUDA_TOKENS = 16_384
_CPU_TOKENS = 1024

_REPEATS = 5
_LEAST_S = 0.01  # of a repeat, so that the resolution of clocks does not matter
_MOST_CALLS = 1000
_BYTES_PER_REPEAT = 2**22  # a small collective is called often enough that a repeat takes long
_MOST_COLLECTIVES = 20
_COMPUTATION = 320  # rows and columns of a product that takes about a millisecond of a core
# Four layers have every kind of a model that alternates them.
_FEW_LAYERS = 4
_MANY_LAYERS = 8
_DEVIATION = 0.02  # of random weights
_TOKENS = 8  # of a row, prompt and response
_PASSES = 30
_MEMORY_SHARE = 0.3  # of the device, for the weights of the larger model


class _UntrainedEngine(MegatronEngine):
    def _load(self, folder: str) -> None:
        """Draw the weights. Their memory may contain numbers with which a CPU computes slowly."""
        for parameter in self.parameters().values():
            parameter.normal_(std=_DEVIATION)


def layer_times(request: CalibrationRequest, memory_bytes: int) -> tuple[tuple[int, float], ...]:
    """Time forward passes of two models that differ only in their number of layers.

    Returns:
        Their numbers of layers, and the host seconds of each; empty if the larger model does not fit into
        the device's memory.
    """
    folder = Path(request.folder) / f"layers_{torch.distributed.get_rank()}"
    element_bytes = getattr(torch, request.dtype.value).itemsize
    most = most_layers(
        request.role.path, folder, element_bytes, _MEMORY_SHARE * memory_bytes, limit=_MANY_LAYERS
    )
    if most == 0:
        return ()
    few = _FEW_LAYERS if most > _FEW_LAYERS else most // 2

    # Every rank has the whole model, as with data parallelism.
    groups = engine_groups.initialize(ParallelConfig(data_parallel_size=request.num_ranks), seed=0)
    return tuple(
        (num_layers, _layer_seconds(request, num_layers, groups, folder)) for num_layers in (few, most)
    )


def _layer_seconds(
    request: CalibrationRequest, num_layers: int, groups: ParallelGroups, folder: Path
) -> float:
    """Return the host seconds of the fastest forward pass."""
    engine = _engine(request, num_layers, groups, folder)
    rows = _rows()
    # Launching is the work of one thread.
    clock = time.perf_counter if request.is_cuda else time.thread_time
    found = []

    # The first passes compile and allocate.
    for _ in range(_PASSES + 2):
        begin = clock()
        engine.forward(rows, [[0]], extras=())
        found.append(clock() - begin)

    return min(found[2:])


def _engine(
    request: CalibrationRequest, num_layers: int, groups: ParallelGroups, folder: Path
) -> MegatronEngine:
    spec = ModelSpec(
        path=str(folder),
        architecture=write_reduced(request.role.path, num_layers, folder),
        head="lm",
        dtype=request.dtype,
        parallel=groups.parallel,
        # Random inputs have no routes that a rollout has recorded.
        engine=replace(request.config.engine, routing_replay=RoutingReplay.off),
        device=Device.cuda if request.is_cuda else Device.cpu,
        seed=0,
        megatron=request.role.megatron,
    )

    return _UntrainedEngine(spec, groups)


def _rows() -> dict[str, RaggedTensor]:
    """Return one short row of tokens."""
    ids = torch.ones(_TOKENS // 2, dtype=torch.int64)
    lengths = torch.tensor([_TOKENS // 2])
    return {
        "prompts": RaggedTensor.packed_rows(ids, lengths, on_left=True),
        "responses": RaggedTensor.packed_rows(ids, lengths),
        "response_mask": RaggedTensor.constant(True, lengths, torch.bool),
    }


def product_times(shapes: Sequence[Product], dtype: DType, device: torch.device) -> tuple[ProductTime, ...]:
    """Time matrix products with the kernel that the training engine uses."""
    return tuple(ProductTime(shape, dtype.value, _product_seconds(shape, dtype, device)) for shape in shapes)


def _product_seconds(shape: Product, dtype: DType, device: torch.device) -> float:
    options = {"dtype": getattr(torch, dtype.value), "device": device}
    left = torch.randn(int(shape.rows), int(shape.inner), **options)
    right = torch.randn(int(shape.columns), int(shape.inner), **options)
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
    num_calls = min(_MOST_CALLS, max(1, round(_LEAST_S / max(_seconds(work, 1, device), 1e-7))))
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


def collective_times(sizes: Sequence[int], device: torch.device) -> Iterator[CollectiveTime]:
    """Yield the time of each kind of collective and size. All ranks must iterate together.

    Args:
        sizes: Bytes of the larger of input and output of a rank.
    """
    for kind, call in _CALLS.items():
        for nbytes in sizes:
            yield CollectiveTime(
                kind, dist.get_world_size(), nbytes, _collective_seconds(call, nbytes, device)
            )


# A call for each kind, of a tensor of full size and of this rank's share of it.
_CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda whole, share: dist.all_reduce(whole),
    "all_gather": lambda whole, share: dist.all_gather_single(whole, share),
    "reduce_scatter": lambda whole, share: dist.reduce_scatter_single(share, whole),
    "all_to_all": lambda whole, share: dist.all_to_all_single(torch.empty_like(whole), whole),
}


def _collective_seconds(call: Callable[[Tensor, Tensor], object], nbytes: int, device: torch.device) -> float:
    """Return the seconds of a call in the fastest repeat. All ranks make the same number of calls."""
    num_ranks = dist.get_world_size()
    share = torch.zeros(max(1, nbytes // 4 // num_ranks), device=device)
    whole = torch.zeros(share.numel() * num_ranks, device=device)
    num_calls = min(_MOST_COLLECTIVES, max(1, _BYTES_PER_REPEAT // nbytes))
    repeat = _after_computation if device.type == "cpu" else _in_a_row
    found = []

    # The first repeat connects the ranks.
    for _ in range(_REPEATS + 1):
        dist.barrier()
        found.append(repeat(lambda: call(whole, share), num_calls) / num_calls)

    return min(found[1:])


def _in_a_row(call: Callable[[], object], num_calls: int) -> float:
    """Return the seconds of some calls on a GPU, which waits for nothing between them."""
    begin = time.perf_counter()
    for _ in range(num_calls):
        call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _after_computation(call: Callable[[], object], num_calls: int) -> float:
    """Return the seconds of some calls on a CPU, each after a computation, as in a layer.

    While a rank computes, the threads that send and receive its messages sleep. Calls in a row keep them
    awake, and take half of the time.
    """
    left = torch.zeros(_COMPUTATION, _COMPUTATION)
    seconds = 0.0
    for _ in range(num_calls):
        torch.mm(left, left)
        begin = time.perf_counter()
        call()
        seconds += time.perf_counter() - begin
    return seconds
