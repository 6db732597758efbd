"""Each function of Megatron-Core that megarl replaces can be called in every way in which the original can.

A new Megatron that passes a further argument fails here, and not in the first forward pass of a user's run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.ranks import RankPool
from tests.replaced_functions import Argument, accepts, arguments_of, problems, replaced_in


def replaced() -> dict[str, list[Argument]]:
    """Return the replaced functions of all modules of Megatron that a rank has imported, by their address."""
    from megarl.config.schema import Device
    from megarl.engine import platform

    platform.activate(Device.cpu)
    return replaced_in("megatron")


def test_replaced_functions_accept_the_arguments_of_the_originals(rank_pool: RankPool) -> None:
    (ours,) = rank_pool.run(replaced, world_size=1)
    assert len(ours) >= 14, sorted(ours)
    assert not (found := problems(ours)), "\n".join(found)


def _original(first: int, second: int = 0, *, third: int = 0) -> None: ...


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda first, second=0, *, third=0: None, None),
        (lambda first, second=0, third=0, more=None: None, None),
        (lambda *arguments, **keywords: None, None),
        (lambda first, second=0, **keywords: None, None),
        (lambda first, second=0: None, "third is not accepted by name"),
        (lambda first, *unused, third=0: None, "second is not accepted by name"),
        (lambda other, second=0, *, third=0: None, "first is not accepted by name"),
        (lambda first, third=0, second=0: None, "second is at position 2, in the original at 1"),
        (lambda first, second, *, third=0: None, "second is required, but optional in the original"),
        (
            lambda first, second=0, *, third=0, more: None,
            "more is required, but the original does not have it",
        ),
    ],
)
def test_calls_that_only_the_original_accepts_are_found(
    function: Callable[..., None], problem: str | None
) -> None:
    assert (
        accepts(arguments_of(function, follow_wrapped=False), arguments_of(_original, follow_wrapped=False))
        == problem
    )
