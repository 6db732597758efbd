"""Kernels that make Megatron fast on a CPU, and collectives that it needs and gloo lacks.

Matrix products are those of oneDNN or MKL. The choice of library follows from the shapes and the processor's
family, never from a measurement, so that a resumed run is bitwise identical. Both round in the same way, in
float32. GFLOP/s per core, MKL (torch's default) against oneDNN, for the shapes of small models:

                              outputs and gradients of inputs      gradients of weights
    AMD Zen 5                   100 against 220                    as outputs
    AMD Zen 4                   83 to 101 against 92 to 109        91 to 101 against 75 to 103
    Intel with AVX-512          about the same                     136 against 81

oneDNN computes gradients of weights on Zen 5 only. On other processors MKL is as fast, and adds them to a
buffer while it multiplies. With oneDNN, the addition is a separate pass, which is slow for a transposed
result: on Zen 4, a step of 100 million parameters took 3 % longer.

torch exposes oneDNN through the operator that torch.compile emits for linear layers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._device
from torch import Tensor

from megarl.machine.processors import ZEN_5, processor_family

# The number of multiplications from which oneDNN is faster. Its calls cost 15 microseconds more.
MIN_ONEDNN_SIZE = 2**20
HAS_ONEDNN = torch.backends.mkldnn.is_available()
WEIGHT_GRADIENTS_BY_ONEDNN = HAS_ONEDNN and processor_family() == ZEN_5


def product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias. Has no gradient.

    Args:
        left: (M, K), possibly transposed in memory.
        right: (N, K), possibly transposed in memory.
        bias: (N,).

    Returns:
        (M, N).
    """
    if _by_onednn(left, left.shape[0] * right.numel()):
        return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return F.linear(left, right, bias)


def product_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Return left (M, K) @ right.T, right (N, K), in float32. Has no gradient.

    Products of 16-bit numbers are exact in float32, so only the order of the sum is not defined. CUDA has a
    kernel for it. On a CPU, both matrices are converted first.
    """
    if left.device.type == "cuda" and left.dtype != torch.float32:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return product(left.float(), right.float())


def product_and_sum(left: Tensor, right: Tensor, summand: Tensor) -> Tensor:
    """Return the product of left (M, K) and right.T, right (N, K), plus `summand` (M, N).

    `summand` may be overwritten.
    """
    if _by_onednn(left, left.shape[0] * right.numel()):
        return torch.ops.mkldnn._linear_pointwise.binary(left, summand, right, None, "add")
    return summand.addmm_(left, right.t())


def product_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return left.T @ right (M, N) for left (R, M) and right (R, N). Has no gradient.

    The result may be transposed in memory.
    """
    if not WEIGHT_GRADIENTS_BY_ONEDNN:
        return left.t() @ right
    if _by_onednn(left, left.numel() * right.shape[1]) and left.shape[1] > right.shape[1]:
        # oneDNN copies its left operand unless it is contiguous.
        return product(right.t(), left.t()).t()

    return product(left.t(), right.t())


def _by_onednn(matrix: Tensor, size: int) -> bool:
    return (
        size >= MIN_ONEDNN_SIZE
        and HAS_ONEDNN
        and matrix.device.type == "cpu"
        and matrix.dtype == torch.float32
    )


def add_product_over_rows(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `product_over_rows` to `total` (M, N) float32."""
    by_onednn = WEIGHT_GRADIENTS_BY_ONEDNN and _by_onednn(left, left.numel() * right.shape[1])
    if left.dtype == torch.float32 and not by_onednn:
        total.addmm_(left.t(), right)  # added while it is multiplied
    else:
        total.add_(product_over_rows(left, right))


def in_main_grad(weight: Tensor) -> Tensor:
    """Return the gradient of a weight whose gradient has already been added to Megatron's buffer.

    Megatron is informed through an attribute of the weight. As Megatron requires of its own layers, the
    returned tensor has no meaning, unless the weight is also an embedding: then it is zero, so that the
    embedding's gradient can be added to it.
    """
    weight.grad_added_to_main_grad = True  # pyrefly: ignore[missing-attribute]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def _gradient_of(weight: Tensor, outputs: Sequence[Tensor], hidden: Tensor) -> Tensor:
    """Compute the gradient of a weight from its inputs and the gradients of its outputs.

    Args:
        weight: (N, K). Its rows are divided into as many equal parts as there are outputs.
        outputs: The gradients of each part's outputs, (R, N / parts).
        hidden: The inputs, (R, K).
    """
    buffer: Tensor | None = getattr(weight, "main_grad", None)

    # Without Megatron's buffer the gradient is returned, and autograd accumulates it.
    if buffer is None:
        parts = [product_over_rows(output, hidden) for output in outputs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # The parts of the weight, such as gate and up, are separate products of the same input.
    for part, output in zip(buffer.chunk(len(outputs)), outputs, strict=True):
        add_product_over_rows(part, output, hidden)
    return in_main_grad(weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return product(hidden.flatten(0, -2), weight, bias).view(*hidden.shape[:-1], weight.shape[0])

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad
        rows = gradient.flatten(0, -2).contiguous()

        return (
            product(rows, weight.t()).view_as(hidden) if need_hidden else None,
            _gradient_of(weight, [rows], hidden.flatten(0, -2)) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `torch.nn.functional.linear` with `product`.

    Args:
        hidden: (..., K).
        weight: (N, K).
        bias: (N,).

    Returns:
        (..., N).
    """
    return _Linear.apply(hidden, weight, bias)


class _GatedLinear(torch.autograd.Function):
    """The gated activation with a separate product for each half of the weight.

    Activations read and write separate tensors about twice as fast as halves of the rows of one tensor. Each
    result is read while it is still in a cache, and the backward pass overwrites the saved activations.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        of_gate, of_up = weight.chunk(2)

        # The gate is activated before the second product, while it is still in the cache.
        gate = product(rows, of_gate)
        activated = F.silu(gate)
        up = product(rows, of_up)
        ctx.save_for_backward(hidden, weight, gate, up, activated)

        return (activated * up).view(*hidden.shape[:-1], up.shape[-1])

    @staticmethod
    # pyrefly: ignore[bad-override]  # torch declares `*grad_outputs`
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight, gate, up, activated = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad
        rows = gradient.flatten(0, -2)

        # In place, because the saved activations are read here for the last time.
        grad_up = activated.mul_(rows)
        grad_gate = up.mul_(rows)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        grad_hidden = None

        # Both halves were computed from the same input, so their gradients add up.
        if need_hidden:
            of_gate, of_up = weight.chunk(2)
            grad_hidden = product_and_sum(grad_up, of_up.t(), product(grad_gate, of_gate.t())).view_as(hidden)

        return grad_hidden, _gradient_of(
            weight, [grad_gate, grad_up], hidden.flatten(0, -2)
        ) if need_weight else None


def gated_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up (..., I).

    Args:
        hidden: (..., K).
        weight: (2 I, K): the rows of gate, then those of up.
    """
    return _GatedLinear.apply(hidden, weight)


def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Skip a reduce-scatter or all-gather between a buffer and this rank's slice of it in a group of one.

    The two are the same memory then, but gloo copies it back and forth anyway, at every step and for every
    parameter.
    """
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def run(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options).arguments
        if given["group"].size() > 1:
            return collective(*arguments, **options)

        # The names of the first two arguments differ between the collectives: output, then input.
        output, input = list(given.values())[:2]
        assert output.data_ptr() == input.data_ptr()
        return None

    return run


def numbers_on_host(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace Megatron's copy of a tensor to the host, where it already is."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def gather_unequal(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a gather so that parts may differ in size.

    gloo gathers only parts of equal size, so they are padded to the largest. This is needed for experts with
    both expert and expert tensor parallelism.
    """

    @functools.wraps(gather)
    def run(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]

        # Gather parts of equal size, then drop the padding.
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        gathered = input_.new_empty(len(sizes) * max(sizes), *input_.shape[1:])
        torch.distributed.all_gather_single(gathered, padded, group=group)

        return torch.cat([each[:size] for each, size in zip(gathered.split(max(sizes)), sizes, strict=True)])

    return run


def scatter_unequal(scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a reduce-scatter so that parts may differ in size, as `gather_unequal` does for a gather."""

    @functools.wraps(scatter)
    def run(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]

        # Row r of the padded tensor is what rank r receives of the sum.
        padded = input_.new_zeros(len(sizes), max(sizes), *input_.shape[1:])
        for room, part in zip(padded, input_.split(sizes), strict=True):
            room[: part.shape[0]] = part
        own = input_.new_empty(max(sizes), *input_.shape[1:])
        torch.distributed.reduce_scatter_single(own, padded.flatten(0, 1), group=group)

        return own[: sizes[group.rank()]].contiguous()

    return run
