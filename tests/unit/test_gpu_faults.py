"""Run the tests of tests/gpu/test_faults.py on a CPU, with a process that raises what a GPU is expected to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu.test_faults import *  # noqa: F403
from tests.gpu.test_faults import PROGRAM

# In front of the program: a device that does not exist, with a fault that stays.
ON_A_CPU = """
import torch

has_failed = []

def synchronize():
    if has_failed:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nSearch for it")

def write_far(pointer):
    has_failed.append(True)

zeros = torch.zeros
torch.zeros = lambda *shape, device: zeros(*shape)
torch.cuda.synchronize = synchronize
"""


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def program(tmp_path: Path) -> Sequence[str]:
    kernel = PROGRAM[PROGRAM.index("import triton\n") : PROGRAM.index("def attempt")]
    launch = "write_far[(1,)](tensor)"
    assert launch in PROGRAM
    file = tmp_path / "fault.py"
    file.write_text(ON_A_CPU + PROGRAM.replace(kernel, "").replace(launch, "write_far(tensor)"))
    return [sys.executable, str(file)]
