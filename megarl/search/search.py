"""Finds the fastest placements and layouts of a run: branch and bound over placements, layouts and engines.

The layouts of each unit are computed once per number of devices, from fast to slow. A branch ends when its
lower bound exceeds the best complete steps, which are planned and checked as `megarl check` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megarl.config.roles import SOURCE_TEACHER, judge_roles, model_roles
from megarl.config.validate import PPO_RULES, read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.machine.wording import counted
from megarl.placement.memory import budget_problems, plan_memory
from megarl.placement.plan import plan_placement
from megarl.search.best import BestSolutions
from megarl.search.branch import Branch
from megarl.search.costs import StepCosts, StepTime
from megarl.search.placements import (
    Partition,
    Pool,
    device_splits,
    partitions,
    placement_of,
    refuse_unpinned_pools,
)
from megarl.search.pool_memory import PoolMemory
from megarl.search.rejections import Reason, Rejections
from megarl.search.solution import Found
from megarl.search.space import Space, free_keys
from megarl.search.tables import Tables


def search(space: Space, costs: StepCosts, num_results: int = 1) -> Found:
    """Return the fastest configurations of a space.

    Raises:
        ConfigError: No configuration is valid, or a fixed value is not.
    """
    branches = _Search(space, costs, num_results)
    refuse_unpinned_pools(space)
    _refuse_stages_of_engines(space)
    _refuse_fixed_values(space)
    for max_staleness in _stalenesses(space):
        branches.explore(max_staleness)
    branches.tables.finish()
    if not branches.best.solutions:
        raise ConfigError("tune", [_nothing_fits(space, branches.rejections)])
    return Found(tuple(branches.best.solutions), branches.rejections)


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


def configured_step(space: Space, costs: StepCosts) -> StepTime | None:
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


class _Split(NamedTuple):
    """A division of the devices into the pools of a partition, with a rough bound of its time."""

    partition: Partition
    pools: tuple[Pool, ...]
    bound_s: float


class _Search:
    """The state of a search."""

    def __init__(self, space: Space, costs: StepCosts, num_results: int) -> None:
        self._space = space
        self._architectures, unreadable = read_architectures(space.config)
        if unreadable:
            raise ConfigError("tune", [str(each) for each in unreadable])

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

        self.rejections = Rejections()
        self.tables = Tables(space, self._architectures, costs, self.rejections)
        self.best = BestSolutions(space, self._architectures, costs, self.rejections, num_results)

    def explore(self, max_staleness: int) -> None:
        """Search all placements with a `rollout.max_staleness`."""
        splits = [
            _Split(partition, pools, self.tables.least_s(pools, max_staleness))
            for partition in partitions(self._space, max_staleness)
            for pools in device_splits(self._space, partition)
        ]
        memories: dict[Partition, PoolMemory] = {}

        # Fast splits first, so that slow ones are cut.
        for split in sorted(splits, key=lambda each: each.bound_s):
            self.rejections.consider("placements")
            if self.tables.least_s(split.pools, max_staleness) >= self.best.bound_of_phases_s:
                self.rejections.reject("placements", Reason.slower)
                continue
            if (problem := self._placement_problem(split.pools, max_staleness)) is not None:
                self.rejections.reject("placements", Reason.rules, problem)
                continue
            try:
                if split.partition not in memories:
                    memories[split.partition] = PoolMemory(self._space, split.partition, self._architectures)
            except ConfigError as error:
                self.rejections.reject("placements", Reason.rules, "; ".join(error.problems))
                continue

            Branch(
                self._space,
                self.tables,
                self.best,
                self.rejections,
                split.pools,
                memories[split.partition],
                max_staleness,
            ).explore()

    def _placement_problem(self, pools: Sequence[Pool], max_staleness: int) -> str | None:
        """Return why generation cannot run this far ahead in a placement, None if it can."""
        config = self._space.config
        config = config.with_sections(
            placement=placement_of(self._space, pools),
            rollout=replace(config.rollout, max_staleness=max_staleness),
        )
        for rule, keys in PPO_RULES.items():
            if "rollout.max_staleness" in keys:
                for violation in rule(config):
                    return str(violation)
        return None
