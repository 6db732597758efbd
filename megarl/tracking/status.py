"""Status of a running job, `status.json`.

The run writes the file atomically every few seconds; readers do not need the run to respond.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from megarl.machine.errors import in_short
from megarl.machine.files import write_whole
from megarl.machine.folder_kinds import is_run, no_run
from megarl.tracking.run_files import FAILURE_FILE, STATUS_FILE, SUMMARY_FILE

FORMAT = 1
EVERY_S = 5.0
RUNNING = "running"
ENDED = "ended"
STOPPED = "stopped"
INTERRUPTED = "interrupted"
FAILED = "failed"
_log = logging.getLogger(__name__)


class StatusError(ValueError):
    """The status cannot be read. The message gives the reason in one line."""


class _Exact:
    """A part of the file. pydantic converts no value of it, and accepts no other keys."""

    __pydantic_config__ = {"strict": True, "extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus(_Exact):
    """Status of one rollout replica.

    Attributes:
        state: generating, idle, or starting.
        silent_s: Seconds since the replica's last sample.
    """

    state: str
    in_flight: int
    tokens_per_s: float
    silent_s: float


@dataclass(frozen=True, kw_only=True)
class GroupStatus(_Exact):
    """Status of a prompt with missing samples.

    Attributes:
        where: Location of the oldest missing sample.
        seconds: Time since the prompt was submitted.
    """

    uid: str
    missing: int
    where: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RunStatus(_Exact):
    """Status of a run.

    Attributes:
        state: running, ended, stopped (by SIGTERM or Ctrl-C, after a checkpoint), interrupted (by
            a second Ctrl-C) or failed.
        phases: Current phases of the driver, innermost last.
        phase_s: Seconds since the innermost phase began.
        groups: Number of prompts by state.
        oldest: At most ten incomplete prompts.
        tokens_per_s: Average over about the last minute, as are trainer_idle and engines_idle (shares of
            time).
        num_recoveries: Number of times that lost trainer processes were restarted.
        recovery_lost_s: Time that was lost with them.
        goodput: Share of the run's time that was not lost.
        excluded_nodes: Addresses of nodes that are no longer used.
        stalled: Description of what has made no progress for a long time; None if nothing is stalled.
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
    num_recoveries: int
    recovery_lost_s: float
    goodput: float
    excluded_nodes: list[str]
    tokens_per_s: float
    trainer_idle: float
    engines_idle: float
    stalled: str | None


@dataclass(frozen=True, kw_only=True)
class StatusRecord(_Exact):
    """Contents of `status.json`.

    Attributes:
        written_at: Seconds since the epoch.
        pid: Process id of the driver on `host`.
    """

    format: int
    written_at: float
    host: str
    pid: int
    run: RunStatus

    @property
    def is_alive(self) -> bool | None:
        """Whether the process that wrote the status still exists; None if it ran on another machine."""
        return os.path.exists(f"/proc/{self.pid}") if self.host == socket.gethostname() else None


class StatusWriter:
    """Writes the status file every few seconds in a thread while the block runs, and once more at the end.

    `look` is called in that thread. A failed write is reported once. A stall is reported when it begins.
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
            # A run that remains stalled is reported once.
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
            # A full disk would otherwise produce a warning every few seconds.
            if not self._has_warned:
                _log.warning("%s: cannot be written (%s); the run continues without it", self._path, error)
            self._has_warned = True


def read_status(run_dir: Path) -> StatusRecord:
    """Read the status of a run.

    Raises:
        StatusError: The folder does not exist, is not a run's folder, or has no status yet; or the file is
            damaged or has another format.
    """
    # Imported here, because a run that only writes its status does not need it.
    from pydantic import TypeAdapter, ValidationError

    path = run_dir / STATUS_FILE
    if not is_run(run_dir):
        raise StatusError(no_run(run_dir))

    try:
        content = path.read_bytes()
        values = json.loads(content)
    except FileNotFoundError:
        raise StatusError(_why_there_is_none(run_dir)) from None
    except OSError as error:
        raise StatusError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise StatusError(
            f"{path}: is damaged: it is not JSON ({error}); a running job rewrites it within seconds"
        ) from error

    # Compare the format first: another version may have changed the fields.
    if isinstance(values, dict) and isinstance(values.get("format"), int) and values["format"] != FORMAT:
        raise StatusError(
            f"{path}: has format {values['format']}, but this megarl reads {FORMAT}; use the version of "
            f"megarl that runs the job"
        )

    # Missing and unknown keys both mean damage, since the format number matches.
    try:
        return TypeAdapter(StatusRecord).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the top level"
        raise StatusError(
            f"{path}: is damaged: {where}: {first['msg']}, found {in_short(first['input'])}; a running job "
            "rewrites it within seconds"
        ) from None


def _why_there_is_none(run_dir: Path) -> str:
    if (run_dir / SUMMARY_FILE).exists() or (run_dir / FAILURE_FILE).exists():
        return f"{run_dir}: this run has ended and left no {STATUS_FILE}; see `megarl report {run_dir}`"
    return (
        f"{run_dir}: no {STATUS_FILE} yet: a reinforcement learning run writes it once its processes have "
        f"started"
    )
