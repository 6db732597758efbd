"""Test the CPU image built from the real wheels that pip finds; tests/docs/conftest.py builds it from the
packages installed here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.dockerfile_steps import cpu_image

# One step of warm-up instead of 800, and one PPO step on 16 prompts instead of 70 on 128.
WARM_UP = "configs/quickstart_sft.yaml"
SHORT = ("trainer.total_steps=1", "trainer.prompts_per_step=16", "trainer.updates_per_step=1")


def pip_has_wheels_of_its_own() -> bool:
    """Return whether pip is configured with a wheel folder (find-links). Such a machine has torch's CPU build
    there, and perhaps no access to torch's index."""
    settings = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    return "find-links" in settings


def test_the_command_of_the_image_runs_the_quickstart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Modules are compiled at first use instead; saves half a minute.
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    build_args = {"TORCH_INDEX": (tmp_path / "no_index").as_uri()} if pip_has_wheels_of_its_own() else {}
    image = cpu_image(tmp_path, **build_args)
    image.build()
    warm_up = image.folder / WARM_UP
    warm_up.write_text(re.sub(r"(total|warmup)_steps: \d+", r"\1_steps: 1", warm_up.read_text()))
    ended = image.start(*SHORT)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert "held-out accuracy: " in ended.stdout
    shutil.rmtree(image.folder)  # 2 GB
