"""A simple cost model for tests of the search, with the shape of a real one and none of its constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log2
from typing import NamedTuple

from megarl.config.load import load_config
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import PPOConfig, Recompute
from megarl.config.shipped import with_published_models
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters
from megarl.plan.placement.memory import engine_usage
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.search.space import Space, pinned_keys
from megarl.plan.step_time.device import PhaseTime
from megarl.plan.step_time.step import StepSchedule
from tests.unit.cli.test_shipped_configs import path_of

_RECOMPUTED = {Recompute.none: 1.0, Recompute.selective: 1.15, Recompute.full: 1.33}
_RATE = 4e14  # operations per second and device


class AnalyticStep(NamedTuple):
    seconds: float
    phases: Mapping[str, PhaseTime]


class AnalyticCosts:
    """Costs with a pipeline bubble, communication that grows with tensor and context parallelism, and decoding
    that reads weights."""

    def role_times(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture
    ) -> Mapping[str, PhaseTime]:
        whole = self.least_role_s(config, role, architecture, role.parallel.world_size) / len(role.phases)
        parallel = role.parallel
        tokens = role.micro_batch.max_tokens or 1
        of_replica = config.samples_per_step * config.max_row_tokens / parallel.data_parallel_size
        micro_batches = max(1.0, of_replica / (tokens * parallel.context_parallel_size))
        bubble = (parallel.pipeline_parallel_size - 1) / micro_batches
        bubble /= parallel.virtual_pipeline_parallel_size or 1
        slower = 1 + 0.08 * log2(parallel.tensor_parallel_size) + 0.05 * log2(parallel.context_parallel_size)
        slower *= 1 + 500 / tokens

        return {
            phase.name: PhaseTime.of(
                products=whole * slower * (_RECOMPUTED[role.recomputation.how] if phase.trains else 1),
                bubble=whole * bubble,
            )
            for phase in role.phases
        }

    def least_role_s(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture, num_devices: int
    ) -> float:
        tokens = config.samples_per_step * config.max_row_tokens
        operations = sum(6 if phase.trains else 2 for phase in role.phases)
        return operations * num_active_parameters(architecture) * tokens / (_RATE * num_devices)

    def generation_time(self, config: PPOConfig, policy: Architecture) -> PhaseTime:
        rollout = config.rollout
        usage = engine_usage(config, policy)
        samples = config.samples_per_step / rollout.num_replicas
        rounds = max(1.0, samples / min(rollout.max_concurrency, usage.kv_cache / 2**28))
        step_s = usage.parameters / 2e12 + 1e-3 * (1 + log2(rollout.tensor_parallel_size))
        ahead = 0.8 if rollout.max_staleness else 1.0
        return PhaseTime.of(weights=ahead * rounds * config.data.max_response_length * step_s)

    def overhead_s(self, config: PPOConfig) -> float:
        return 1.0

    def predict_step(
        self, config: PPOConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
    ) -> AnalyticStep:
        times = {"gen": self.generation_time(config, architectures["actor"])}
        for role in model_roles(config):
            times |= self.role_times(config, role, architectures[role.name])
        # Fewer ranks with different weights send more bytes each.
        parallel = config.actor.parallel
        shards = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        times["update_weights"] = PhaseTime.of(messages=5.0 / shards)
        schedule = StepSchedule(plan, generates_ahead=config.rollout.max_staleness > 0)
        seconds = schedule.seconds({name: time.seconds for name, time in times.items()})
        return AnalyticStep(seconds + self.overhead_s(config), times)


def space_of(
    name: str, *overrides: str, pin: tuple[str, ...] = (), nodes: int = 1, per_node: int = 8, ahead: int = 0
) -> Space:
    """Return the space of a shipped configuration over a number of nodes."""
    config = load_config(PPOConfig, path_of(name), overrides)
    config, _ = with_published_models(config, str(path_of(name)))
    placement = replace(config.placement, num_nodes=nodes, devices_per_node=per_node)
    return Space(
        config=config.with_sections(placement=placement),
        pinned=pinned_keys(config, pin, [each.partition("=")[0] for each in overrides]),
        num_nodes=nodes,
        devices_per_node=per_node,
        max_staleness=ahead,
    )
