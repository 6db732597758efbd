"""The section of docs/cli.md on file formats names the files and fields that the code writes."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megarl.batch.serialization import MAGIC
from megarl.checkpoints import role_folder, run_folder
from megarl.config.json_schema import DRAFT
from megarl.tracking import run_files, samples, status
from megarl.tracking.run_files import SCALE_FILE
from megarl.tracking.timeline import MAX_EVENTS, TIMELINE_FILE
from megarl.trainers.evaluation import PARTIAL_FILE, SAMPLES_FILE, ScoredSample, SourceResult
from megarl.trainers.ppo import SAMPLES_FILE as SAMPLES_AHEAD
from megarl.trainers.resume import STATE_FILE
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
FILES = [
    *(value for name, value in vars(run_files).items() if name.endswith("_FILE")),
    *(value for name, value in vars(run_folder).items() if name.endswith("_FILE")),
    role_folder.MANIFEST_FILE,
    *role_folder.WHOLE_FILES,
    SCALE_FILE,
    TIMELINE_FILE,
    STATE_FILE,
    SAMPLES_FILE,
    PARTIAL_FILE,
    SAMPLES_AHEAD,
]


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_on_the_page(name: str) -> None:
    assert name in PAGE


def test_the_fields_of_the_status() -> None:
    names = {field.name for field in fields(status.RunStatus)}
    assert [name for name in names if f"`run.{name}`" not in PAGE] == []
    for kind in (status.ReplicaStatus, status.GroupStatus):
        shown = "{" + ", ".join(field.name for field in fields(kind)) + "}"
        assert shown in PAGE
    assert f"| `format` | {status.FORMAT} |" in PAGE


def test_the_fields_of_an_evaluation() -> None:
    shown = ", ".join(f"`{name}`" for name in ScoredSample._fields)
    assert shown in PAGE
    assert [name for name in SourceResult._fields if f"`{name}" not in PAGE] == []


def test_the_formats_of_checkpoints_batches_and_schemas() -> None:
    assert (run_folder.FORMAT, role_folder.FORMAT) == (1, 1)
    assert "`format: 1`" in PAGE
    assert MAGIC.decode().replace("\n", "\\n").replace("\0", "\\0") in PAGE
    assert DRAFT.split("/")[-2] == "2020-12"
    assert "draft 2020-12" in PAGE
    assert f"{MAX_EVENTS:,} events" in PAGE


def test_the_columns_of_samples_are_on_the_page_on_tracking() -> None:
    tracking = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
    assert [name for name in samples.SCHEMA.names if f"`{name}`" not in tracking] == []
