"""The figures of benchmarks/front.py, on pages and files whose figures are counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import front

REFERENCE = """\
| key | default | when to set it |
|---|---|---|
| `trainer.total_steps` | `100` | always |

### trainer

| key | type | default | description |
|---|---|---|---|
| `trainer.total_steps` | whole number | `100` | steps |
| `trainer.seed` | whole number | `0` | seed |

| column | contents |
|---|---|
| `uid` | a prompt |
"""
COMMANDS = """\
usage: megarl train [-h] [--verbose] [--submit URL] CONFIG
                    [key=value ...]

usage: megarl stop [-h] RUN_DIR

  the text of an option may name --submit
"""
CLUSTER = "base: configs/base/cluster.yaml\ntrainer: {total_steps: 5, seed: 1}\nactor: {lora: {}}\n"


def test_every_figure_is_the_one_counted_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the cluster file: base, two of the trainer, and an empty section."""
    for name, text in {
        "docs/configuration.md": REFERENCE,
        "docs/cli.md": COMMANDS,
        "docs/generate/verl.md": "a part of a page\n",
        "configs/run.yaml": CLUSTER,
        "configs/quickstart.yaml": "trainer: {seed: 1}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(front, "checked", lambda tree: "fits\n1 GiB\n")

    assert front.figures(tmp_path) == {
        "keys of a cluster file, mean": 4,
        "names of keys": 2,
        "pages": 2,
        "lines of pages": len(REFERENCE.splitlines()) + len(COMMANDS.splitlines()),
        "commands": 2,
        "options": 2,
        "lines of megarl check": 2,
    }
