"""Test the CPU image built from the wheels of the package index; tests/docs/conftest.py builds it from the
packages installed here."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.integration.dockerfile_steps import cpu_image

# One step of warm-up instead of 800, and one PPO step on 16 prompts instead of 70 on 128.
WARM_UP = "configs/quickstart_sft.yaml"
SHORT = ("trainer.total_steps=1", "trainer.prompts_per_step=16", "trainer.updates_per_step=1")


def test_the_command_of_the_image_runs_the_quickstart(tmp_path: Path) -> None:
    image = cpu_image(tmp_path, TORCH_INDEX="")  # torch of the package index, whose hashes the lock has
    image.build()
    warm_up = image.folder / WARM_UP
    warm_up.write_text(re.sub(r"(total|warmup)_steps: \d+", r"\1_steps: 1", warm_up.read_text()))
    ended = image.start(*SHORT)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert "held-out accuracy: " in ended.stdout
    shutil.rmtree(image.folder)  # 7 GB
