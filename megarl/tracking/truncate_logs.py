"""Cuts the files of a run behind a step, so that a run that goes on from there leaves what one without a stop would have left."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.errors import DataLossError
from tensorboard.summary.writer.record_writer import RecordWriter

from megarl.machine.files import write_whole
from megarl.tracking.loggers import GENERATIONS_FILE, METRICS_FILE, TENSORBOARD_FOLDER
from megarl.tracking.tracked_run import RUN_IDS

_EVENT_FILES = "events.out.tfevents.*"


def cut_after(output_dir: Path, step: int) -> None:
    """Removes what was logged for steps after `step`; each file is replaced at once. A line that a kill has torn goes as well."""
    for name in (METRICS_FILE, GENERATIONS_FILE):
        if (path := output_dir / name).exists():
            content = path.read_bytes()
            kept = b"".join(_lines_until(content, step))
            if kept != content:
                write_whole(path, kept)
    for path in sorted((output_dir / TENSORBOARD_FOLDER).glob(_EVENT_FILES)):
        _cut_events(path, step)


def clear(output_dir: Path) -> None:
    """Removes all that was logged: the run starts over, with services as another one."""
    for name in (METRICS_FILE, GENERATIONS_FILE):
        (output_dir / name).unlink(missing_ok=True)
    for path in (*(output_dir / TENSORBOARD_FOLDER).glob(_EVENT_FILES), *output_dir.glob(RUN_IDS)):
        path.unlink()


def _lines_until(content: bytes, step: int) -> Iterator[bytes]:
    for line in content.splitlines(keepends=True):
        if line.endswith(b"\n") and json.loads(line)["step"] <= step:
            yield line


def _cut_events(path: Path, step: int) -> None:
    """Events without a value (the version's header) stay."""
    partial = path.with_name(f".{path.name.replace('tfevents', 'partial')}")  # TensorBoard reads whatever is named tfevents
    with partial.open("wb") as file:
        writer = RecordWriter(file)
        for record in _records(path):
            event = Event.FromString(record)
            if not event.HasField("summary") or event.step <= step:
                writer.write(record)
        writer.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _records(path: Path) -> Iterator[bytes]:
    """Up to the end, or to a record that a kill has torn."""
    try:
        yield from RawEventFileLoader(str(path), detect_file_replacement=False).Load()
    except DataLossError:
        return
