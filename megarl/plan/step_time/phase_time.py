"""The predicted time of a phase with its parts, and of products and collectives on a device. Pure.

A collective takes latency per hop plus bytes over bandwidth: Thakur, Rabenseifner and Gropp 2005,
"Optimization of Collective Communication Operations in MPICH", with rings inside and across nodes as NCCL
forms them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from types import MappingProxyType
from typing import NamedTuple, Self

from megarl.plan.step_time.counts import RankGroup
from megarl.plan.step_time.device import DeviceProfile

# How often the bytes of the larger tensor pass a rank's link in a ring, at many ranks.
_PASSES = {"all_reduce": 2.0, "broadcast": 1.0, "all_gather": 1.0, "reduce_scatter": 1.0}


class PhaseTime(NamedTuple):
    """The predicted time of a phase.

    Attributes:
        parts: What it consists of, in seconds, by name. The parts sum to `seconds`.
    """

    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, **parts: float) -> Self:
        """Return the time that consists of these parts. Parts of no time are left out."""
        kept = {name: seconds for name, seconds in parts.items() if seconds > 0}
        return cls(sum(kept.values()), MappingProxyType(kept))

    def plus(self, other: PhaseTime) -> PhaseTime:
        """Return the time of both, one after the other."""
        names = dict.fromkeys((*self.parts, *other.parts))
        return PhaseTime.of(
            **{name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in names}
        )

    def times(self, count: float) -> PhaseTime:
        """Return the time of `count` repetitions."""
        return PhaseTime.of(**{name: count * seconds for name, seconds in self.parts.items()})


def peak_flops(device: DeviceProfile, dtype: str) -> float:
    """Return a device's peak operations per second for products in a dtype.

    A device without float8 products computes them in bfloat16.
    """
    peaks = device.peak_tflops
    tflops = {"float32": peaks.float32, "bfloat16": peaks.bfloat16, "fp8": peaks.fp8 or peaks.bfloat16}
    return tflops[dtype] * 1e12


def collective_s(
    device: DeviceProfile, kind: str, span: RankGroup, nbytes: float, calls: float = 1.0
) -> float:
    """Return the seconds of `calls` calls that have `nbytes` bytes together.

    Args:
        kind: The kind, as in rehearse/dry_run/record.py.
        nbytes: The bytes of the larger of input and output of a rank, summed over the calls.
    """
    ranks = span.num_ranks
    if ranks < 2 or not calls:
        return 0.0
    reach = device.efficiency.links * 1e9
    on_node = ranks_on_node(device, span)
    is_within = on_node >= ranks
    latency_us = device.within_node.latency_us if is_within else device.between_nodes.latency_us
    latency_s = latency_us * 1e-6 * ceil(log2(ranks)) * calls

    # A message has one sender and one receiver, whose distance decides on the link.
    if kind in ("send", "recv"):
        link = device.within_node if is_within else device.between_nodes
        return latency_us * 1e-6 * calls + nbytes / (link.gb_s * reach)

    # Every rank sends a part to every other one; parts for other nodes pass its own network adapter.
    if kind == "all_to_all":
        away = (ranks - min(on_node, ranks)) / ranks * nbytes / (device.between_nodes.gb_s * reach)
        near = (min(on_node, ranks) - 1) / ranks * nbytes / (device.within_node.gb_s * reach)
        return latency_s + max(away, near)

    # A ring across nodes has as many lanes between two nodes as the group has ranks on a node.
    rate = device.within_node.gb_s
    if not is_within:
        rate = min(rate, device.between_nodes.gb_s * on_node)
    return latency_s + _PASSES.get(kind, 1.0) * (ranks - 1) / ranks * nbytes / (rate * reach)


def ranks_on_node(device: DeviceProfile, span: RankGroup) -> int:
    """Return how many ranks of a group the links of a node connect, at least 1."""
    linked = device.linked_devices or device.devices_per_node
    return min(span.num_ranks, max(1, linked // span.stride))
