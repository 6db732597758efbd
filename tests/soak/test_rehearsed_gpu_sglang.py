"""Run the tests of tests/gpu/test_sglang_models.py on a CPU, with the models that SGLang supports there."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_sglang_models import *  # noqa: F403

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def two_devices() -> None:
    pytest.skip("SGLang runs gated delta nets on GPUs only")
