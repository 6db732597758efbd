"""The rates of a device and of its links, their files, and the time that work takes with them.

Shipped files are found by their names (configs/devices), others by their paths. A collective takes latency
per hop plus bytes over bandwidth: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective
Communication Operations in MPICH", with rings inside and across nodes as NCCL forms them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

import yaml

from megarl.config.load import read_config
from megarl.config.schema import Device, RunConfig
from megarl.config.schema.keys import MISSING, leaves, ranged
from megarl.config.shipped import CONFIGS_DIR, find_config
from megarl.config.validate import range_violations
from megarl.config.values import contents_of, schema_keys
from megarl.machine.errors import ConfigError
from megarl.machine.files import write_whole
from megarl.plan.step_time.counts import RankGroup

DEVICES_DIR = CONFIGS_DIR / "devices"
_SUFFIX = ".yaml"
# The share of a device that a plan may use. CUDA graphs, NCCL and fragmentation need the rest.
_USABLE = 0.9
# The devices that a run without a device profile may be planned for, by their memory.
_ASSUMED = ("h100_80gb", "h200", "b200", "b300")
# Keys without a measured or published value.
_WITHOUT_SOURCE = ("name", "is_host", "sources")


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """A link between devices, per device and direction."""

    gb_s: float = ranged(100.0, above=0)  # bandwidth, in 10**9 bytes per second
    latency_us: float = ranged(10.0, at_least=0)  # time of one hop of a collective, in microseconds


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Peak rates of dense matrix products, in 10**12 floating-point operations per second."""

    float32: float = ranged(1.0, above=0)
    bfloat16: float = ranged(1.0, above=0)
    fp8: float | None = ranged(None, above=0)  # null: the device has no float8 products


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of the rates that software reaches, and its own times: the constants that are fitted."""

    gemm: float = ranged(0.6, above=0, at_most=1)  # share of the peak that large matrix products reach
    attention: float = ranged(0.4, above=0, at_most=1)  # share of the peak that attention kernels reach
    memory: float = ranged(0.8, above=0, at_most=1)  # share of the bandwidth of device memory that is reached
    links: float = ranged(0.8, above=0, at_most=1)  # share of the bandwidth of links that is reached
    # time that the host takes to launch one layer of a forward pass, in microseconds
    training_layer_us: float = ranged(500.0, at_least=0)
    # time that a decode step of an engine takes in each layer besides its reads and products, in microseconds
    decode_layer_us: float = ranged(20.0, at_least=0)


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A kind of device, its node and its network (configs/devices)."""

    name: str = MISSING  # what the device is called, such as H100 80 GB SXM
    peak_tflops: PeakRates = field(default_factory=PeakRates)
    # whether the device launches its own work, as a CPU does; otherwise a host runs ahead of it
    is_host: bool = False
    memory_gb: float = ranged(80.0, above=0)  # device memory, in 2**30 bytes
    memory_gb_s: float = ranged(1000.0, above=0)  # bandwidth of device memory, in 10**9 bytes per second
    devices_per_node: int = ranged(8, at_least=1, at_most=128)
    # devices that `within_node` connects, if they are more than those of a node; null: those of a node
    linked_devices: int | None = ranged(None, at_least=1, at_most=10000)
    within_node: LinkProfile = field(default_factory=LinkProfile)
    between_nodes: LinkProfile = field(default_factory=LinkProfile)
    host_gb_s: float = ranged(25.0, above=0)  # copies between a device and its host, per device and direction
    host_memory_gb: float = ranged(1000.0, above=0)  # memory of a node, in 2**30 bytes
    storage_gb_s: float = ranged(2.0, above=0)  # rate at which a node writes a checkpoint
    # time of the driver for one sample: requests, assembly, scoring, metrics, in milliseconds
    sample_ms: float = ranged(2.0, at_least=0)
    efficiency: Efficiency = field(default_factory=Efficiency)
    sources: dict[str, str] = field(default_factory=dict)  # where each value comes from, by dotted key

    @property
    def memory_bytes_s(self) -> float:
        """The bytes per second that software reaches in device memory."""
        return self.memory_gb_s * self.efficiency.memory * 1e9


def shipped_devices() -> list[str]:
    """Return the names of the shipped device files, in alphabetical order."""
    return sorted(file.stem for file in DEVICES_DIR.glob(f"*{_SUFFIX}"))


def load_device(name: str | Path) -> DeviceProfile:
    """Load a device file.

    A file may inherit from another one: `base: configs/devices/h100_80gb.yaml`.

    Args:
        name: The name of a shipped file, such as `h100_80gb`, or the path of a YAML file.

    Raises:
        ConfigError: There is no such device, or the file has unknown keys, wrong values, numbers out of
            range, or sources of keys that do not exist. All problems are listed.
    """
    loaded = read_config(DeviceProfile, _file(str(name)))
    problems = [*loaded.problems]
    problems += [str(each) for each in range_violations(loaded.config) if not loaded.refuses(each.keys)]
    problems += _unknown_sources(loaded.config)
    if problems:
        raise ConfigError(loaded.source, problems)

    return loaded.config


def profile_of(config: RunConfig) -> DeviceProfile | None:
    """Return the kind of device that a run names, None if it names none.

    Raises:
        ConfigError: There is no such device, or its file has errors.
    """
    name = config.placement.device_profile
    return None if name is None else load_device(name)


def assumed_profile(config: RunConfig) -> DeviceProfile:
    """Return the kind of device that a run names.

    If it names none: a CPU if it runs on one, otherwise the smallest GPU from the H100 on with its budget.

    Raises:
        ConfigError: There is no such device, or its file has errors.
    """
    if (named := profile_of(config)) is not None:
        return named
    if config.device is Device.cpu:
        return load_device("cpu")

    budget_gb = config.placement.device_memory_gb or 0.0
    devices = [load_device(name) for name in _ASSUMED]
    # Files have what a driver leaves of the nominal size: 79.6 of 80.
    return next((device for device in devices if device.memory_gb + 1 >= budget_gb), devices[-1])


def with_budget[Run: RunConfig](config: Run, device: DeviceProfile) -> Run:
    """Return the configuration with a memory budget: the configured one, or nine tenths of the device."""
    if config.placement.device_memory_gb is not None:
        return config
    budget_gb = round(_USABLE * device.memory_gb, 1)
    return config.with_sections(placement=replace(config.placement, device_memory_gb=budget_gb))


def dump_device(profile: DeviceProfile, path: Path) -> None:
    """Write a device file atomically. `load_device` reads it back to an equal profile."""
    write_whole(path, yaml.safe_dump(contents_of(profile), sort_keys=False, allow_unicode=True, width=118))


def sourced_keys(profile: DeviceProfile) -> list[str]:
    """Return the dotted keys whose values need a source, in the order of the file."""
    return [leaf.key for leaf in leaves(profile) if leaf.key not in _WITHOUT_SOURCE]


def _file(name: str) -> Path:
    """Return the file of a device: a path contains a folder or ends in .yaml, anything else is a name."""
    if "/" in name or name.endswith(_SUFFIX):
        return find_config(Path(name), name)

    known = shipped_devices()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            "device",
            [
                f"there is no device called {name!r}; {meant}known: {', '.join(known)}; or give the path of "
                f"a YAML file, which `megarl tune --calibrate` writes"
            ],
        )
    return DEVICES_DIR / f"{name}{_SUFFIX}"


def _unknown_sources(profile: DeviceProfile) -> Iterator[str]:
    known = list(schema_keys(DeviceProfile))
    for key in profile.sources:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"sources: {key!r} is no key of a device{meant}"


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
    return min(span.num_ranks, max(1, (device.linked_devices or device.devices_per_node) // span.stride))
