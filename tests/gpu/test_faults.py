"""Test what a process sees of a faulty kernel: the exception, and whether it can use its GPU afterwards.

Recovery (docs/resilience.md) takes a GPU whose error has these words for lost, and ends its process.
tests/unit/test_gpu_faults.py runs this test on the CPU, with a process that raises the expected exception.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
# The kernel writes a tebibyte behind a tensor. In a file, because Triton reads the source of kernels.
PROGRAM = """
import json
import torch
import triton
import triton.language as tl

@triton.jit
def write_far(pointer):
    tl.store(pointer + (1 << 38), 1.0)

def attempt(work):
    try:
        work()
        torch.cuda.synchronize()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

def fault():
    write_far[(1,)](tensor)

tensor = torch.zeros(1, device="cuda")
found = [attempt(fault), attempt(lambda: tensor + 1), attempt(lambda: torch.zeros(1, device="cuda"))]
print(json.dumps(found), flush=True)
"""


@pytest.fixture
def program(device: torch.device, tmp_path: Path) -> Sequence[str]:
    """Return the command of a process that prints what it sees of a fault, and of its GPU afterwards twice."""
    file = tmp_path / "fault.py"
    file.write_text(PROGRAM)
    return [sys.executable, str(file)]


def test_an_illegal_access_is_an_exception_and_the_process_has_lost_its_gpu(
    program: Sequence[str], record_property: Callable[[str, object], None]
) -> None:
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    record_property("exit code of the process after an illegal access", ended.returncode)
    assert ended.stdout.strip(), f"the process printed nothing: {ended.stderr[-2000:]}"
    of_fault, *afterwards = json.loads(ended.stdout.strip().splitlines()[-1])
    kind, text = of_fault
    record_property("an illegal access raises", f"{kind}: {text.splitlines()[0]}")
    for number, found in enumerate(afterwards, start=1):
        said = "nothing" if found is None else f"{found[0]}: {found[1].splitlines()[0]}"
        record_property(f"use {number} of the GPU afterwards raises", said)

    assert "CUDA error" in text
    assert "illegal memory access" in text
    assert kind == "AcceleratorError"
    # The error stays, so the process is of no use; nothing but its owner ends it.
    assert all(found is not None for found in afterwards)


def test_another_process_can_use_the_gpu_after_it(program: Sequence[str], device: torch.device) -> None:
    subprocess.run(program, cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=False)
    assert float(torch.ones(1000, device=device).sum()) == 1000
