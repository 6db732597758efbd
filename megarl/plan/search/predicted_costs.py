"""The times that a search needs, predicted for a kind of device and lengths of samples."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from megarl.config.roles import ModelRole, RoleKind, model_roles
from megarl.config.schema import PPOConfig
from megarl.models.architecture import Architecture
from megarl.models.flops import training_flops
from megarl.plan.placement.dataflow import Item
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.step_time.counts import dtype_of
from megarl.plan.step_time.device import DeviceProfile, PhaseTime, peak_flops
from megarl.plan.step_time.generation import generation_time
from megarl.plan.step_time.lengths import Lengths
from megarl.plan.step_time.role_time import role_times
from megarl.plan.step_time.step import GENERATION, PredictedStep, moved_items, placed_step

# The lengths of a bound are sampled, so the bound stays below the time of all responses.
_CAUTION = 0.95


class PredictedCosts:
    """The predictions for one kind of device, and for the variants of one run.

    Times are remembered by what a search varies, so a run with other fixed values needs another instance.
    Equal arguments give equal times.
    """

    def __init__(self, device: DeviceProfile, lengths: Lengths) -> None:
        self._device = device
        self._lengths = lengths
        self._flops: dict[str, int] = {}
        self._of_roles: dict[Hashable, Mapping[str, PhaseTime]] = {}
        self._of_engines: dict[Hashable, PhaseTime] = {}
        self._moved: dict[Hashable, Mapping[str, frozenset[Item]]] = {}

    def role_times(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture
    ) -> Mapping[str, PhaseTime]:
        """Return the time of each phase of a model, which `config` has as `role`."""
        key = (role.name, role.parallel, role.micro_batch, role.recomputation)
        if key not in self._of_roles:
            self._of_roles[key] = role_times(config, role, architecture, self._device, self._lengths)
        return self._of_roles[key]

    def generation_time(self, config: PPOConfig, policy: Architecture) -> PhaseTime:
        """Return the time in which the engines generate the samples of a step.

        With `rollout.max_staleness` above 0 it is the mean over the steps that generation runs ahead.
        """
        rollout = config.rollout
        sizes = (rollout.num_replicas, rollout.tensor_parallel_size, rollout.expert_parallel_size)
        share = rollout.memory_share_of(rollout.engine)
        key = (*sizes, rollout.max_concurrency, rollout.max_staleness, share)
        if key not in self._of_engines:
            ahead = rollout.max_staleness
            self._of_engines[key] = generation_time(config, policy, self._device, self._lengths, ahead)
        return self._of_engines[key]

    def overhead_s(self, config: PPOConfig) -> float:
        """Return the time of a step that depends on neither layouts nor placement."""
        return config.samples_per_step * self._device.sample_ms / 1e3

    def least_role_s(
        self, config: PPOConfig, role: ModelRole, architecture: Architecture, num_devices: int
    ) -> float:
        """Return a lower bound of all phases of a role over a number of devices, in any layout.

        It is the time of the products of the responses in its updates, at the rate of large ones.
        """
        if role.optim is None or role.kind in (RoleKind.scorer, RoleKind.teacher):
            return 0.0
        if role.name not in self._flops:
            rows = [(1, response) for response in self._lengths.spread(64)]
            flops = training_flops(architecture, rows, with_value_head=role.with_value_head)
            self._flops[role.name] = flops * config.samples_per_step * config.passes_per_step // len(rows)
        dtype = "fp8" if role.megatron.transformer.get("fp8") else dtype_of(config)
        rate = peak_flops(self._device, dtype)
        # The larger of both efficiencies keeps this a lower bound.
        share = max(self._device.efficiency.gemm, self._device.efficiency.attention)
        return _CAUTION * self._flops[role.name] / (num_devices * rate * share)

    def predict_step(
        self, config: PPOConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture]
    ) -> PredictedStep:
        """Return the time of a complete step, with everything that the other functions leave out.

        It is never below the schedule of the phases' times (branch.py) plus the overhead.
        """
        times = {GENERATION: self.generation_time(config, architectures["actor"])}
        for role in model_roles(config):
            times |= self.role_times(config, role, architectures[role.name])
        moved = self._moved_items(plan)
        return placed_step(config, plan, times, architectures, self._device, self._lengths, moved)

    def _moved_items(self, plan: PlacementPlan) -> Mapping[str, frozenset[Item]]:
        # Moves depend on which roles share devices, not on the number of devices.
        key = tuple((role, plan.on_same_devices(role)) for role in plan.roles)
        if key not in self._moved:
            self._moved[key] = moved_items(plan)
        return self._moved[key]
