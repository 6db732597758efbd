"""Test the CPU image, built by docker/Dockerfile.cpu's own steps from the package index and Debian.

tests/docs/conftest.py builds it from the packages installed here, without Debian's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.docs.pages import ROOT
from tests.soak.chroot_image import ChrootImage

# One step of warm-up instead of 800, and one PPO step on 16 prompts instead of 70 on 128.
SHORT_WARM_UP = r"sed -i -E 's/(total|warmup)_steps: [0-9]+/\1_steps: 1/' configs/quickstart_sft.yaml"
SHORT = ("trainer.total_steps=1", "trainer.prompts_per_step=16", "trainer.updates_per_step=1")


def test_the_command_of_the_image_runs_the_quickstart(python_on_debian: Path, tmp_path: Path) -> None:
    # torch of the package index, whose hashes the lock has
    image = ChrootImage(
        ROOT / "docker" / "Dockerfile.cpu", ROOT, (python_on_debian,), tmp_path, {"TORCH_INDEX": ""}
    )
    image.build()
    assert image.user == "1000"
    assert image.type(SHORT_WARM_UP).returncode == 0
    ended = image.start(*SHORT)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert "held-out accuracy: " in ended.stdout
    shutil.rmtree(tmp_path)  # 7 GB
