"""Test that the runs of docs/first_run.md can start: what `megarl init` writes.

The page's commands are read in their order, with tiny models for those that the page's stages train, and with
rows that these can read. `megarl check` takes the arguments of `megarl train`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.docs.pages import ROOT, blocks, commands
from tests.integration.tiny_run import save_policy
from tests.unit.roles.reward_models import save_reward_model

PAGE = ROOT / "docs" / "first_run.md"
ROWS = {
    "chats.jsonl": lambda n: {
        "messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]
    },
    "questions.jsonl": lambda n: {"question": f"{n}+1=", "answer": str(n + 1)},
    "pairs.jsonl": lambda n: {"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)},
}
# What an earlier stage of the page trains, and the folder with a tiny model in its place.
TRAINED = {"sft/run/huggingface": "trained", "reward_model/run/huggingface": "judge"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the model and the data of the page's reader, who works in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    save_policy(tmp_path / "MODEL_DIR", num_layers=2)
    save_policy(tmp_path / "trained", num_layers=2)
    save_reward_model(tmp_path / "judge")

    for name, row in ROWS.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(row(number))}\n" for number in range(80)))

    return tmp_path


def test_the_rows_on_the_page_have_these_columns() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = dict(re.findall(r"\| `(\w+\.jsonl)` \| `(\{.*\})` \|", text))
    assert {name: set(json.loads(row)) for name, row in shown.items()} == {
        name: set(row(0)) for name, row in ROWS.items()
    }


def with_tiny_models(text: str) -> str:
    for name, tiny in TRAINED.items():
        text = text.replace(name, tiny)
    return text


@pytest.mark.usefixtures("forked_children")
def test_every_run_of_the_page_passes_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = []

    for block in blocks(PAGE):
        for command in commands(block):
            program, *arguments = shlex.split(with_tiny_models(command.text))
            if program == "python":
                subprocess.run([sys.executable, *arguments], check=True)
            elif arguments[0] == "init":
                assert main([*arguments, "--device", "cpu"]) == 0, capsys.readouterr().err
            elif arguments[0] in ("check", "train"):
                assert main(["check", *arguments[1:]]) == 0, capsys.readouterr().err
                started.append(arguments[1])

    files = ["dpo/run.yaml", "grpo/run.yaml", "ppo/run.yaml", "reward_model/run.yaml", "sft/run.yaml"]
    assert sorted(set(started)) == files
