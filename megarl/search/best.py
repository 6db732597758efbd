"""The best complete configurations of a search, which are planned and checked as `megarl check` does."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.validate import validate
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.placement.memory import budget_problems, plan_memory
from megarl.placement.plan import plan_placement
from megarl.search.choices import with_choice
from megarl.search.costs import StepCosts
from megarl.search.engines import EngineShape, with_engines
from megarl.search.placements import Pool, placement_of
from megarl.search.rejections import Reason, Rejections
from megarl.search.solution import Solution
from megarl.search.space import Space
from megarl.search.variants import Variant

LEVEL = "configurations"


class BestSolutions:
    """The fastest configurations so far.

    Args:
        rejections: Where it is counted what was left out.
        num_results: The number of configurations to keep.
    """

    def __init__(
        self,
        space: Space,
        architectures: Mapping[str, Architecture],
        costs: StepCosts,
        rejections: Rejections,
        num_results: int,
    ) -> None:
        self.solutions: list[Solution] = []
        self._space = space
        self._architectures = architectures
        self._costs = costs
        self._rejections = rejections
        self._num_results = num_results

    @property
    def bound_s(self) -> float:
        """The time that another result must beat."""
        return self.solutions[-1].seconds if len(self.solutions) >= self._num_results else float("inf")

    @property
    def bound_of_phases_s(self) -> float:
        """The time that the phases of another result must beat."""
        return self.bound_s - self._costs.overhead_s(self._space.config)

    def complete(
        self, pools: tuple[Pool, ...], variants: Mapping[str, Variant], engines: EngineShape
    ) -> None:
        """Plan, check and predict a configuration, and keep it if it is among the best."""
        config = self._space.config.with_sections(placement=placement_of(self._space, pools))
        for unit in self._space.units:
            config = with_choice(config, unit, variants[unit.name].choice)
        config = with_engines(config, engines.choice)

        try:
            plan = plan_placement(config)
        except ConfigError as error:
            self._rejections.reject(LEVEL, Reason.node, error.problems[0])
            return

        step = self._costs.predict_step(config, plan, self._architectures)
        if step.seconds >= self.bound_s:
            self._rejections.reject(LEVEL, Reason.slower)
            return

        # One violation is enough, so the others are not looked for.
        for violation in validate(config):
            self._rejections.reject(LEVEL, Reason.rules, str(violation))
            return

        memory = plan_memory(config, plan, self._architectures)
        for problem in budget_problems(config, memory):
            self._rejections.reject(LEVEL, Reason.memory, problem)
            return

        choices = {name: variant.choice for name, variant in variants.items()}
        self._keep(
            Solution(
                config=config,
                plan=plan,
                memory=memory,
                step=step,
                pools=pools,
                choices=choices,
                engines=engines.choice,
            )
        )

    def _keep(self, new: Solution) -> None:
        """Insert a solution. Of each kind only the fastest one is kept."""
        same = next((each for each in self.solutions if each.kind == new.kind), None)
        if same is not None and same.seconds <= new.seconds:
            return
        others = [each for each in self.solutions if each is not same]
        self.solutions = sorted([*others, new], key=lambda each: each.seconds)[: self._num_results]
