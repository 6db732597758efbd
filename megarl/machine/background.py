"""Work in the background of a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

_END_LIMIT_S = 10.0


def in_background[Result](work: Callable[[], Result], name: str) -> Future[Result]:
    """Do work in a daemon thread of its own, and return the future of its result or error.

    Unlike the threads of an executor, this one does not keep a process alive that ends.

        copied = in_background(copy, "copy of the state")
        ...  # meanwhile
        copied.result()  # waits for it, and raises its error

    Args:
        name: The name of the thread.
    """
    outcome: Future[Result] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001  (thread boundary: no one may wait forever)
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


class LoopThread:
    """A daemon thread with an event loop.

        loop = LoopThread("judges")
        answer = loop.submit(ask())  # a future
        answer.result()
        loop.stop()

    Args:
        name: The name of the thread.
        prepare: Runs first, in the thread and before the loop runs. Its errors are raised here.
    """

    def __init__(self, name: str, prepare: Callable[[], object] = lambda: None) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=_run_loop, args=(prepare, started), name=name, daemon=True)
        self._thread.start()
        self._loop = started.result()

    def submit[Result](self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Stop the loop, cancelling its tasks."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_LIMIT_S)


def _run_loop(prepare: Callable[[], object], started: Future[asyncio.AbstractEventLoop]) -> None:
    # At its end, the runner cancels the remaining tasks, so that none is destroyed while it is pending.
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        try:
            prepare()
        except BaseException as error:  # noqa: BLE001
            # The boundary of the thread: the error is raised where it was started.
            started.set_exception(error)
            return
        started.set_result(loop)
        loop.run_forever()
