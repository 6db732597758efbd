"""The time of weight syncs, of offloading and restoring state, and of snapshots in host memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import PPOConfig, RunConfig, Transport
from megarl.models.architecture import Architecture
from megarl.placement.dataflow import ENGINE, GRADIENTS, Item
from megarl.placement.memory import Usage, engine_weights, model_state, pushed_bytes
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.snapshots import rank_snapshot_bytes
from megarl.placement.transport import choose_transport
from megarl.step_time.device import DeviceProfile
from megarl.step_time.phase_time import PhaseTime

# How often each byte is copied on its way within a node: into a message, out of it, and to its place.
_COPIES = 3


def push_time(
    config: PPOConfig, plan: PlacementPlan, policy: Architecture, device: DeviceProfile
) -> PhaseTime:
    """Return the time of a weight sync.

    Engines receive at the same time, so the time is that of one device: what it receives, or what a trainer
    rank sends if fewer trainers than engine ranks share the work.
    """
    transport = choose_transport(config, plan)
    received = engine_weights(config, policy)
    copies_s = _COPIES * received / (device.memory_gb_s * device.efficiency.memory * 1e9)

    if transport is Transport.folder:
        whole = pushed_bytes(config, policy)
        nodes = len(plan.group_of("rollout").nodes)
        written_s = whole / (device.storage_gb_s * 1e9)
        return PhaseTime.of(storage=written_s * (1 + 1 / nodes), copies=copies_s)

    # Each replica needs every weight once; the trainers' devices share the sending.
    senders = len(plan.group_of("actor").devices)
    receivers = len(plan.group_of("rollout").devices)
    sent = received * max(1.0, receivers / senders)
    link = device.between_nodes if plan.num_nodes > 1 else device.within_node
    # With shared devices, an engine rank finds a part of its weights on its own device or node.
    rate = link.gb_s
    if transport is Transport.device and plan.num_nodes > 1:
        rate = max(rate, device.within_node.gb_s / 2) if _fits_on_node(config, plan) else rate
    return PhaseTime.of(messages=sent / (rate * device.efficiency.links * 1e9), copies=copies_s)


def _fits_on_node(config: PPOConfig, plan: PlacementPlan) -> bool:
    """Return whether a whole replica of the trained model is on each node."""
    return config.actor.parallel.replica_size <= plan.devices_per_node


def moved_items(plan: PlacementPlan) -> dict[str, frozenset[Item]]:
    """Return, for each phase, the parts of state that are offloaded or restored at its begin."""
    turns = OffloadPlan(plan)
    held = turns.held()
    names = [phase.name for phase in turns.phases]
    moved = {}
    for index, name in enumerate(names):
        # Steps repeat, so the last phase precedes the first one.
        before = held[names[index - 1]]
        moved[name] = (before - held[name]) | (turns.coming(name) - before)
    return moved


def offload_times(
    config: RunConfig,
    moved: Mapping[str, frozenset[Item]],
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
) -> dict[str, float]:
    """Return, for each phase, the seconds of offloading and restoring state at its begin.

    Gradients, and an engine's weights and cache, are dropped and allocated again without a copy.

    Args:
        moved: What is moved in its placement (`moved_items`).
        architectures: The architecture of each model role, by its name.
    """
    states = {role.name: _state(config, role, architectures[role.name]) for role in model_roles(config)}
    nbytes = {name: sum(_copied(states, item) for item in items) for name, items in moved.items()}
    return {name: size / (device.host_gb_s * 1e9) for name, size in nbytes.items() if size}


def snapshot_times(
    config: RunConfig,
    plan: PlacementPlan,
    moved: Mapping[str, frozenset[Item]],
    moves: Mapping[str, float],
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
) -> dict[str, float]:
    """Return, for each phase that waits for snapshots, the seconds after the step before in which they end.

    A snapshot of a trained model begins when a step has ended, next to generation. The first phase that
    restores a part of the model, or trains it, waits for the end. Without recovery there are no snapshots.

    Args:
        moved: What is moved in this placement (`moved_items`).
        moves: The seconds that this takes (`offload_times`).
        architectures: The architecture of each model role, by its name.
    """
    if not config.recovery.enabled:
        return {}

    turns = OffloadPlan(plan)
    trained = {role.name: role for role in model_roles(config) if role.optim is not None}
    sizes = {
        name: max(
            rank_snapshot_bytes(role, architectures[name], config.model.dtype, stage)
            for stage in range(role.parallel.pipeline_parallel_size)
        )
        for name, role in trained.items()
    }

    ends_s: dict[str, float] = {}
    for name, role in trained.items():
        # Models on the same devices share the link to the host.
        nbytes = sum(sizes.get(each, 0) for each in (name, *plan.on_same_devices(name)))
        end_s = nbytes / (device.host_gb_s * 1e9)
        updates = [phase.name for phase in role.row.phases if phase.trains]

        for phase in turns.phases:
            items = {item for item in moved.get(phase.name, ()) if item.role == name}
            if items & phase.needs or phase.name in updates:
                ends_s[phase.name] = max(end_s, ends_s.get(phase.name, 0.0))
                break
            # The snapshot stands still while a part of the model is offloaded.
            if items:
                end_s += moves.get(phase.name, 0.0)

    return ends_s


def _state(config: RunConfig, role: ModelRole, architecture: Architecture) -> Usage:
    return model_state(role, architecture, config.model.dtype, 0)


def _copied(states: Mapping[str, Usage], item: Item) -> int:
    """Return the bytes per device that moving a part of a role's state copies."""
    if item.part in (GRADIENTS, ENGINE) or item.role not in states:
        return 0
    return getattr(states[item.role], item.part)
