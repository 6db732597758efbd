"""Fixtures for GPU tests, which are skipped with a reason without a GPU."""

from __future__ import annotations

import os

import pytest
import torch

# Transformer Engine multiplies float32 in TF32, which rounds to 10 bits: log-probs differed by up to 1.1e-3
# from Hugging Face's on an H200. float32 comparisons need full float32. cuBLAS reads the setting at its first
# use.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """Return the first GPU. tests/unit/weights/test_shared_device.py has another fixture of this name, for
    CPU runs."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def two_devices(device: torch.device) -> tuple[torch.device, torch.device]:
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"torch sees {count} GPU, and NCCL needs one for each rank")
    return device, torch.device("cuda", 1)


@pytest.fixture(scope="session")
def backend() -> str:
    return "nccl"


@pytest.fixture(scope="session")
def one_device_backend() -> str:
    """Return a backend; fails for two ranks on one device."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        pytest.skip("NCCL_MULTI_RANK_GPU_ENABLE lets NCCL take two ranks on one GPU")
    return "nccl"
