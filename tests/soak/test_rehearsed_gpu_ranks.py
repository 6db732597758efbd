"""Run the tests of tests/gpu/test_ranks.py on a CPU, over gloo, with the layouts of two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_ranks import *  # noqa: F403


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def most_ranks() -> int:
    return 2
