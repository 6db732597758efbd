"""Choose the transport of weights from the trainer to the engines, and plan the memory that it takes. Pure.

The choice follows from the configuration and the plan, and is the same on a CPU and on CUDA. What transports
need is in their table (`Transport` in config/kinds.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config.schema import EngineDType, PPOConfig, RunConfig, Transport
from megarl.config.speculation import DRAFT, SECTION, draft_of
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.fp8 import sender_bytes
from megarl.plan.placement.dataflow import OffloadPlan
from megarl.plan.placement.placement_plan import PlacementPlan

_KEY = "resharding.transport"
_DELTA = "resharding.delta"


def choose_transport(config: PPOConfig, plan: PlacementPlan) -> Transport:
    """Return `resharding.transport`; for auto, the first one that works.

    Raises:
        ConfigError: The configured transport cannot work in this placement, no transport can send FP8, the
            transport cannot send only what changed (`resharding.delta`), or it would overwrite a draft model.
    """
    chosen = _working_transport(config, plan)

    if chosen.needs.through_files and draft_of(config.rollout) is not None:
        problem = (
            f"{_KEY}, {SECTION}.{DRAFT}, placement.strategy: the transport is a folder, which SGLang would "
            f"load into the draft model, too; use {_KEY}=auto in a placement in which all engines run on "
            "devices of the actor, or none does, or NGRAM, which has no draft model"
        )
        raise ConfigError("placement", [problem])

    if config.resharding.delta and not chosen.needs.sends_changes:
        how = "chosen" if config.resharding.transport is Transport.auto else "configured"
        problem = (
            f"{_DELTA}, {_KEY}, placement.strategy: is true, but weights do not leave their device with the "
            f"transport {chosen.value}, which is {how} in the placement {plan.strategy.value!r}; use "
            f"{_DELTA}=false, or {_KEY}=group with engines on their own devices"
        )
        raise ConfigError("placement", [problem])

    return chosen


def _working_transport(config: PPOConfig, plan: PlacementPlan) -> Transport:
    asked = config.resharding.transport
    why_not = {each: _why_not(each, plan) for each in Transport if each is not Transport.auto}
    # The folder always works, so the list is never empty.
    working = [transport for transport, reason in why_not.items() if reason is None]
    if asked is Transport.auto:
        if working[0].needs.through_files and config.rollout.dtype is EngineDType.fp8:
            reasons = "; ".join(f"{each.value}: {reason}" for each, reason in why_not.items() if reason)
            problem = (
                f"{_KEY}, rollout.dtype, placement.strategy: is auto, and only a folder works, which has the "
                f"dtype of the model, but rollout.dtype is fp8 ({reasons}); use another placement, or "
                "rollout.dtype=model"
            )
            raise ConfigError("placement", [problem])
        return working[0]

    if (reason := why_not[asked]) is not None:
        others = " or ".join(transport.value for transport in working)
        raise ConfigError(
            "placement",
            [f"{_KEY}, placement.strategy: is {asked.value}, but {reason}; use {others}, or auto"],
        )

    return asked


def joins_weight_groups(config: RunConfig, plan: PlacementPlan) -> bool:
    """Return whether actor ranks and engines join process groups for the weight sync."""
    if not isinstance(config, PPOConfig) or not {"actor", "rollout"} <= set(plan.roles):
        return False
    return choose_transport(config, plan).needs.joins_groups


def _why_not(transport: Transport, plan: PlacementPlan) -> str | None:
    """Return why a transport does not work, None if it does. The folder always works."""
    trainers = plan.group_of("actor").devices
    engines = plan.group_of("rollout").devices

    if transport.needs.shares_devices and (alone := sorted(engines - trainers)):
        places = ", ".join(f"{device} of node {node}" for node, device in alone[:4])
        return (
            f"in the placement {plan.strategy.value!r} engines run on devices that have no actor rank "
            f"(device {places})"
        )

    if transport.needs.shares_devices is False and (shared := sorted(engines & trainers)):
        node, device = shared[0]
        return (
            f"actor and rollout share devices (device {device} of node {node}), and NCCL does not allow a "
            f"group with two members on one device"
        )

    return None


class SyncBuffers:
    """The buffers of a run's weight sync. Supervised fine-tuning has no engines, so it has none."""

    def __init__(
        self,
        config: RunConfig,
        plan: PlacementPlan,
        turns: OffloadPlan,
        architectures: Mapping[str, Architecture],
    ) -> None:
        # The bytes of message and IPC buffers of each role, before they are limited by its weights, and the
        # phases in which it has them; the bytes of scales and temporary memory of an actor rank that
        # quantizes; and the host memory for the last weights of engines, relative to those of a rank.
        self._buckets: dict[str, int] = {}
        self._keeps: dict[str, frozenset[str]] = {}
        self._sender = 0
        self._copies = 0.0
        if not isinstance(config, PPOConfig):
            return

        transport = choose_transport(config, plan)
        needs = transport.needs
        bucket = int(config.resharding.bucket_mb * 2**20)
        self._buckets = {"actor": needs.trainer_buckets * bucket, "rollout": needs.engine_buckets * bucket}
        # The actor keeps its buffers during the sync, or until a part of its state is offloaded, which on
        # devices that it shares with engines is as soon as they have their weights. What an engine frees
        # after a sync stays with its allocator.
        pushing = "update_weights"
        self._keeps = {
            "actor": turns.until_moved("actor", pushing) if needs.keeps_buckets else frozenset({pushing}),
            "rollout": frozenset(phase.name for phase in turns.phases),
        }
        if config.rollout.dtype is EngineDType.fp8:
            self._sender = sender_bytes(architectures["actor"].base)
        if config.resharding.delta:
            self._copies = _copies(config, transport)

    def on_host(self, role: str, weights: int) -> int:
        """Return the bytes of host memory of a rank with `weights` bytes of weights, at most."""
        return int(weights * self._copies) if role == "actor" else 0

    def in_phase(self, phase: str, role: str, weights: int) -> int:
        """Return the bytes of a rank with `weights` bytes of weights in a phase."""
        if phase not in self._keeps.get(role, ()):
            return 0
        return min(self._buckets[role], weights) + self._sender * (role == "actor")


def _copies(config: PPOConfig, transport: Transport) -> float:
    """Return how often an actor rank's weights are kept, at most.

    A rank keeps what it sends. What it sends to whole replicas is kept once; those that it shares with other
    ranks are the first and the last of them. All replicas read the same files of a folder.
    """
    num_targets = 1 if transport.needs.through_files else config.rollout.num_replicas
    sent = num_targets / config.actor.parallel.num_copies
    return min(sent, 1.0) if sent <= 1 or sent == int(sent) else min(sent, 3.0)
