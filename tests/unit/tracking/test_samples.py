"""Test sample files: round trip, the size limit of the folder, errors in one line, and resumed runs."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.tracking.loggers import Tracker, clear, cut_after
from megarl.tracking.samples import (
    OF_EPISODES,
    OF_LOSS,
    SCHEMA,
    SamplesFileError,
    SampleTable,
    SampleWriter,
    read_samples,
    sample_files,
)
from megarl.tracking.tracked_run import TrackedRun

LARGE = 2**30
ROW = {
    "uid": "3",
    "data_source": "sums",
    "prompt": "<user>1+1=",
    "prompt_ids": [2, 5, 6, 5],
    "response": "é 2",
    "response_ids": [7, 1],
    "ground_truth": "2",
    "score": 1.0,
    "score_parts": [1.0, 0.25],
    "reward_numbers": '{"exact": 1.0}',
    "advantage": 0.5,
    "advantages": [0.5, 0.5],
    "log_probs": None,
    "rollout_log_probs": [-0.25, -1.5],
    "rollout_weights": [1.0, 0.5],
    "excluded": [0, 1],
    "loss_share": [0.25, 0.0],
    "weight_version": 4,
    "prompt_length": 4,
    "response_length": 2,
    "finish_reason": "stop",
}


def table(step: int) -> SampleTable:
    return SampleTable(
        pa.Table.from_pylist([{"step": step, **ROW}], SCHEMA), {7: "é 2", 1: "<end>"}, ["right", "short"]
    )


def write(folder: Path, steps: range, max_bytes: int = LARGE) -> list[int]:
    writer = SampleWriter(folder)
    for step in steps:
        writer.write(step, lambda step=step: table(step), max_bytes)  # type: ignore[misc]
    writer.close()
    return list(sample_files(folder))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    path = tmp_path / "samples" / "step_00000001.parquet"
    read = read_samples(path)
    assert read.rows.to_pylist() == [{"step": 1, **ROW, **dict.fromkeys(OF_EPISODES)}]
    assert (dict(read.tokens), list(read.score_parts)) == ({7: "é 2", 1: "<end>"}, ["right", "short"])

    # as written before episodes existed, and before what the loss makes of a token was kept
    absent = [*OF_EPISODES, *OF_LOSS, "reward_numbers"]
    pq.write_table(pq.read_table(path).drop_columns(absent), path)
    assert read_samples(path).rows.to_pylist() == [{"step": 1, **ROW, **dict.fromkeys(absent)}]


def test_beyond_the_bound_the_run_is_still_spanned(tmp_path: Path) -> None:
    write(tmp_path, range(10, 11))
    size = (tmp_path / "samples" / "step_00000010.parquet").stat().st_size
    kept = write(tmp_path, range(20, 170, 10), max_bytes=round(5.5 * size))
    assert (len(kept), kept[0], kept[-1]) == (5, 10, 160)

    # twice what evenly spaced steps would leave
    assert max(later - earlier for earlier, later in pairwise(kept)) <= 2 * 150 / 4
    # A single file is kept, however large.
    assert write(tmp_path, range(170, 171), max_bytes=size // 2) == [170]


def test_files_of_steps_that_are_given_up_go(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    (tmp_path / "samples" / "notes.parquet").touch()
    cut_after(tmp_path, 3)
    assert list(sample_files(tmp_path)) == [1, 2, 3]
    clear(tmp_path)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["notes.parquet"]


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 2))
    whole = tmp_path / "samples" / "step_00000001.parquet"
    contents = {"torn": whole.read_bytes()[:200], "text": b"no parquet", "empty": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"uid": ["1"]}), tmp_path / "other columns")
    pq.write_table(
        table(1).rows.drop_columns("score").replace_schema_metadata(pq.read_schema(whole).metadata),
        tmp_path / "one column less",
    )

    for name in (*contents, "other columns", "one column less", "absent"):
        with pytest.raises(SamplesFileError, match=f"^{tmp_path / name}: cannot be read .*$"):
            read_samples(tmp_path / name)


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples").touch()  # a file with the name of the folder
    tracker = Tracker(["jsonl"], TrackedRun(output_dir=tmp_path))

    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            tracker.log_samples(step, lambda: table(1), LARGE)
            tracker.log({"a": 1.0}, step)
        tracker.close()

    assert ["tracking: samples failed" in record.message for record in caplog.records] == [True]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
