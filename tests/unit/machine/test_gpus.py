"""What is taken for a GPU."""

from pathlib import Path

import pytest

from megarl.machine import gpus


def test_a_gpu_is_a_device_that_may_be_seen_and_a_torch_that_can_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: "13.0")
    (tmp_path / "nvidiactl").touch()  # of a driver without devices
    assert not gpus.has_gpu(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert gpus.has_gpu(tmp_path)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not gpus.has_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert gpus.has_gpu(tmp_path)
    monkeypatch.setattr(gpus, "torch_cuda", lambda: None)
    assert not gpus.has_gpu(tmp_path)
