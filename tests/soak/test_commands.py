"""Whole runs that are compared with each other or with the plan, or that learn, each a command of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize("modules", [("placements", "experts"), ("memory",)])
def test_they_end_well(modules: tuple[str, ...]) -> None:
    """The same run in every placement with SGLang, and what a model with experts learns; memory that a run
    gives back, beside the plan."""
    for module in modules:
        ended = subprocess.run(
            [sys.executable, "-m", f"tests.soak.{module}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
