"""Run whole-run checks, each as a separate command: runs compared with each other or with the plan, and runs
that learn."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize(
    "modules",
    [("placements", "experts"), ("memory",), ("shapes",), ("fp8",), ("distillation",), ("calibration",)],
)
def test_soak_programs_end_without_an_error(modules: tuple[str, ...]) -> None:
    """Covers every placement with SGLang, a model with experts that learns, freed memory compared with the
    plan, a vision-language model that learns, a run with an engine in FP8 that learns, a
    student that reaches its teacher, and the calibration of this machine."""
    for module in modules:
        ended = subprocess.run(
            [sys.executable, "-m", f"tests.soak.{module}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
