"""Fits of constants to times that are computed from known constants."""

from __future__ import annotations

import pytest

from megarl.plan.step_time.counts import Product
from megarl.rehearse.calibration.measurements import (
    CollectiveTime,
    DecodeSweep,
    DecodeTime,
    ProductTime,
)
from megarl.rehearse.calibration.profile import (
    decode_layer_us,
    fit_link,
    product_efficiency,
    training_layer_us,
)

SIZES = (2**10, 2**16, 2**20, 2**26)


def collectives(latency_s: float, bytes_s: float, num_ranks: int = 8) -> list[CollectiveTime]:
    """Times by the model: three hops among eight ranks, and an all-reduce sends its bytes twice."""
    hops = {2: 1, 8: 3}[num_ranks]
    share = (num_ranks - 1) / num_ranks
    return [
        CollectiveTime(kind, num_ranks, nbytes, hops * latency_s + passes * share * nbytes / bytes_s)
        for kind, passes in (("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1))
        for nbytes in SIZES
    ]


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_latency_and_bandwidth_are_found(num_ranks: int) -> None:
    link = fit_link(collectives(12e-6, 300e9, num_ranks))
    assert link.latency_us == pytest.approx(12)
    assert link.gb_s == pytest.approx(300)


def test_neither_is_negative() -> None:
    without_latency = [time._replace(seconds=time.nbytes / 1e9) for time in collectives(0, 1e9, 2)]
    fast_small = fit_link([*without_latency, CollectiveTime("all_gather", 2, 2**10, 1e-9)])
    assert fast_small.latency_us == 0
    assert fast_small.gb_s > 0
    only_latency = fit_link([CollectiveTime("all_gather", 2, size, 1e-3 / size) for size in SIZES])
    assert only_latency.latency_us > 0
    assert only_latency.gb_s > 0


def test_the_efficiency_of_products_leaves_out_their_reads_and_writes() -> None:
    # 2 * 1000 ** 3 operations at half of 1 TFLOP/s take 4 ms; 12 MB at 12 GB/s take 1 ms.
    large = ProductTime(Product(1000, 1000, 1000), "float32", 5e-3)
    small = ProductTime(Product(10, 1000, 1000), "float32", 1.0)
    assert product_efficiency([small, large], 1.0, 12.0) == pytest.approx(0.5)
    # Reads and writes take at most half of the time, here 2.5 ms.
    assert product_efficiency([large], 1.0, 1.0) == pytest.approx(0.8)
    assert product_efficiency([large], 0.1, 12.0) == 1.0


def test_a_layer_is_the_difference_between_two_models() -> None:
    assert training_layer_us([(4, 5e-3), (8, 9e-3)]) == pytest.approx(1000)
    # Noise: the larger model was faster, and its time is shared by its layers.
    assert training_layer_us([(4, 5e-3), (8, 4e-3)]) == pytest.approx(500)


def test_a_layer_of_a_decode_step_leaves_out_reads_and_large_batches() -> None:
    # Weights of 1 MB and a cache of 100 bytes for 10 tokens, at 1 GB/s: 1 ms and 1 us a sequence.
    times = tuple(DecodeTime(batch, 1e-3 + batch * 1e-6 + 4 * 50e-6, tokens=10.0) for batch in (1, 2, 4)) + (
        DecodeTime(64, 1.0, tokens=10.0),
    )
    sweep = DecodeSweep(times=times, num_layers=4, weight_bytes=10**6, cache_bytes=100)
    assert decode_layer_us(sweep, memory_gb_s=1.0) == pytest.approx(50)
    assert decode_layer_us(sweep, memory_gb_s=0.1) == 0
