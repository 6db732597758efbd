"""The number of cores that a process may use, and the detection of GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.machine import processors
from megarl.machine.processors import ZEN_5, processor_family, usable_cores


@pytest.mark.parametrize(
    ("quota", "most"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), (None, None)]
)
def test_a_container_may_have_less_time_than_cores(
    tmp_path: Path, quota: str | None, most: int | None
) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    assert usable_cores(file) == (most or len(os.sched_getaffinity(0)))


def test_a_processor_names_its_maker_and_family(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert processor_family(file) == ("", "")
    file.write_text(
        "".join(
            f"processor\t: {core}\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\n"
            for core in range(2)
        )
    )
    assert processor_family(file) == ZEN_5
    file.write_text("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel name\t: Intel Xeon\n")
    assert processor_family(file) == ("GenuineIntel", "6")
    file.write_text("processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\n")  # ARM
    assert processor_family(file) == ("", "")


def test_a_gpu_is_a_device_that_may_be_seen_and_a_torch_that_can_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processors, "torch_cuda", lambda: "13.0")
    (tmp_path / "nvidiactl").touch()  # a driver without devices
    assert not processors.has_gpu(tmp_path)
    (tmp_path / "dxg").touch()  # the device in WSL 2
    assert processors.has_gpu(tmp_path)
    (tmp_path / "dxg").unlink()
    (tmp_path / "nvidia3").touch()
    assert processors.has_gpu(tmp_path)

    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not processors.has_gpu(tmp_path)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert processors.has_gpu(tmp_path)
    monkeypatch.setattr(processors, "torch_cuda", lambda: None)
    assert not processors.has_gpu(tmp_path)
