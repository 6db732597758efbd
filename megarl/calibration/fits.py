"""Fits the constants of the time model to measured times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from megarl.calibration.measurements import CollectiveTime, DecodeSweep, LayerTime, ProductTime
from megarl.step_time.device import DeviceProfile, Efficiency, LinkProfile
from megarl.step_time.links import RankSpan, collective_s

_INFINITE_GB_S = 1e18
_SMALL_BATCH = 4  # up to which a decode step is bound by reads and launches
# The part of a product's time that its reads and writes may take. Caches hide them on small matrices.
_MOST_MOVING = 0.5


def fit_link(times: Sequence[CollectiveTime]) -> LinkProfile:
    """Fit latency and bandwidth to collectives within a node, by least squares of relative errors.

    The time model is linear in the latency and in the time of a byte. Links on which only one of them takes
    time show how often each counts.
    """
    hops = [_modeled_s(time, _INFINITE_GB_S, latency_us=1e6) / time.seconds for time in times]
    sent = [_modeled_s(time, 1e-9, latency_us=0.0) / time.seconds for time in times]

    # Normal equations of: latency * hops + sent / bandwidth = 1.
    hops_hops = sum(value * value for value in hops)
    sent_sent = sum(value * value for value in sent)
    both = sum(one * other for one, other in zip(hops, sent, strict=True))
    determinant = hops_hops * sent_sent - both * both
    latency_s = (sum(hops) * sent_sent - sum(sent) * both) / determinant
    s_per_byte = (sum(sent) * hops_hops - sum(hops) * both) / determinant

    # Noise may make one of them negative; then the other explains everything.
    if latency_s < 0:
        latency_s = 0.0
        s_per_byte = sum(sent) / sent_sent
    elif s_per_byte <= 0:
        latency_s = sum(hops) / hops_hops
        s_per_byte = min(time.seconds / time.nbytes for time in times)

    return LinkProfile(gb_s=1e-9 / s_per_byte, latency_us=latency_s * 1e6)


def _modeled_s(time: CollectiveTime, gb_s: float, latency_us: float) -> float:
    """Return the modeled time of a collective within a node that has such a link."""
    link = LinkProfile(gb_s=gb_s, latency_us=latency_us)
    device = DeviceProfile(
        devices_per_node=time.num_ranks, within_node=link, efficiency=Efficiency(links=1.0)
    )
    return collective_s(device, time.kind, RankSpan(time.num_ranks), time.nbytes)


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


def training_layer_us(times: Sequence[LayerTime]) -> float:
    """Return the microseconds of one layer: the difference between two models, by their layers."""
    few, many = times
    difference = (many.seconds - few.seconds) / (many.num_layers - few.num_layers)
    # On a busy machine, the smaller model may take longer.
    return 1e6 * (difference if difference > 0 else many.seconds / many.num_layers)


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
