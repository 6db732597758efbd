"""Finds the fastest placements and layouts of a run: branch and bound over placements, layouts and engines.

The layouts of each unit are computed once per number of devices, from fast to slow. A branch ends when its
lower bound exceeds the best complete steps, which are planned and checked as `megarl check` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from megarl.config.roles import SOURCE_TEACHER, judge_roles, model_roles
from megarl.config.validate import RULES, Needs, checks_of, read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.plan.placement.memory import PlacedMemory, budget_problems, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.search.branch import BestSolutions, Branch
from megarl.plan.search.placements import (
    Partition,
    Pool,
    device_splits,
    partitions,
    placement_of,
    refuse_unpinned_pools,
    skeleton,
)
from megarl.plan.search.predicted_costs import PredictedCosts
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import Reason, Rejections, Space, free_keys
from megarl.plan.search.tables import Tables
from megarl.plan.step_time.step import PredictedStep


def search(space: Space, costs: PredictedCosts, num_results: int = 1) -> tuple[list[Solution], Rejections]:
    """Return the fastest configurations of a space, each of another kind, from fast to slow.

    Also returns what was considered, and why the rest was left out.

    Raises:
        ConfigError: No configuration is valid, or a fixed value is not.
    """
    architectures, unreadable = read_architectures(space.config)
    if unreadable:
        raise ConfigError("tune", [str(each) for each in unreadable])
    _refuse_judges_and_teachers(space)
    refuse_unpinned_pools(space)
    _refuse_stages_of_engines(space)
    _refuse_fixed_values(space)

    rejections = Rejections()
    tables = Tables(space, architectures, costs, rejections)
    best = BestSolutions(space, architectures, costs, rejections, num_results)
    for max_staleness in _stalenesses(space):
        _explore(space, architectures, tables, best, rejections, max_staleness)

    tables.finish()
    if not best.solutions:
        raise ConfigError("tune", [_nothing_fits(space, rejections)])
    return list(best.solutions), rejections


def _refuse_judges_and_teachers(space: Space) -> None:
    """Raise ConfigError for roles that the search does not place."""
    if served := judge_roles(space.config):
        raise ConfigError(
            "tune",
            [
                f"reward.judges: the search places no judges that the run serves ({', '.join(served)}); "
                "start their servers by hand, and set url and model instead of path"
            ],
        )

    names = [role.name for role in model_roles(space.config)]
    if teachers := [name for name in names if name.startswith(SOURCE_TEACHER)]:
        raise ConfigError(
            "tune",
            [
                f"teachers: the search chooses no layouts of teachers of data sources "
                f"({', '.join(teachers)}), which no override can set; tune the run with the largest of "
                "them as `teacher`, and give the others layouts by hand"
            ],
        )


def _refuse_stages_of_engines(space: Space) -> None:
    """Raise ConfigError for engines with pipeline stages, which the search does not place."""
    if (stages := space.config.rollout.pipeline_parallel_size) > 1:
        problem = (
            f"rollout.pipeline_parallel_size: is {stages}, but the search chooses engines of one stage; use "
            "pipeline_parallel_size=1, or predict a step with `megarl check`"
        )
        raise ConfigError("tune", [problem])


def _refuse_fixed_values(space: Space) -> None:
    """Raise ConfigError for violations that nothing in the space can change."""
    free = [key for key in free_keys(space.config) if not space.is_pinned(key)]
    problems = [
        str(violation)
        for violation in validate(space.config)
        if not any(f"{key}.".startswith(f"{mine}.") for key in free for mine in violation.keys)
    ]
    if problems:
        raise ConfigError("tune", problems)


def _stalenesses(space: Space) -> Sequence[int]:
    if space.is_pinned("rollout.max_staleness"):
        return (space.config.rollout.max_staleness,)
    return range(space.max_staleness + 1)


def _nothing_fits(space: Space, rejections: Rejections) -> str:
    most: dict[str, tuple[int, str]] = {}
    for (level, reason), count in rejections.rejected.items():
        if reason not in (Reason.slower, Reason.dominated):
            example = rejections.example(level, reason)
            most[f"{level}: {reason.value}"] = (count, example)

    reasons = "; ".join(
        f"{count:,} {name}{f' (such as: {example})' if example else ''}"
        for name, (count, example) in sorted(most.items(), key=lambda each: -each[1][0])
    )
    pinned = f", pinned keys: {', '.join(sorted(space.pinned))}" if space.pinned else ""

    return (
        f"no configuration on {counted(space.num_devices, 'device')} is valid{pinned}. Rejected: "
        f"{reasons or 'nothing'}; use more devices, or pin fewer keys"
    )


def configured_step(space: Space, costs: PredictedCosts) -> PredictedStep | None:
    """Return the predicted step of a run as its file has it, None if that is not valid on these devices."""
    config = space.config
    architectures, _ = read_architectures(config)
    if validate(config):
        return None
    try:
        plan = plan_placement(config)
    except ConfigError:
        return None
    if budget_problems(config, plan_memory(config, plan, architectures)):
        return None
    return costs.predict_step(config, plan, architectures)


def _explore(
    space: Space,
    architectures: Mapping[str, Architecture],
    tables: Tables,
    best: BestSolutions,
    rejections: Rejections,
    max_staleness: int,
) -> None:
    """Search all placements with a `rollout.max_staleness`."""
    splits = [
        (tables.least_s(pools, max_staleness), pools)
        for partition in partitions(space, max_staleness)
        for pools in device_splits(space, partition)
    ]
    memories: dict[Partition, PlacedMemory] = {}

    # Fast splits first, so that slow ones are cut.
    for _, pools in sorted(splits, key=itemgetter(0)):
        rejections.consider("placements")
        if tables.least_s(pools, max_staleness) >= best.bound_of_phases_s:
            rejections.reject("placements", Reason.slower)
            continue
        if (problem := _placement_problem(space, pools, max_staleness)) is not None:
            rejections.reject("placements", Reason.rules, problem)
            continue
        partition = tuple(pool.units for pool in pools)
        try:
            if partition not in memories:
                memories[partition] = PlacedMemory(space.config, skeleton(space, partition), architectures)
        except ConfigError as error:
            rejections.reject("placements", Reason.rules, "; ".join(error.problems))
            continue

        Branch(space, tables, best, rejections, pools, memories[partition], max_staleness).explore()


def _placement_problem(space: Space, pools: Sequence[Pool], max_staleness: int) -> str | None:
    """Return why generation cannot run this far ahead in a placement, None if it can."""
    config = space.config.with_sections(
        placement=placement_of(space, pools),
        rollout=replace(space.config.rollout, max_staleness=max_staleness),
    )
    for check in checks_of(RULES, Needs.run, config):
        if "rollout.max_staleness" in check.numbers:
            for found in check.run(config):
                return str(found)
    return None


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


def search_clusters(spaces: Sequence[Space], costs: PredictedCosts) -> Iterator[ClusterResult]:
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
                solution, problem = search(pinned, costs)[0][0], ""
            except ConfigError as error:
                solution, problem = None, "; ".join(error.problems)
            yield ClusterResult(space.num_devices, max_staleness, solution, problem)
