"""Run the tests of tests/gpu/test_kernels.py on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_kernels import *  # noqa: F403


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def two_devices() -> None:
    pytest.skip("a CPU has no ring, and the other exchange is in test_parity.py")
