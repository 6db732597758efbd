"""Asyncio event loop in its own thread, for SGLang's client side.

Any thread may call the engine's methods.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_END_LIMIT_S = 10.0


class LoopThread:
    """Thread with an event loop.

    `prepare` runs first, in the thread and before the loop runs; its errors are raised here.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=_run, args=(prepare, started), name="sglang", daemon=True)
        self._thread.start()
        self._loop = started.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        """Stop the loop, cancelling its tasks."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_LIMIT_S)


def _run(prepare: Callable[[], None], started: Future[asyncio.AbstractEventLoop]) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    try:
        prepare()
    except BaseException as error:  # noqa: BLE001  the boundary of the thread: raised where it was started
        loop.close()
        started.set_exception(error)
        return

    started.set_result(loop)
    loop.run_forever()
    # Cancel the remaining tasks, so that none is destroyed while it is pending.
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
