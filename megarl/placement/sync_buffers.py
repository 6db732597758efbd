"""The buffers that a weight sync takes on each side, and the phases in which they exist. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megarl.config.schema import EngineDType, PPOConfig, RunConfig, Transport
from megarl.models.architecture import Architecture
from megarl.models.fp8 import sender_bytes
from megarl.placement.offload_plan import OffloadPlan
from megarl.placement.placement_plan import PlacementPlan
from megarl.placement.transport import choose_transport


class SyncBuffers(NamedTuple):
    """The buffers of a weight sync.

    Attributes:
        buckets: The bytes of message and IPC buffers of each role, before they are limited by its weights.
        keeps: The phases in which each role has them.
        sender: The bytes of scales and temporary memory of an actor rank that quantizes.
        copies: The bytes of host memory for the last weights of engines, relative to those of an actor rank's
            weights; 0 without `resharding.delta`.
    """

    buckets: Mapping[str, int]
    keeps: Mapping[str, frozenset[str]]
    sender: int
    copies: float = 0.0

    def on_host(self, role: str, weights: int) -> int:
        """Return the bytes of host memory of a rank with `weights` bytes of weights, at most."""
        return int(weights * self.copies) if role == "actor" else 0

    def in_phase(self, phase: str, role: str, weights: int) -> int:
        """Return the bytes of a rank with `weights` bytes of weights in a phase."""
        if phase not in self.keeps.get(role, ()):
            return 0
        return min(self.buckets[role], weights) + self.sender * (role == "actor")


def sync_buffers(
    config: RunConfig, plan: PlacementPlan, turns: OffloadPlan, architectures: Mapping[str, Architecture]
) -> SyncBuffers:
    """Return the buffers of a run's weight sync. Supervised fine-tuning has no engines, so it has none."""
    if not isinstance(config, PPOConfig):
        return SyncBuffers({}, {}, 0)
    transport = choose_transport(config, plan)
    sender = sender_bytes(architectures["actor"].base) if config.rollout.dtype is EngineDType.fp8 else 0
    copies = _copies(config, transport) if config.resharding.delta else 0.0
    return SyncBuffers(_buckets(config, transport), _keeps_buckets(turns, transport), sender, copies)


def _copies(config: PPOConfig, transport: Transport) -> float:
    """Return how often an actor rank's weights are kept, at most.

    A rank keeps what it sends. What it sends to whole replicas is kept once; those that it shares with other
    ranks are the first and the last of them. All replicas read the same files of a folder.
    """
    sent = (
        1 if transport is Transport.folder else config.rollout.num_replicas
    ) / config.actor.parallel.num_copies
    return min(sent, 1.0) if sent <= 1 or sent == int(sent) else min(sent, 3.0)


def _buckets(config: PPOConfig, transport: Transport) -> dict[str, int]:
    """Return the bytes that a weight sync takes on each side.

    `device`: IPC buffers of two buckets, which belong to the trainer, and two messages of half a bucket to
    other trainers. `group`: two buckets for sending and two for receiving. `folder`: two buckets where files
    are written.
    """
    bucket = int(config.resharding.bucket_mb * 2**20)
    return {
        "actor": 3 * bucket if transport is Transport.device else 2 * bucket,
        "rollout": 2 * bucket if transport is Transport.group else 0,
    }


def _keeps_buckets(turns: OffloadPlan, transport: Transport) -> dict[str, frozenset[str]]:
    """Return the phases in which each side of a weight sync has its buffers.

    With `folder` they exist only during the sync. With other transports, the actor keeps them until a part of
    its state is offloaded, which with `device` is as soon as the engines have their weights. What an engine
    frees after a sync stays with its allocator.
    """
    every_phase = frozenset(phase.name for phase in turns.phases)
    pushing = "update_weights"
    return {
        "actor": frozenset({pushing})
        if transport is Transport.folder
        else turns.until_moved("actor", pushing),
        "rollout": every_phase,
    }
