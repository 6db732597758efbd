"""The best step over cluster sizes, for each `rollout.max_staleness`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.machine.errors import ConfigError
from megarl.search.costs import StepCosts
from megarl.search.search import search
from megarl.search.solution import Solution
from megarl.search.space import Space


class ClusterResult(NamedTuple):
    """The fastest configuration of a cluster for one `rollout.max_staleness`.

    Attributes:
        solution: The configuration, None if none is valid.
        problem: Why none is valid; empty otherwise.
    """

    num_devices: int
    max_staleness: int
    solution: Solution | None
    problem: str = ""


def search_clusters(spaces: Sequence[Space], costs: StepCosts) -> Iterator[ClusterResult]:
    """Yield the best configuration of each space for each `max_staleness` up to its limit."""
    for space in spaces:
        for max_staleness in range(space.max_staleness + 1):
            rollout = replace(space.config.rollout, max_staleness=max_staleness)
            pinned = replace(
                space,
                config=space.config.with_sections(rollout=rollout),
                pinned=space.pinned | {"rollout.max_staleness"},
            )
            try:
                solution, problem = search(pinned, costs).solutions[0], ""
            except ConfigError as error:
                solution, problem = None, "; ".join(error.problems)
            yield ClusterResult(space.num_devices, max_staleness, solution, problem)
