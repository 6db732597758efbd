"""Loggers of services run in a thread of their own: one that does not answer holds up neither training nor
its end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_MAX_WAITING = 1_000  # calls: far more than steps between two answers of a service that lives
FLUSH_LIMIT_S = 2.0
CLOSE_LIMIT_S = 60.0


class Service(Protocol):
    """A client of a service; its methods may take their time, and raise."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, failed: bool) -> None: ...


class ServiceError(RuntimeError):
    """The service failed, or does not keep up."""


class BackgroundLogger:
    """A logger (loggers.py) whose calls return at once. What fails in the thread is raised by the next call;
    after that the service is not tried again where it could not be opened."""

    def __init__(
        self, open_service: Callable[[], Service], abandon: Callable[[], None] = lambda: None
    ) -> None:
        """abandon: ends what would hold up the end of this process, when the service has not closed in
        time."""
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
        """Waits a moment, and not again while the service is behind."""
        # A slow service must not hold up training, so the wait is short, and given up once it is behind.
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
            # The queue is in order: the service is closed after all that was logged before.
            self._calls.put(lambda service: service.close(failed), timeout=CLOSE_LIMIT_S)
            self._calls.put(None, timeout=max(0.0, deadline_s - time.monotonic()))
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        except queue.Full:
            pass

        if self._thread.is_alive():
            self._abandon()
            raise ServiceError(
                f"it has not taken what was logged within {CLOSE_LIMIT_S:g} s after the end; the rest is "
                f"lost to it"
            )

        self._raise()

    def _submit(self, call: Callable[[Service], None]) -> None:
        if self._thread.is_alive():
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                raise ServiceError(
                    f"{_MAX_WAITING} calls wait for it; what follows is not logged there"
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
            self._guarded(lambda call=call: call(service))  # type: ignore[misc]
            self._calls.task_done()

    def _guarded(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (the boundary of a thread: the next call raises it)
            self._error = error
            return None
