"""Run the tests of tests/gpu/test_weights.py on a CPU, with memfds instead of CUDA IPC and gloo instead of NCCL."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_weights import *  # noqa: F403
from tests.shared_device import ONE_DEVICE

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(scope="module")
def two_devices(device: torch.device) -> tuple[torch.device, torch.device]:
    return device, device


@pytest.fixture(scope="module")
def backend() -> str:
    return "gloo"


@pytest.fixture(scope="module")
def one_device_backend() -> str:
    return ONE_DEVICE
