"""Turns measurements into a device profile, with the source of each value. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from megarl.config.dotted import with_value
from megarl.config.schema import DType
from megarl.plan.step_time.counts import RankGroup
from megarl.plan.step_time.device import DeviceProfile, Efficiency, LinkProfile, collective_s, sourced_keys
from megarl.rehearse.calibration.measurements import (
    CollectiveTime,
    DecodeSweep,
    ProductTime,
    RankMeasurements,
)

_GIB = 2**30
# Shares of rates that are relative to a data sheet.
_REACHED = ("efficiency.memory", "efficiency.links")

_INFINITE_GB_S = 1e18
_SMALL_BATCH = 4  # up to which a decode step is bound by reads and launches
# The part of a product's time that its reads and writes may take. Caches hide them on small matrices.
_MOST_MOVING = 0.5


class Calibration(NamedTuple):
    """A measured profile.

    Attributes:
        profile: All values of a device file.
        measured: The dotted keys that were measured. The others are those of the nearest device file.
        notes: Why a value could not be measured, by its dotted key.
    """

    profile: DeviceProfile
    measured: tuple[str, ...]
    notes: dict[str, str]


def calibrate(
    base: DeviceProfile,
    base_name: str,
    ranks: Sequence[RankMeasurements],
    decoding: DecodeSweep,
    *,
    is_cuda: bool,
    dtype: DType,
    host_memory_bytes: int,
    date: str,
) -> Calibration:
    """Return the profile of the measured machine.

    The peaks and bandwidths of a GPU that `base` describes are those of its data sheet, and the efficiencies
    are relative to them. Those of any other device are the fastest that were measured.

    Args:
        base: The profile of the nearest device.
        decoding: The measurements of the rollout engine.
        is_cuda: Whether the devices are GPUs.
        dtype: The dtype in which products and attention were measured.
        date: Today.
    """
    is_known = is_cuda and describes(base, ranks[0].device)
    values = _values(base, ranks, decoding, is_known, dtype, host_memory_bytes)

    # A value that equals the data sheet's was taken from there.
    measured = tuple(
        key for key, value in values.items() if not (is_known and value == attrgetter(key)(base))
    )
    source = f"measured by megarl tune --calibrate on {len(ranks)} x {ranks[0].device}, {date}"
    sources = {
        key: source if key in measured else f"{base_name}: {base.sources.get(key, 'no source')}"
        for key in base.sources.keys() | values.keys()
    }

    if not is_known:
        sources |= dict.fromkeys(_REACHED, "the bandwidths of this file are those that are reached")
    profile = base
    for key, value in values.items():
        profile = with_value(profile, key, _rounded(value) if key in measured else value)

    return Calibration(
        replace(
            profile,
            name=ranks[0].device,
            sources={key: sources[key] for key in sourced_keys(profile) if key in sources},
        ),
        measured,
        _notes(ranks, decoding),
    )


def _values(
    base: DeviceProfile,
    ranks: Sequence[RankMeasurements],
    decoding: DecodeSweep,
    is_known: bool,
    dtype: DType,
    host_memory_bytes: int,
) -> dict[str, float]:
    """Return the values of a device file by their dotted keys. `is_known` if `base` is this device's."""
    storage_gb_s = ranks[0].storage_gb_s
    assert storage_gb_s is not None, "rank 0 measures the storage"
    values: dict[str, float] = {
        "memory_gb": median(rank.memory_bytes for rank in ranks) / _GIB,
        "devices_per_node": len(ranks),
        "host_gb_s": median(rank.host_gb_s for rank in ranks),
        "host_memory_gb": host_memory_bytes / _GIB,
        "storage_gb_s": storage_gb_s,
        **_peaks(base, ranks, is_known),
        **_share(
            "memory_gb_s", "efficiency.memory", base, median(rank.memory_gb_s for rank in ranks), is_known
        ),
        **_links(base, ranks, is_known),
    }

    memory_gb_s = values["memory_gb_s"] * values["efficiency.memory"]
    peak = values[f"peak_tflops.{dtype.value}"]
    values["efficiency.gemm"] = median(product_efficiency(rank.products, peak, memory_gb_s) for rank in ranks)
    # Measured peaks are those of matrix products, which attention may exceed.
    values["efficiency.attention"] = min(1.0, median(rank.attention_tflops for rank in ranks) / peak)

    if all(rank.layers for rank in ranks):
        values["efficiency.training_layer_us"] = median(training_layer_us(rank.layers) for rank in ranks)
    if decoding.problem is None:
        values["efficiency.decode_layer_us"] = decode_layer_us(decoding, memory_gb_s)
    return values


def describes(profile: DeviceProfile, device: str) -> bool:
    """Return whether a profile is that of a device, by the model in both names, such as H100."""
    return profile.name.split()[0] in device.replace("-", " ").split()


def _peaks(base: DeviceProfile, ranks: Sequence[RankMeasurements], is_known: bool) -> dict[str, float]:
    """Return the peak of each dtype: that of the data sheet, or of the fastest product."""
    if is_known:
        return {f"peak_tflops.{name}": getattr(base.peak_tflops, name) for name in ("float32", "bfloat16")}
    return {
        f"peak_tflops.{name}": median(
            max(time.tflops for time in (*rank.squares, *rank.products) if time.dtype == name)
            for rank in ranks
        )
        for name in ("float32", "bfloat16")
    }


def _share(
    rate: str, efficiency: str, base: DeviceProfile, measured_gb_s: float, is_known: bool
) -> dict[str, float]:
    """Return a rate and the share of it that is reached. Their product is the measured rate."""
    of_sheet = attrgetter(rate)(base)
    if is_known and measured_gb_s <= of_sheet:
        return {rate: of_sheet, efficiency: measured_gb_s / of_sheet}
    return {rate: measured_gb_s, efficiency: 1.0}


def _links(base: DeviceProfile, ranks: Sequence[RankMeasurements], is_known: bool) -> dict[str, float]:
    times = ranks[0].collectives
    if not times:
        return {}
    link = fit_link(times)
    return {
        **_share("within_node.gb_s", "efficiency.links", base, link.gb_s, is_known),
        "within_node.latency_us": link.latency_us,
    }


def _notes(ranks: Sequence[RankMeasurements], decoding: DecodeSweep) -> dict[str, str]:
    notes = {
        "between_nodes": "links between nodes are not measured on one machine",
        "sample_ms": "depends on the run's rewards and data",
    }
    if not ranks[0].collectives:
        notes["within_node"] = "there is only one device"
    if not all(rank.layers for rank in ranks):
        notes["efficiency.training_layer_us"] = "the layers do not fit into the memory of one device"
    if decoding.problem is not None:
        notes["efficiency.decode_layer_us"] = decoding.problem
    return notes


def _rounded(value: float) -> float:
    """Round to three significant digits: the fourth differs between two calibrations."""
    return value if isinstance(value, int) else float(f"{value:.3g}")


def fit_link(times: Sequence[CollectiveTime]) -> LinkProfile:
    """Fit latency and bandwidth to collectives within a node, by least squares of relative errors.

    The time model is linear in the latency and in the time of a byte. Links on which only one of them takes
    time show how often each counts.
    """
    # Imported here, because it would delay the errors of a configuration.
    import numpy as np

    hops = [_modeled_s(time, _INFINITE_GB_S, latency_us=1e6) / time.seconds for time in times]
    sent = [_modeled_s(time, 1e-9, latency_us=0.0) / time.seconds for time in times]

    # Solve: latency * hops + sent / bandwidth = 1.
    found, *_ = np.linalg.lstsq(np.column_stack((hops, sent)), np.ones(len(times)))
    latency_s, s_per_byte = found.tolist()

    # Noise may make one of them negative; then the other explains everything.
    if latency_s < 0:
        latency_s = 0.0
        s_per_byte = sum(sent) / sum(value**2 for value in sent)
    elif s_per_byte <= 0:
        latency_s = sum(hops) / sum(value**2 for value in hops)
        s_per_byte = min(time.seconds / time.nbytes for time in times)

    return LinkProfile(gb_s=1e-9 / s_per_byte, latency_us=latency_s * 1e6)


def _modeled_s(time: CollectiveTime, gb_s: float, latency_us: float) -> float:
    """Return the modeled time of a collective within a node that has such a link."""
    link = LinkProfile(gb_s=gb_s, latency_us=latency_us)
    device = DeviceProfile(
        devices_per_node=time.num_ranks, within_node=link, efficiency=Efficiency(links=1.0)
    )
    return collective_s(device, time.kind, RankGroup(time.num_ranks), time.nbytes)


def product_efficiency(times: Sequence[ProductTime], peak_tflops: float, memory_gb_s: float) -> float:
    """Return the share of the peak that the products with the most rows reach, besides reads and writes.

    Args:
        times: Products of one dtype.
        peak_tflops: The peak in that dtype.
        memory_gb_s: The bandwidth of memory that is reached.
    """
    most_rows = max(time.shape.rows for time in times)
    large = [time for time in times if time.shape.rows == most_rows]
    element = 4 if large[0].dtype == "float32" else 2
    moved = element * sum(
        shape.rows * shape.inner + shape.inner * shape.columns + shape.rows * shape.columns
        for shape in (time.shape for time in large)
    )
    seconds = sum(time.seconds for time in large)
    # Even if reads and writes seem to take all of the time, a part of it is computing.
    computing_s = max(seconds - moved / (memory_gb_s * 1e9), (1 - _MOST_MOVING) * seconds)

    return min(1.0, sum(time.shape.flops for time in large) / computing_s / (peak_tflops * 1e12))


def training_layer_us(times: Sequence[tuple[int, float]]) -> float:
    """Return the microseconds of one layer: the difference between two models, by their layers."""
    (few, few_s), (many, many_s) = times
    difference = (many_s - few_s) / (many - few)
    # On a busy machine, the smaller model may take longer.
    return 1e6 * (difference if difference > 0 else many_s / many)


def decode_layer_us(sweep: DecodeSweep, memory_gb_s: float) -> float:
    """Return the microseconds of a layer in a decode step, besides its reads.

    The scheduler's time for a step is included, as a share of each layer.

    Args:
        memory_gb_s: The bandwidth of memory that is reached.
    """
    found = [
        (
            time.seconds
            - (sweep.weight_bytes + time.batch * time.tokens * sweep.cache_bytes) / memory_gb_s / 1e9
        )
        / sweep.num_layers
        for time in sweep.times
        if time.batch <= _SMALL_BATCH
    ]
    return max(0.0, 1e6 * median(found))
