"""The completions that a shell receives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.main import main


def completed(line: str, folder: Path) -> list[str]:
    out = folder / "completions"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
    }
    environment = {**os.environ, **asked, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": " "}
    subprocess.run([sys.executable, "-m", "megarl"], cwd=folder, env=environment, check=True)

    return [each.strip() for each in out.read_text().split("\n")]


def test_commands_files_and_keys_are_completed(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("kind: sft")
    assert set(completed("megarl c", tmp_path)) == {"check", "config", "convert", "completion"}
    assert "mine.yaml" in completed("megarl train mi", tmp_path)
    assert "configs/quickstart.yaml" in completed("megarl train configs/qui", tmp_path)
    assert completed("megarl train configs/quickstart.yaml trainer.total_s", tmp_path) == [
        "trainer.total_steps="
    ]
    for sft in ("mine.yaml", "configs/quickstart_sft.yaml"):
        assert completed(f"megarl check {sft} trainer.samples_per", tmp_path) == ["trainer.samples_per_step="]
    assert completed("megarl check absent.yaml trainer.prompts_per", tmp_path) == [
        "trainer.prompts_per_step="
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_code(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "megarl" in capsys.readouterr().out
