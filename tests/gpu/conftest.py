"""What tests need of a GPU: it is there, or they are left out, with the reason in words."""

from __future__ import annotations

import os

import pytest
import torch

# Transformer Engine multiplies float32 in TF32, which rounds to 10 bits: log-probs were up to 1.1e-3 away from
# Hugging Face's on an H200. Comparisons in float32 need all of float32. cuBLAS reads it at its first use.
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")


@pytest.fixture(scope="session", autouse=True)
def device() -> torch.device:
    """The first GPU. tests/unit/weights/test_shared_device.py has another fixture of this name, for
    rehearsals."""
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
    """Refuses two ranks on one device."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        pytest.skip("NCCL_MULTI_RANK_GPU_ENABLE lets NCCL take two ranks on one GPU")
    return "nccl"
