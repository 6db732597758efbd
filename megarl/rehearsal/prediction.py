"""What the plan of memory says that a rank would hold in each phase of its rehearsal. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.architecture import Architecture
from megarl.config.roles import ModelRole
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.placement.dataflow import GRADIENTS, Item
from megarl.placement.memory import model_state, plan_memory
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.plan import plan_placement


class PredictedMemory(NamedTuple):
    """Bytes. held: state of the model. peaks: by the rehearsal's phase, with activations; those of which the plan says something."""

    held: int
    peaks: Mapping[str, int]


def predicted_memory(
    config: PPOConfig | SFTConfig, role: ModelRole, architectures: Mapping[str, Architecture], rank: int
) -> PredictedMemory:
    plan = plan_placement(config)
    process = plan.group_of(role.name).processes[rank]
    place = process.node, *process.devices[:1]
    device = next(each for each in plan_memory(config, plan, architectures) if (each.node, each.device) == place)
    stage = rank // (role.parallel.tensor_parallel_size * role.parallel.data_parallel_size)
    held = model_state(role, architectures[role.name], config.model.dtype, stage).total
    peaks = {}
    for phase in OffloadPlan(plan).phases:
        activations = device.phases[phase.name][role.name].activations if phase.name in device.phases else 0
        if role.name in phase.roles and activations:
            peaks["train" if Item(role.name, GRADIENTS) in phase.needs else "score"] = held + activations
    return PredictedMemory(held, peaks)
