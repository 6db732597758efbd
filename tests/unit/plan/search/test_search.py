"""The search finds what brute force finds, within pins, and returns only configurations that `check` accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from megarl.config.roles import model_roles
from megarl.config.schema import (
    MicroBatchConfig,
    ParallelConfig,
    PlacementStrategy,
    PPOConfig,
    Recompute,
    RecomputeModule,
)
from megarl.config.validate import read_architectures, validate
from megarl.machine.errors import ConfigError
from megarl.plan.placement.memory import PlacedMemory, budget_problems, engine_usage, plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.search.search import peak_of_pool, search, share_of_engines, share_of_models
from megarl.plan.search.solution import Solution
from megarl.plan.search.space import ROLLOUT, Reason, Space, skeleton, units_of
from megarl.plan.search.tables import EngineShape
from megarl.plan.search.variants import memory_by_stage
from tests.unit.plan.search.analytic import AnalyticCosts, space_of

SMALL = "qwen2.5_7b_grpo"
# What brute force does not vary.
FIXED = (
    "actor.parallel.context_parallel_size",
    "actor.parallel.virtual_pipeline_parallel_size",
    "actor.micro_batch",
    "reference.micro_batch",
    "rollout.max_concurrency",
    "rollout.sglang.server_args.mem_fraction_static",
)


def every_configuration(space: Space) -> Iterator[PPOConfig]:
    """Yield every valid configuration of an actor and engines on one node, without the search's code."""
    base = space.config
    for num_actor in range(1, space.num_devices + 1):
        is_shared = num_actor == space.num_devices
        num_engine = space.num_devices if is_shared else space.num_devices - num_actor
        strategy = PlacementStrategy.hybrid if is_shared else PlacementStrategy.split_collocate
        for tensor, pipeline, recompute, engine in product(
            (1, 2, 4, 8), range(1, 9), Recompute, (1, 2, 4, 8)
        ):
            if num_actor % (tensor * pipeline) or engine > num_engine:
                continue
            parallel = ParallelConfig(
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                data_parallel_size=num_actor // (tensor * pipeline),
                sequence_parallel=tensor > 1,
            )
            modules = RecomputeModule.mlp if recompute is Recompute.selective else RecomputeModule.core_attn
            yield base.with_sections(
                actor=replace(
                    base.actor, parallel=parallel, recompute=recompute, recompute_modules=[modules]
                ),
                rollout=replace(base.rollout, num_replicas=num_engine // engine, tensor_parallel_size=engine),
                placement=replace(base.placement, strategy=strategy),
            )


def brute_force(space: Space, costs: AnalyticCosts) -> float:
    architectures, _ = read_architectures(space.config)
    best = float("inf")
    for config in every_configuration(space):
        # Plans are slow, so the predicted time comes first.
        try:
            plan = plan_placement(config)
        except ConfigError:
            continue
        seconds = costs.predict_step(config, plan, architectures).seconds
        if seconds >= best or validate(config):
            continue
        if not budget_problems(config, plan_memory(config, plan, architectures)):
            best = seconds
    return best


@pytest.mark.parametrize("memory_gb", [72, 40, 30])
def test_the_search_finds_the_optimum_of_brute_force(memory_gb: int) -> None:
    """With less memory, other layouts and recomputation are needed."""
    space = space_of(SMALL, f"placement.device_memory_gb={memory_gb}", pin=FIXED)
    solutions, _ = search(space, AnalyticCosts())
    assert solutions[0].seconds == pytest.approx(brute_force(space, AnalyticCosts()), rel=1e-12)


def problems(solution: Solution) -> list[str]:
    config = solution.config
    architectures, unreadable = read_architectures(config)
    memory = plan_memory(config, plan_placement(config), architectures)
    return [*map(str, (*unreadable, *validate(config))), *budget_problems(config, memory)]


@pytest.mark.parametrize(("name", "nodes"), [(SMALL, 1), ("qwen2.5_7b_ppo", 1)])
def test_all_results_are_valid_and_sorted(name: str, nodes: int) -> None:
    solutions, rejections = search(space_of(name, nodes=nodes), AnalyticCosts(), num_results=4)
    assert len(solutions) == 4
    assert [problems(each) for each in solutions] == [[]] * 4
    seconds = [each.seconds for each in solutions]
    assert seconds == sorted(seconds)
    assert len({each.kind for each in solutions}) == 4

    # Everything that was considered is kept or has a reason.
    for level, considered in rejections.considered.items():
        rejected = [count for (name, _), count in rejections.rejected.items() if name == level]
        assert rejections.kept(level) == considered - sum(rejected) >= 0


def test_memory_of_pools_is_that_of_the_plan() -> None:
    """The critic and the actor have stages of different sizes, and share their devices with the engines."""
    space = space_of(
        "qwen2.5_7b_ppo",
        "placement.strategy=fully_collocate",
        "actor.parallel.tensor_parallel_size=2",
        "actor.parallel.pipeline_parallel_size=4",
        "critic.parallel.tensor_parallel_size=4",
        "critic.parallel.pipeline_parallel_size=2",
    )
    config = space.config
    architectures, _ = read_architectures(config)
    plan = plan_placement(config)
    partition = (("actor", "critic", ROLLOUT),)
    pool = PlacedMemory(config, skeleton(space, partition), architectures)
    roles = {role.name: role for role in model_roles(config)}
    shares = [
        share_of_models(
            pool,
            {
                role.name: memory_by_stage(config, role, architectures[role.name])
                for role in units_of(config)[unit]
            },
            roles[unit].parallel.stage_size,
        )
        for unit in space.units
    ]
    engines = EngineShape(config.rollout, 0.0, engine_usage(config, architectures["actor"]))
    shares.append(share_of_engines(pool, engines))
    assert peak_of_pool(shares) == max(device.peak for device in plan_memory(config, plan, architectures))


def test_generation_ahead_has_pools_of_its_own() -> None:
    ahead = space_of(SMALL, "algorithm=async_grpo", ahead=2)
    solutions, _ = search(replace(ahead, pinned=frozenset()), AnalyticCosts(), num_results=3)
    for each in solutions:
        is_ahead = each.config.rollout.max_staleness > 0
        assert not is_ahead or not each.plan.share_devices("actor", "rollout")

    # Without a correction of the weights' ages, only max_staleness 0 is valid.
    solutions, rejections = search(space_of(SMALL, ahead=1), AnalyticCosts())
    assert solutions[0].config.rollout.max_staleness == 0
    assert "no correction is enabled" in rejections.example("placements", Reason.rules)


def test_pins_are_respected() -> None:
    pins = (
        "actor.parallel.tensor_parallel_size=4",
        "rollout.num_replicas=2",
        "rollout.tensor_parallel_size=2",
    )
    (best,), _ = search(space_of(SMALL, *pins, "actor.recompute=full"), AnalyticCosts())
    assert best.config.actor.parallel.tensor_parallel_size == 4
    assert best.config.actor.recompute is Recompute.full
    assert (best.config.rollout.num_replicas, best.config.rollout.tensor_parallel_size) == (2, 2)

    (split,), _ = search(space_of(SMALL, "placement.strategy=split_collocate"), AnalyticCosts())
    assert split.config.placement.strategy is PlacementStrategy.split_collocate
    assert len(split.pools) == 2


def test_a_run_without_a_valid_configuration_is_one_error() -> None:
    space = space_of(SMALL, "placement.device_memory_gb=5", "actor.recompute=none")
    with pytest.raises(ConfigError) as raised:
        search(space, AnalyticCosts())
    (problem,) = raised.value.problems
    assert problem.startswith(
        "no configuration on 8 devices is valid, pinned keys: actor.recompute. Rejected: "
    )
    assert " variants: memory (such as: " in problem
    assert problem.endswith("use more devices, or pin fewer keys")

    # A fixed or pinned value that is wrong is reported as `check` does.
    for override, reported in (
        ("rollout.temperature=0", "rollout.temperature: is 0 (greedy)"),
        ("actor.parallel.tensor_parallel_size=3", "do not divide by tensor_parallel_size 3; use 2 or 4"),
    ):
        with pytest.raises(ConfigError) as raised:
            search(space_of(SMALL, override), AnalyticCosts())
        assert reported in raised.value.problems[0]

    judge = {"name": "own", "path": space.config.model.path, "prompt": "p", "parse": {"json": "score"}}
    with pytest.raises(ConfigError, match="places no judges that the run serves"):
        search(space_of(SMALL, f"reward.judges=[{json.dumps(judge)}]"), AnalyticCosts())


def test_teachers_of_data_sources_have_no_searched_layouts() -> None:
    teacher = {"name": "math", "path": space_of(SMALL).config.model.path, "data_sources": ["gsm8k"]}
    changes = ("algorithm.advantage.estimator=distillation", "algorithm.kl.where=none")
    with pytest.raises(ConfigError, match=r"teachers: the search chooses no layouts .*\(teacher_math\)"):
        search(space_of(SMALL, *changes, f"teachers=[{json.dumps(teacher)}]"), AnalyticCosts())

    with pytest.raises(ConfigError, match="did you mean actor.recompute"):
        space_of(SMALL, pin=("actor.recomputed",))


def test_equal_searches_give_equal_results() -> None:
    first, second = (search(space_of("qwen2.5_7b_ppo", pin=FIXED), AnalyticCosts(), 3) for _ in range(2))
    assert [each.config for each in first[0]] == [each.config for each in second[0]]
    assert first[1].rejected == second[1].rejected


def test_micro_batches_by_rows_stay() -> None:
    space = space_of(SMALL, "actor.micro_batch.max_tokens=null", "actor.micro_batch.sequences=2")
    (best,), _ = search(space, AnalyticCosts())
    assert best.config.actor.micro_batch == MicroBatchConfig(sequences=2)
