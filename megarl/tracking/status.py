"""`status.json`: where a run is right now. Written whole every few seconds by the run, and read without its
help."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from megarl.machine.files import write_whole
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, METRICS_FILE, STATUS_FILE, SUMMARY_FILE

FORMAT = 1
EVERY_S = 5.0
RUNNING = "running"
ENDED = "ended"
STOPPED = "stopped"
INTERRUPTED = "interrupted"
FAILED = "failed"
_log = logging.getLogger(__name__)
_Part = TypeVar("_Part")


class StatusError(ValueError):
    """There is no status to be read. The message says why in one line."""


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """state: generating, idle, or starting. in_flight: requests. silent_s: since its last sample."""

    state: str
    in_flight: int
    tokens_per_s: float
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """A prompt whose samples are not all there. missing: samples. where: of the oldest of them. seconds:
    since it was asked for."""

    uid: str
    missing: int
    where: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run is.

    Attributes:
        state: running, ended, stopped (by SIGTERM, after a checkpoint), interrupted (by Ctrl-C) or failed.
        phases: Of the driver, the innermost last; it has been in that one for phase_s.
        groups: Number of prompts by state.
        oldest: At most ten prompts that are not complete.
        tokens_per_s: Of the last minute or so, as are the shares of time.
        stalled: What has not moved for long; None if everything moves.
    """

    state: str
    step: int | None
    total_steps: int
    phases: list[str]
    phase_s: float
    weight_version: int
    max_staleness: int
    groups: dict[str, int]
    oldest: list[GroupStatus]
    replicas: list[ReplicaStatus]
    num_restarts: int
    tokens_per_s: float
    trainer_idle: float
    engines_idle: float
    stalled: str | None


@dataclass(frozen=True, kw_only=True)
class StatusRecord:
    """As it is in the file. written_at: seconds since the epoch. pid: of the driver, on `host`."""

    format: int
    written_at: float
    host: str
    pid: int
    run: RunStatus

    @property
    def is_alive(self) -> bool | None:
        """Whether the process that wrote it is there; None where this is another machine."""
        return os.path.exists(f"/proc/{self.pid}") if self.host == socket.gethostname() else None


class StatusWriter:
    """Writes the file every few seconds while its block lasts, in a thread, and once more at the end. `look`
    is asked in that thread.

    A disk that takes no file is warned of once. What does not move is warned of when it begins to.
    """

    def __init__(self, output_dir: Path, look: Callable[[], RunStatus], every_s: float = EVERY_S) -> None:
        self._path = output_dir / STATUS_FILE
        self._look = look
        self._every_s = every_s
        self._has_ended = threading.Event()
        self._has_warned = self._is_stalled = False
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.end_state = ENDED

    def __enter__(self) -> StatusWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        state = (
            self.end_state if kind is None else INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED
        )
        self._write(replace(self._look(), state=state, stalled=None))

    def _run(self) -> None:
        while not self._has_ended.is_set():
            status = self._look()
            self._write(status)
            if status.stalled is not None and not self._is_stalled:
                _log.warning("%s", status.stalled)
            self._is_stalled = status.stalled is not None
            self._has_ended.wait(self._every_s)

    def _write(self, status: RunStatus) -> None:
        record = StatusRecord(
            format=FORMAT, written_at=time.time(), host=socket.gethostname(), pid=os.getpid(), run=status
        )
        try:
            write_whole(self._path, json.dumps(asdict(record), indent=1) + "\n")
        except OSError as error:
            # A full disk would otherwise give a warning every few seconds.
            if not self._has_warned:
                _log.warning("%s: cannot be written (%s); the run continues without it", self._path, error)
            self._has_warned = True


def read_status(run_dir: Path) -> StatusRecord:
    """Raises StatusError: for a folder that is none, or no run's; a run that has written none; a file of
    another format, or damaged."""
    path = run_dir / STATUS_FILE
    if not run_dir.is_dir():
        raise StatusError(f"{run_dir}: there is no such folder; give a run's trainer.output_dir")

    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StatusError(_why_there_is_none(run_dir)) from None
    except OSError as error:
        raise StatusError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise StatusError(
            f"{path}: is damaged: it is not JSON ({error}); a running run rewrites it within seconds"
        ) from error

    # The format is compared before the fields, which another version may have changed.
    if isinstance(values, dict) and isinstance(values.get("format"), int) and values["format"] != FORMAT:
        raise StatusError(
            f"{path}: has the format {values['format']}, this megarl reads {FORMAT}; use the megarl that "
            f"runs it"
        )

    try:
        return _read(StatusRecord, values, "")
    except _DamageError as error:
        raise StatusError(f"{path}: is damaged: {error}; a running run rewrites it within seconds") from None


def _why_there_is_none(run_dir: Path) -> str:
    if (run_dir / SUMMARY_FILE).exists() or (run_dir / FAILURE_FILE).exists():
        return f"{run_dir}: this run has ended, and has left no {STATUS_FILE}; see `megarl report {run_dir}`"
    if any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE)):
        return (
            f"{run_dir}: no {STATUS_FILE} yet: it is there when a run of reinforcement learning has "
            f"started its processes"
        )

    return (
        f"{run_dir}: no run has written here (no {STATUS_FILE}, no {CONFIG_FILE}); give a run's "
        f"trainer.output_dir"
    )


# ---- from JSON


class _DamageError(Exception):
    pass


def _read(part: type[_Part], values: Any, where: str) -> _Part:
    """An instance of a dataclass, each of whose values has its type."""
    if not isinstance(values, dict):
        raise _DamageError(f"{where or 'the whole'} is no mapping")
    hints = get_type_hints(part)
    names = [entry.name for entry in fields(part)]  # type: ignore[arg-type]
    # Missing and unknown keys are both damage, since the format is the same.
    if set(names) != values.keys():
        raise _DamageError(f"{where or 'the whole'} has other keys than {', '.join(names)}")

    return part(
        **{name: _value(hints[name], values[name], f"{where}.{name}" if where else name) for name in names}
    )


def _value(hint: Any, value: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _read(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is list and isinstance(value, list):
        return [_value(get_args(hint)[0], item, where) for item in value]
    if get_origin(hint) is dict and isinstance(value, dict):
        return {name: _value(get_args(hint)[1], item, f"{where}.{name}") for name, item in value.items()}
    # JSON writes whole floats as integers.
    accepted = (float, int) if hint is float else get_args(hint) or (hint,)  # the types of a union
    if get_origin(hint) in (list, dict) or isinstance(value, bool) or not isinstance(value, accepted):
        raise _DamageError(f"{where} is {str(value)[:40]!r}")

    return value
