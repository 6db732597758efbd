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

    for hidden in ("", "-1", " -1 ", "NoDevFiles", "none", "0,0", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not processors.has_gpu(tmp_path)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert processors.has_gpu(tmp_path)
    monkeypatch.setattr(processors, "torch_cuda", lambda: None)
    assert not processors.has_gpu(tmp_path)


# torch reads the variable itself where it counts GPUs without a driver.
@pytest.mark.parametrize(
    "setting",
    [
        "0", "1,0", "0,1,2,3", " 2 , 3 ", "", " ", ",", "0,,1", "-1", "0,-1,1", "-1,0", "0,0", "0,1,0", "7,07",
        "+1", "1gpu2,2ampere", "0x1", "a,1", "NoDevFiles", "none", "GPU-1a", "GPU-1a,GPU-2b", "GPU-1a,GPU-1a",
        "GPU-1a, GPU-2b", "GPU-1a,1", "1,GPU-1a", "MIG-1", "MIG-1,MIG-2", "MIG-1,GPU-2", "GPU-1,MIG-2", "mig-1",
    ],
)  # fmt: skip
def test_visible_devices_are_read_as_torch_does(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert processors.visible_devices(setting) == tuple(map(str, torch.cuda._parse_visible_devices()))
    assert processors.visible_devices(None) is None
