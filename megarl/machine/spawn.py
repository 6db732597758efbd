"""Starts processes that inherit nothing from the process that starts them.

That process may have threads and a GPU. Its script is not run in the new processes either.

multiprocessing's own processes begin by running the script, so a script without `if __name__ == "__main__":`
would start itself again in each of them.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any

_SCRIPT = ("__file__", "__spec__")  # attributes of `__main__` by which multiprocessing finds the script
_launching = Lock()
_END_S = 10.0  # in which a process ends that has sent its result


class FreshProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802  (multiprocessing's name for it)
        with _launching, _without_script():
            return SpawnProcess._Popen(process_obj)


class FreshContext(SpawnContext):
    """A context whose processes do not import the script, so they can only run importable code."""

    Process = FreshProcess


class BareProcess(FreshProcess):
    """A process started through `launcher`, an executable that executes Python."""

    launcher: str

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802
        assert isinstance(process_obj, BareProcess)
        resource_tracker.ensure_running()  # shared by all processes, so it must start without the launcher

        with _launching, _without_script():
            # multiprocessing keeps the executable in a global, so it is set for this start only.
            usual = spawn.get_executable()
            spawn.set_executable(process_obj.launcher)
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                spawn.set_executable(usual)


class BareContext(SpawnContext):
    """A context whose processes have only the given environment variables.

    Code in them cannot find the variables of this process.

    Raises:
        PermissionError: Nothing can be executed in the folder of temporary files.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The folder exists as long as the context.
        self._folder = tempfile.TemporaryDirectory(prefix="megarl-launcher-")
        self.launcher = Path(self._folder.name, "python")
        given = shlex.join(f"{name}={value}" for name, value in environment.items())
        self.launcher.write_text(
            f'#!/bin/sh\nexec /usr/bin/env -i {given} {shlex.quote(sys.executable)} "$@"\n'
        )
        self.launcher.chmod(0o700)

        if not os.access(self.launcher, os.X_OK):
            raise PermissionError(
                f"a launcher in {tempfile.gettempdir()} cannot be executed (it is mounted noexec): set "
                f"TMPDIR to a folder that is not"
            )

    # The method name of multiprocessing.
    # pyrefly: ignore[bad-override]
    def Process(self, *arguments: Any, **named: Any) -> BareProcess:  # noqa: N802
        process = BareProcess(*arguments, **named)
        process.launcher = str(self.launcher)
        return process


def run_calls(
    context: SpawnContext | ForkContext,
    target: Callable[..., None],
    calls: Sequence[tuple[Any, ...]],
    at_once: int,
    *,
    daemon: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Run each call in a process of its own, and yield what the processes send, with the number of the call.

    A process may send texts about its progress, and then its result, which is no text. All processes have
    ended when the iterator has.

    Args:
        target: The function, whose first argument is the end of the pipe by which it sends.
        calls: The other arguments of each call.
        at_once: The number of processes that run at the same time.
        daemon: Whether the processes end with this one. They cannot start processes then.

    Raises:
        EOFError: A process ended without a result. The argument is the number of its call.
    """
    waiting = deque(enumerate(calls))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    ended: list[BaseProcess] = []

    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number, arguments = waiting.popleft()
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=target, args=(theirs, *arguments), daemon=daemon)
                process.start()
                # If this end stayed open here too, the death of the process would never appear.
                theirs.close()
                running[mine] = number, process

            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number, process = running[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    raise EOFError(number) from None
                if not isinstance(message, str):
                    ended.append(process)
                    del running[ready]
                yield number, message
    finally:
        for process in (*ended, *(process for _, process in running.values())):
            process.terminate()
            process.join(_END_S)


@contextmanager
def _without_script() -> Generator[None]:
    main = vars(sys.modules["__main__"])
    kept = {name: main[name] for name in _SCRIPT if name in main}
    main.update(dict.fromkeys(kept))

    try:
        yield
    finally:
        main.update(kept)
