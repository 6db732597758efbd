"""Command that a test starts and watches, with all its descendant processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tests import fork_server
from tests.processes import gone_within

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0  # limit of a test's waits, on a busy machine
_MARK = "TESTS_COMMAND"  # environment variable


class Command:
    """Python with these arguments, from the repository's root or `cwd`, forked if there is a fork server. Its
    output goes to `log`.

    Descendants are recognized by a mark that processes inherit, even if their parent has ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] = os.environ,
        python: Sequence[str] = fork_server.PYTHON,
        cwd: Path = ROOT,
    ) -> None:
        self.log = log
        self._mark = uuid.uuid4().hex

        with log.open("w") as out:
            self.process = psutil.Popen(
                [*python, *arguments],
                cwd=cwd,
                env={**environment, _MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], object], look_s: float = 0.2) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < end_s, self.said()
            time.sleep(look_s)

    def status(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit status, as a shell reports it."""
        try:
            status = self.process.wait(limit_s)
        except psutil.TimeoutExpired as error:
            raise AssertionError(self.said()[-5000:]) from error
        return status if status >= 0 else 128 - status

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def processes(self, named: str = "") -> list[psutil.Process]:
        """Return its live processes, including the command's own. `named`: only those with this text in their
        command line."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark and named in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:  # it has ended, or belongs to another user
                continue

        return found

    def kill_all(self) -> None:
        """Send SIGKILL to all processes at once; returns when all have ended."""
        while everything := self.processes():
            for process in everything:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.process.wait(timeout=60)
            assert gone_within(everything, 60) == []
