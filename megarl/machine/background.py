"""Work in the background of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


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
