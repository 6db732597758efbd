"""Start the relays of a large group (relay.py), and calls through them.

A call of an actor takes the driver half a millisecond of processor time, so it calls one for many ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.controller.call_arguments import uids_of
from megarl.controller.calls import Call, Processes, RelayedCalls
from megarl.controller.dispatch import Arguments, CallPlan
from megarl.controller.messages import OnRecord, RelayedCall
from megarl.controller.relay import Relay
from megarl.controller.resource_pool import PoolBundle


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
        self._ranks = [
            range(first, min(first + ranks_per_relay, len(bundles)))
            for first in range(0, len(bundles), ranks_per_relay)
        ]
        self._actors = [
            _start_relay(handles, construction, ranks, bundles[ranks[0]]) for ranks in self._ranks
        ]
        self._next_numbers = [0] * len(self._actors)

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
        part_of: dict[int, dict[int, int]] = {}  # by relay and rank
        for rank, part in zip(route.ranks, route.parts, strict=True):
            part_of.setdefault(rank // self._ranks_per_relay, {})[rank] = part

        calls = {}
        for index, own in part_of.items():
            actor = self._actors[index]
            number = self._next_numbers[index]
            self._next_numbers[index] += 1
            # Send only the parts that ranks of this relay receive.
            parts = list(dict.fromkeys(own.values()))
            call = RelayedCall(
                number,
                role,
                method,
                tuple((rank, rank in route.results, parts.index(part)) for rank, part in own.items()),
                tuple(tuple(shared[part]) for part in parts),
            )
            relayed = RelayedCalls(processes, actor, number, actor.run.remote(call), self._ranks[index])
            for rank, part in own.items():
                uids = uids_of(plan.parts[part])
                relayed.running[rank] = Call(
                    processes, role, rank, method, None, None, on_record, uids, relayed
                )
            calls |= relayed.running

        return calls

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


def _start_relay(
    handles: Sequence[Any], construction: Sequence[Call], ranks: range, bundle: PoolBundle
) -> Any:
    """Start a relay on the node of its first rank."""
    records = [construction[rank].reference for rank in ranks]
    actor_class = ray.remote(Relay)
    return actor_class.options(
        # The CPU of the bundle is that of its rank.
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            bundle.placement_group, placement_group_bundle_index=bundle.number
        ),
        max_restarts=0,
    ).remote({rank: handles[rank] for rank in ranks}, records)
