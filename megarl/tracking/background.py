"""Run service loggers in background threads.

An unresponsive service then delays neither training nor shutdown.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_MAX_WAITING = 1_000  # calls, far more than the steps between two responses of a live service
FLUSH_LIMIT_S = 2.0
CLOSE_LIMIT_S = 60.0


class Service(Protocol):
    """Client of a tracking service. Its methods may block and may raise."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, failed: bool) -> None: ...


class ServiceError(RuntimeError):
    """The service failed, or it cannot keep up."""


class BackgroundLogger:
    """Logger (see loggers.py) whose calls return at once.

    An error in the thread is raised by the next call. A service that could not be opened is not tried again.
    """

    def __init__(
        self, open_service: Callable[[], Service], abandon: Callable[[], None] = lambda: None
    ) -> None:
        """Start the thread and open the service in it.

        Args:
            abandon: Called if the service has not closed in time; ends whatever would keep this process from
                exiting.
        """
        self._open_service = open_service
        self._abandon = abandon
        self._calls: queue.Queue[Callable[[Service], None] | None] = queue.Queue(_MAX_WAITING)
        self._error: Exception | None = None
        self._is_late = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="tracking")
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._submit(lambda service: service.log(metrics, step))

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._submit(lambda service: service.log_generations(step, rows))

    def flush(self) -> None:
        """Wait briefly for queued calls. If the service did not catch up last time, do not wait."""
        # A slow service must not hold up training: the wait is short, and skipped while the service lags.
        deadline_s = time.monotonic() + FLUSH_LIMIT_S
        while (
            self._calls.unfinished_tasks
            and self._thread.is_alive()
            and not self._is_late
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.01)

        self._is_late = bool(self._calls.unfinished_tasks)
        self._raise()

    def close(self, failed: bool) -> None:
        deadline_s = time.monotonic() + CLOSE_LIMIT_S
        try:
            # The queue is ordered, so the service closes after it has received everything logged before.
            self._calls.put(lambda service: service.close(failed), timeout=CLOSE_LIMIT_S)
            self._calls.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass

        if self._thread.is_alive():
            self._abandon()
            raise ServiceError(
                f"the service did not accept all queued data within {CLOSE_LIMIT_S:g} s after the end; the "
                f"rest is lost"
            )

        self._raise()

    def _submit(self, call: Callable[[Service], None]) -> None:
        if self._thread.is_alive():
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                raise ServiceError(
                    f"{_MAX_WAITING} calls are queued for the service; further calls are dropped"
                ) from None
        self._raise()

    def _raise(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error

    def _work(self) -> None:
        service = self._guarded(self._open_service)
        while service is not None:
            call = self._calls.get()
            if call is None:
                break
            self._guarded(lambda call=call: call(service))
            self._calls.task_done()

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (the boundary of a thread: the next call raises it)
            self._error = error
            return None
