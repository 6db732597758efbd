"""Test which of several failures is reported as the cause."""

import pytest

from megarl.controller.errors import PhaseTimeoutError, RankFailure, RankReport, first_failure
from megarl.controller.messages import CallFailure, FailureKind, Location, RankActivity


def failure(rank: int, kind: FailureKind, time_s: float) -> RankFailure:
    return RankFailure(
        "actor",
        rank,
        "10.0.0.1",
        100 + rank,
        "update",
        CallFailure(kind, f"E{rank}: why", f"Traceback of rank {rank}\n", time_s),
    )


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([(0, FailureKind.exception, 5.0), (1, FailureKind.exception, 4.0)], 1),
        ([(0, FailureKind.communication, 1.0), (1, FailureKind.exception, 4.0)], 1),
        (
            [
                (0, FailureKind.communication, 1.0),
                (1, FailureKind.death, 9.0),
                (2, FailureKind.communication, 0.5),
            ],
            1,
        ),
        ([(0, FailureKind.death, 9.0), (1, FailureKind.exception, 4.0)], 1),
        (
            [
                (0, FailureKind.communication, 1.0),
                (1, FailureKind.device, 9.0),
                (2, FailureKind.exception, 0.5),
            ],
            1,
        ),
        ([(0, FailureKind.communication, 2.0), (1, FailureKind.communication, 1.0)], 1),
    ],
)
def test_the_cause_is_shown_and_its_consequences_listed(failures: list, cause: int) -> None:
    error = first_failure([failure(*values) for values in failures])
    assert (error.role, error.rank, error.node, error.pid, error.method) == (
        "actor",
        cause,
        "10.0.0.1",
        100 + cause,
        "update",
    )
    assert str(error).startswith(
        f"actor rank {cause} (node 10.0.0.1, pid {100 + cause}) in update: E{cause}: why\n\nTraceback of "
        f"rank {cause}"
    )
    assert all(other.rank != cause for other in error.others)


def test_a_timeout_tells_what_every_rank_does() -> None:
    location = Location("10.0.0.1", 7, "")
    reports = [
        RankReport(
            "actor",
            0,
            "10.0.0.1",
            RankActivity(location, "update", "forward > reduce", 61.4, '  File "a.py", line 1, in f\n'),
        ),
        RankReport("actor", 1, "10.0.0.1", RankActivity(location, None, None, 0.0, "")),
        RankReport("actor", 2, "10.0.0.1", None),
    ]
    text = str(PhaseTimeoutError("actor", "update", 60.0, reports))
    assert "actor.update took longer than phase_time_limit_s=60" in text
    assert (
        'actor rank 0 (node 10.0.0.1, pid 7): in update, phase forward > reduce for 61 s\n  File "a.py", '
        "line 1, in f" in text
    )
    assert "actor rank 1 (node 10.0.0.1, pid 7): idle" in text
    assert "actor rank 2 (node 10.0.0.1): no answer from the process" in text


def test_a_construction_that_takes_too_long_names_its_rank() -> None:
    location = Location("10.0.0.1", 8, "")
    activity = RankActivity(location, "__init__", "reading weights", 61.4, '  File "a.py", line 1, in f\n')
    text = str(
        PhaseTimeoutError("actor", "__init__", 60.0, [RankReport("actor", 1, "10.0.0.1", activity)], rank=1)
    )
    assert text.startswith(
        "the construction of actor rank 1 (loading its model, starting its engine) took longer than "
        "phase_time_limit_s=60"
    )
    assert 'pid 8): in __init__, phase reading weights for 61 s\n  File "a.py", line 1, in f' in text
