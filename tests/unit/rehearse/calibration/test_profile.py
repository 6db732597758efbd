"""A profile from measurements: of a known GPU, of one without collectives, and of a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.config.schema import DType
from megarl.plan.step_time.counts import Product
from megarl.plan.step_time.device import load_device
from megarl.rehearse.calibration.measurements import (
    CollectiveTime,
    DecodeSweep,
    DecodeTime,
    ProductTime,
    RankMeasurements,
)
from megarl.rehearse.calibration.profile import Calibration, calibrate, describes

GIB = 2**30
BATCHES = (1, 2, 4, 64)


def measurements(device: str, **changes: Any) -> RankMeasurements:
    """A device with a bandwidth of 3 TB/s, whose products take 10 ms for 5 TFLOP: 500 TFLOP/s."""
    size = 5e12 ** (1 / 3) / 2 ** (1 / 3)
    shape = Product(round(size), round(size), round(size))
    measured = RankMeasurements(
        device=device,
        memory_bytes=79 * GIB,
        squares=(ProductTime(shape, "float32", 0.1), ProductTime(shape, "bfloat16", 0.01)),
        products=(ProductTime(shape, "bfloat16", 0.0125),),
        attention_tflops=300.0,
        memory_gb_s=3000.0,
        host_gb_s=50.0,
        storage_gb_s=1.5,
        collectives=tuple(
            CollectiveTime("all_gather", 2, size, 5e-6 + size / 2 / 360e9) for size in (2**10, 2**20, 2**28)
        ),
        layers=((4, 3e-3), (8, 5e-3)),
    )
    return measured._replace(**changes)


def sweep() -> DecodeSweep:
    times = tuple(DecodeTime(batch, 1e-3 + 8 * 30e-6, 0.0) for batch in BATCHES)
    return DecodeSweep(times, num_layers=8, weight_bytes=3 * 10**9, cache_bytes=0)


def calibrated(*ranks: RankMeasurements, decoding: DecodeSweep | None = None, **options: Any) -> Calibration:
    given = {"is_cuda": True, "dtype": DType.bfloat16, "host_memory_bytes": 2000 * GIB, "date": "2026-11-27"}
    name = "h100_80gb" if options.get("is_cuda", True) else "cpu"
    return calibrate(load_device(name), name, ranks, decoding or sweep(), **(given | options))


def test_a_known_gpu_keeps_its_data_sheet_and_gets_efficiencies() -> None:
    found = calibrated(*[measurements("NVIDIA H100 80GB HBM3")] * 2)
    profile = found.profile
    shipped = load_device("h100_80gb")
    assert profile.peak_tflops == shipped.peak_tflops
    assert (profile.memory_gb_s, profile.within_node.gb_s) == (3350, 450)
    assert profile.efficiency.memory == pytest.approx(3000 / 3350, rel=5e-3)
    assert profile.efficiency.links == pytest.approx(360 / 450, rel=5e-3)
    assert profile.within_node.latency_us == pytest.approx(5, rel=5e-3)
    # 5 TFLOP in 12.5 ms, of which reads and writes of three matrices of 368 MB take 0.37 ms.
    assert profile.efficiency.gemm == pytest.approx(5 / 0.01213 / 989.4, rel=5e-3)
    assert profile.efficiency.attention == pytest.approx(300 / 989.4, rel=5e-3)
    assert profile.efficiency.training_layer_us == pytest.approx(500)
    assert profile.efficiency.decode_layer_us == pytest.approx(30)
    assert (profile.devices_per_node, profile.memory_gb, profile.host_memory_gb) == (2, 79, 2000)
    assert profile.between_nodes == shipped.between_nodes


def test_each_value_has_a_source() -> None:
    profile = calibrated(measurements("NVIDIA H100 80GB HBM3")).profile
    assert profile.sources.keys() == load_device("h100_80gb").sources.keys()
    assert profile.sources["host_gb_s"] == (
        "measured by megarl tune --calibrate on 1 x NVIDIA H100 80GB HBM3, 2026-11-27"
    )
    assert profile.sources["between_nodes.gb_s"].startswith("h100_80gb: DGX H100 user guide")
    assert profile.sources["memory_gb_s"].startswith("h100_80gb: NVIDIA H100")


def test_what_cannot_be_measured_is_kept_and_told() -> None:
    alone = measurements("NVIDIA H100 80GB HBM3", collectives=(), layers=())
    found = calibrated(alone, decoding=DecodeSweep(problem="SGLang is not installed"))
    shipped = load_device("h100_80gb")
    assert found.profile.within_node == shipped.within_node
    assert found.profile.efficiency.links == shipped.efficiency.links
    assert found.profile.efficiency.training_layer_us == shipped.efficiency.training_layer_us
    assert found.profile.efficiency.decode_layer_us == shipped.efficiency.decode_layer_us
    assert found.notes["within_node"] == "there is only one device"
    assert found.notes["efficiency.decode_layer_us"] == "SGLang is not installed"
    assert not {"within_node.gb_s", "efficiency.decode_layer_us"} & set(found.measured)


@pytest.mark.parametrize(("device", "is_cuda"), [("NVIDIA X999", True), ("Xeon(R) CPU E5", False)])
def test_an_unknown_device_has_the_peaks_that_were_measured(device: str, is_cuda: bool) -> None:
    profile = calibrated(measurements(device), is_cuda=is_cuda).profile
    assert profile.peak_tflops.bfloat16 == pytest.approx(500, rel=5e-3)
    assert profile.peak_tflops.float32 == pytest.approx(50, rel=5e-3)
    assert (profile.memory_gb_s, profile.efficiency.memory) == (3000, 1)
    assert (profile.within_node.gb_s, profile.efficiency.links) == (360, 1)
    assert profile.efficiency.attention == pytest.approx(0.6, rel=5e-3)
    assert profile.sources["efficiency.links"] == "the bandwidths of this file are those that are reached"


def test_links_that_are_faster_than_the_data_sheet_are_kept() -> None:
    """NVLink SHARP reduces in the switch, so that an all-reduce is faster than any ring."""
    fast = measurements("NVIDIA H100 80GB HBM3")
    fast = fast._replace(
        collectives=tuple(time._replace(seconds=5e-6 + time.nbytes / 2 / 480e9) for time in fast.collectives)
    )
    profile = calibrated(fast).profile
    assert (profile.within_node.gb_s, profile.efficiency.links) == (480, 1)


def test_a_profile_describes_its_own_devices() -> None:
    h100 = load_device("h100_80gb")
    assert describes(h100, "NVIDIA H100 80GB HBM3")
    assert not describes(h100, "NVIDIA H200")
    assert describes(load_device("a100_80gb"), "NVIDIA A100-SXM4-80GB")
    assert not describes(replace(h100, name="B200 180 GB"), "NVIDIA GB200")
