"""Results of calls to several replicas of a role, some of which may be lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import WorkerFuture
from megarl.controller.messages import FailureKind, qualified_name
from megarl.machine.errors import EngineDeadError


def results_of[T](
    futures: Mapping[int, WorkerFuture[T]],
    lost: dict[int, Exception],
    is_lost: Callable[[WorkerError | PhaseTimeoutError], bool],
) -> dict[int, T]:
    """Returns the results by replica.

    Failures of lost replicas go into `lost`. Any other failure is raised after all calls have ended.
    """
    results: dict[int, T] = {}
    failure: WorkerError | PhaseTimeoutError | None = None

    # Wait for all calls even after a failure: a replica must not have a call in progress afterwards.
    for number, future in futures.items():
        try:
            results[number] = future.get()
        except (WorkerError, PhaseTimeoutError) as error:
            if is_lost(error):
                lost[number] = error
            else:
                failure = failure or error

    if failure is not None:
        raise failure
    return results


def is_dead_or_failed_start(error: WorkerError | PhaseTimeoutError) -> bool:
    return is_dead(error) or is_failed_start(error)


def is_dead(error: WorkerError | PhaseTimeoutError) -> bool:
    """Whether the process, its engine or its GPU is gone or stuck. Others come from the call itself."""
    # The group is killed when a call exceeds its limit, so a timeout is a death.
    if isinstance(error, PhaseTimeoutError):
        return True
    return error.kind.is_loss or error.error_type == qualified_name(EngineDeadError)


def is_failed_start(error: WorkerError | PhaseTimeoutError) -> bool:
    """Whether a replica failed to start."""
    return (
        isinstance(error, WorkerError)
        and error.role == "rollout"
        and error.method == "__init__"
        and error.kind is FailureKind.exception
    )
