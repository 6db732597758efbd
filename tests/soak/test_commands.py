"""Whole runs that are compared with each other or with the plan, each a command of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize("module", ["placements", "memory", "experts"])
def test_it_ends_well(module: str) -> None:
    """The same run in every placement with SGLang; memory that a run gives back, beside the plan; what a model with experts learns."""
    ended = subprocess.run([sys.executable, "-m", f"tests.soak.{module}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
