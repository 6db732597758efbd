"""Collectives that Megatron needs and gloo lacks, built from those that gloo has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device


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
