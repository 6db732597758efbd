"""docker/Dockerfile.cpu without Docker: its steps make a clean environment in an empty folder, where its command runs the quickstart."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.dockerfile_steps import DockerfileSteps

ROOT = Path(__file__).parents[2]
# One step of the warm-up instead of 800, and one of PPO on 16 prompts instead of 70 on 128.
WARM_UP = "configs/quickstart_sft.yaml"
SHORT = ("trainer.total_steps=1", "trainer.prompts_per_step=16", "trainer.updates_per_step=1")


def pip_has_wheels_of_its_own() -> bool:
    """A machine whose pip is told where wheels are (find-links) has torch's CPU build there, and perhaps no way to torch's index."""
    settings = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    return "find-links" in settings


@pytest.mark.slow
def test_the_steps_of_the_cpu_image_make_what_runs_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python` of the image's base is this machine's, of the same version."""
    monkeypatch.setenv("PIP_NO_COMPILE", "1")  # what is used is compiled when it is; half a minute
    folder, programs = tmp_path / "image", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    build_args = {"TORCH_INDEX": (tmp_path / "no_index").as_uri()} if pip_has_wheels_of_its_own() else {}
    image = DockerfileSteps(ROOT / "docker/Dockerfile.cpu", ROOT, folder, build_args, path=f"{programs}:/usr/bin:/bin")
    image.build()

    assert image.user == "1000"
    venv = folder / ".venv"
    assert "include-system-site-packages = false" in (venv / "pyvenv.cfg").read_text()
    assert not (folder / ".git").exists()
    warm_up = folder / WARM_UP
    warm_up.write_text(re.sub(r"(total|warmup)_steps: \d+", r"\1_steps: 1", warm_up.read_text()))
    ended = image.start(*SHORT)
    assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    assert "held-out accuracy: " in ended.stdout
    summary = json.loads((folder / "outputs/quickstart/summary.json").read_text())
    assert summary["steps"] == 1
    shutil.rmtree(venv)  # 2 GB
