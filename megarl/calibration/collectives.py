"""Measures the collectives that layouts use, over all devices of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.calibration.measurements import CollectiveTime

_REPEATS = 5
_BYTES_PER_REPEAT = 2**22  # a small collective is called often enough that a repeat takes long
_MOST_CALLS = 20
_COMPUTATION = 320  # rows and columns of a product that takes about a millisecond of a core


def collective_times(sizes: Sequence[int], device: torch.device) -> Iterator[CollectiveTime]:
    """Yield the time of each kind of collective and size. All ranks must iterate together.

    Args:
        sizes: Bytes of the larger of input and output of a rank.
    """
    for kind, call in _calls().items():
        for nbytes in sizes:
            yield CollectiveTime(kind, dist.get_world_size(), nbytes, _seconds(call, nbytes, device))


def _calls() -> dict[str, Callable[[Tensor, Tensor], object]]:
    """Return a call for each kind, of a tensor of full size and of this rank's share of it."""
    return {
        "all_reduce": lambda whole, share: dist.all_reduce(whole),
        "all_gather": lambda whole, share: dist.all_gather_single(whole, share),
        "reduce_scatter": lambda whole, share: dist.reduce_scatter_single(share, whole),
        "all_to_all": lambda whole, share: dist.all_to_all_single(torch.empty_like(whole), whole),
    }


def _seconds(call: Callable[[Tensor, Tensor], object], nbytes: int, device: torch.device) -> float:
    """Return the seconds of a call in the fastest repeat. All ranks make the same number of calls."""
    num_ranks = dist.get_world_size()
    share = torch.zeros(max(1, nbytes // 4 // num_ranks), device=device)
    whole = torch.zeros(share.numel() * num_ranks, device=device)
    num_calls = min(_MOST_CALLS, max(1, _BYTES_PER_REPEAT // nbytes))
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
