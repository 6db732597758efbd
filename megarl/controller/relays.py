"""Start the relays of a large group (relay.py), and calls through them.

A call of an actor takes the driver half a millisecond of processor time, so it calls one for many ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.controller.call_arguments import uids_of
from megarl.controller.calls import Call, Processes, RelayedCalls
from megarl.controller.dispatch import Arguments, CallPlan
from megarl.controller.messages import OnRecord, RankTask, RelayedCall
from megarl.controller.relay import Relay
from megarl.controller.resource_pool import PoolBundle


class RelayHandle(NamedTuple):
    """A relay (relay.py).

    Attributes:
        actor: Its handle.
        ranks: The ranks that it passes calls on to.
        numbers: The numbers of its next calls.
    """

    actor: Any
    ranks: range
    numbers: Iterator[int]


class Relays:
    """The relays of a group. Each has some consecutive ranks.

    Args:
        handles: The processes by rank.
        construction: The construction of each of them.
        bundles: Where they are.
        ranks_per_relay: The number of ranks of a relay.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        construction: Sequence[Call],
        bundles: Sequence[PoolBundle],
        ranks_per_relay: int,
    ) -> None:
        self._ranks_per_relay = ranks_per_relay
        self._relays = [
            _start_relay(
                handles,
                construction,
                range(first, min(first + ranks_per_relay, len(bundles))),
                bundles[first],
            )
            for first in range(0, len(bundles), ranks_per_relay)
        ]

    def start(
        self,
        processes: Processes,
        role: str,
        method: str,
        plan: CallPlan,
        shared: Sequence[Arguments],
        on_record: OnRecord,
    ) -> dict[int, Call]:
        """Start a call by one message to each relay that has some of its ranks, and return it by rank.

        Args:
            processes: The group's processes.
            role: The role.
            method: The method.
            plan: Which rank receives what.
            shared: The arguments of each part, with references of all that is not small.
            on_record: What is called when a rank has ended.
        """
        route = plan.route
        tasks: dict[int, list[RankTask]] = {}
        for rank, part in zip(route.ranks, route.parts, strict=True):
            task = RankTask(rank, rank in route.results, part)
            tasks.setdefault(rank // self._ranks_per_relay, []).append(task)

        calls = {}
        for index, own in tasks.items():
            relay = self._relays[index]
            # Send only the parts that ranks of this relay receive.
            parts = list(dict.fromkeys(task.part for task in own))
            call = RelayedCall(
                next(relay.numbers),
                role,
                method,
                tuple(task._replace(part=parts.index(task.part)) for task in own),
                tuple(tuple(shared[part]) for part in parts),
            )
            relayed = RelayedCalls(
                processes, relay.actor, call.number, relay.actor.run.remote(call), relay.ranks
            )
            for task in own:
                uids = uids_of(plan.parts[task.part])
                relayed.running[task.rank] = Call(
                    processes, role, task.rank, method, None, None, on_record, uids, relayed
                )
            calls |= relayed.running

        return calls

    def end(self) -> None:
        for relay in self._relays:
            ray.kill(relay.actor, no_restart=True)


def _start_relay(
    handles: Sequence[Any], construction: Sequence[Call], ranks: range, bundle: PoolBundle
) -> RelayHandle:
    """Start a relay on the node of its first rank."""
    records = [construction[rank].reference for rank in ranks]
    actor_class = ray.remote(Relay)
    handle = actor_class.options(
        # The CPU of the bundle is that of its rank.
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            bundle.placement_group, placement_group_bundle_index=bundle.number
        ),
        max_restarts=0,
    ).remote({rank: handles[rank] for rank in ranks}, records)
    return RelayHandle(handle, ranks, itertools.count())
