"""docker/Dockerfile.cpu without Docker: its steps make a clean environment in an empty folder, where its
command is the quickstart's."""

from __future__ import annotations

import json

from tests.docs.clone import Clone, Ended
from tests.docs.commands import QUICKSTART


def test_the_steps_make_what_runs_the_quickstart(quickstart: Ended, clone: Clone) -> None:
    assert clone.image.user == "1000"
    assert "include-system-site-packages = false" in (clone.folder / ".venv" / "pyvenv.cfg").read_text()
    assert not (clone.folder / ".git").exists()
    assert quickstart.status == 0, quickstart.printed
    assert "held-out accuracy: " in quickstart.printed
    assert json.loads((clone.folder / "outputs/quickstart/summary.json").read_text())["steps"] == 1


def test_nothing_that_only_developers_need_is_there(clone: Clone) -> None:
    listed = clone.type("python -m pip list --format json").printed
    names = {entry["name"].lower() for entry in json.loads(listed)}
    assert names >= {"megarl", "torch", "ray", "sglang"}
    assert not names & {"pytest", "hypothesis", "ruff", "pyrefly", "sphinx"}


def test_its_command_is_the_quickstarts(clone: Clone) -> None:
    """What `make quickstart` runs, before it compares the run with earlier ones."""
    program, *arguments = clone.image.command
    found = clone.type(f"command -v {program}").printed.strip()
    printed = clone.type(f"{QUICKSTART} --dry-run").printed
    assert found == f"{clone.folder}/.venv/bin/python"
    assert printed.splitlines()[0].split() == [".venv/bin/python", *arguments]
