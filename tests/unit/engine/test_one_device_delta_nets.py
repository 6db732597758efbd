"""Run the tests of tests/gpu/test_delta_nets.py on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_delta_nets import *  # noqa: F403


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")
