"""Compare the counts of the time model with dry runs of every run in configs/: each role and kind of stage.

pytest -s tests/soak/test_step_counts.py shows the ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

import pytest

from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import distinct_ranks
from megarl.rehearse.dry_run.record import RankRequest
from tests.unit.plan.step_time.comparison import Compared, compare, differences
from tests.unit.rehearse.dry_run.memory_cases import CONFIGS, load_case

RUNS = sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def _requests(config: RunConfig) -> Iterator[RankRequest]:
    for role in model_roles(config):
        for rank in distinct_ranks(role.parallel):
            yield RankRequest(config, role.name, rank, max(2, role.parallel.pipeline_parallel_size))


@pytest.mark.parametrize("run", RUNS)
def test_the_counts_of_a_run(run: str) -> None:
    asked = list(_requests(load_case(run, [])))
    differing: list[str] = []

    for request, record in zip(asked, rehearse_ranks(asked, 1), strict=True):
        compared = list(compare(request, record))
        where = f"{run}, {request.role}, stage {record.pipeline_rank}"
        for phase, numbers in groupby(compared, key=attrgetter("phase")):
            print(f"{where}, {phase}: {_ratios(list(numbers))}")
        differing += differences(request, record)

    assert differing == []


def _ratios(numbers: list[Compared]) -> str:
    """Return the ratio of the operations, and the smallest and largest one of all calls and bytes."""
    flops, *calls = (each.ratio for each in numbers)
    return f"flops {flops:.5f}, calls and bytes {min(calls, default=1):.5f} to {max(calls, default=1):.5f}"
