"""The rates of a device and of its links, from which step times are predicted. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.config.schema.keys import MISSING, ranged


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
