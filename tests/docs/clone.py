"""A reader's folder, in which the pages' commands are typed."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

import pytest

from megarl.cli.main import main
from tests.integration.dockerfile_steps import DockerfileSteps

COLUMNS = "140"


class Ended(NamedTuple):
    status: int
    printed: str


class Clone:
    """That of the CPU image, with megarl and what it needs, and nothing that only its developers need. Its
    warm-up is short."""

    def __init__(self, image: DockerfileSteps) -> None:
        self.image = image
        self.folder = image.folder
        warm_up = self.folder / "configs" / "quickstart_sft.yaml"
        text = warm_up.read_text()

        for long, short in (
            (r"(total|warmup)_steps: \d+", r"\1_steps: 1"),
            ("sft_train.parquet", "sft_validation.parquet"),
        ):
            text, changes = re.subn(long, short, text)
            assert changes > 0

        warm_up.write_text(text)

    def call(self, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ended:
        """A command of `megarl` that starts nothing, in this process."""
        monkeypatch.chdir(self.folder)
        monkeypatch.setenv("COLUMNS", COLUMNS)
        name, *arguments = shlex.split(text)
        assert name == "megarl"
        capsys.readouterr()
        status = main(arguments)

        return Ended(status, "".join(capsys.readouterr()))

    def type(self, text: str) -> Ended:
        """In a shell, with the image's own programs. Make takes the virtual environment as it is, where it is
        not told to make all."""
        taken = text if "--always-make" in text else text.replace("make ", "make --old-file=.venv/.ready ")
        ended = self.image.type(taken, COLUMNS=COLUMNS)
        return Ended(ended.returncode, ended.stdout)
