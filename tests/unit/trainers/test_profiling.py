"""Test which errors of the profiler's own calls end a run, with groups that only record calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ProfileConfig
from megarl.controller.calls import Call
from megarl.controller.errors import PhaseTimeoutError, RankFailure, WorkerError
from megarl.controller.futures import RemoteFuture
from megarl.controller.group import RoleGroup
from megarl.controller.messages import CallFailure, FailureKind
from megarl.trainers.step_observers import StepProfiler

BEGIN, END = "begin_profile", "end_profile"


def failed(kind: FailureKind) -> WorkerError:
    failure = CallFailure(kind, f"this is its {kind.name}", "", 0.0)
    return WorkerError(RankFailure("actor", 0, "10.0.0.2", 7, BEGIN, failure))


class Answer(RemoteFuture[Any]):
    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome

    @property
    def calls(self) -> Sequence[Call]:
        return ()

    def get(self, timeout: float | None = None) -> Any:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Group(RoleGroup):
    """Stub of one rank, whose calls of `errors` fail."""

    world_size = 1  # pyrefly: ignore[bad-override]

    def __init__(self, role: str, errors: dict[str, Exception], called: list[str]) -> None:
        self.role = role
        self._errors = errors
        self._called = called

    def call_rank(self, rank: int, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method.name
        self._called.append(f"{self.role}.{name}")
        error = self._errors.get(name)
        # A group that exceeded a limit accepts no calls.
        if isinstance(error, PhaseTimeoutError):
            raise error
        return Answer(error or f"{self.role}.json")


def profiler(errors: dict[str, Exception], called: list[str]) -> StepProfiler:
    config = ProfileConfig(steps=(2,), roles=("critic", "actor"))
    groups = [Group("critic", {}, called), Group("actor", errors, called)]
    return StepProfiler(config, groups, Path("run"))


HUNG = PhaseTimeoutError("actor", BEGIN, 60.0, [])


@pytest.mark.parametrize("error", [failed(FailureKind.death), failed(FailureKind.device), HUNG])
@pytest.mark.parametrize("where", [BEGIN, END])
def test_a_rank_that_is_lost_around_a_step_does_not_end_the_run(
    error: Exception, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step recovers from the loss; the other ranks end what they began."""
    called: list[str] = []
    num_steps = 0
    with profiler({where: error}, called).step(2):
        num_steps += 1
    assert num_steps == 1
    assert called == [f"{role}.{name}" for name in (BEGIN, END) for role in ("critic", "actor")]
    (line,) = (record.message for record in caplog.records if "a rank was lost" in record.message)
    assert "actor" in line


@pytest.mark.parametrize("where", [BEGIN, END])
def test_an_error_of_the_profiler_itself_ends_the_run(where: str) -> None:
    """A full disk, for example, would come again."""
    profiled = profiler({where: failed(FailureKind.exception)}, []).step(2)
    with pytest.raises(WorkerError, match="this is its exception"), profiled:
        pass


def test_an_error_of_the_step_is_not_the_profilers() -> None:
    called: list[str] = []
    with pytest.raises(WorkerError, match="this is its death"), profiler({}, called).step(2):
        raise failed(FailureKind.death)
    assert called == [f"critic.{BEGIN}", f"actor.{BEGIN}"]


def test_other_steps_are_not_profiled() -> None:
    called: list[str] = []
    with profiler({BEGIN: HUNG}, called).step(3):
        pass
    assert called == []
