"""Replicas that join and leave a running job: the devices that they get, and who is told of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from megarl.controller.resource_pool import InsufficientResourcesError, RayResourcePool, check_fits
from megarl.roles.rollout.replicas import ReplicaPlace, Replicas
from megarl.roles.rollout.scheduler import Pump
from megarl.weights.plan import RankPlace


class PlannedReplica(NamedTuple):
    """ranks: where those of its engine are."""

    place: ReplicaPlace
    ranks: Sequence[RankPlace]


class WeightCarrier(Protocol):
    """See WeightSync."""

    def send_to(self, replica_places: Sequence[Sequence[RankPlace]]) -> None: ...


class ReplicaScaling:
    """Of a run whose engines have devices of their own. planned: the replicas that it began with, whose devices stay reserved. reserve:
    gives a pool of one process with the devices of an engine, by the replica's number. num_ranks: of an engine."""

    def __init__(
        self,
        replicas: Replicas,
        pump: Pump,
        carrier: WeightCarrier,
        planned: Sequence[PlannedReplica],
        reserve: Callable[[int], RayResourcePool],
        num_ranks: int,
    ) -> None:
        self._replicas, self._pump, self._carrier = replicas, pump, carrier
        self._planned, self._reserve, self._num_ranks = planned, reserve, num_ranks
        self._pools: list[RayResourcePool] = []  # of those beyond the planned ones

    def scale(self, count: int) -> None:
        """There are so many replicas, the new ones starting, when it returns: the others generate meanwhile, and each gets the weights of
        now before its first request. Those with the highest numbers leave, and their requests go to the others.

        Raises InsufficientResourcesError where the cluster has no room, and then changes nothing.
        """
        reserved = [self._reserve(number) for number in range(max(len(self._planned), len(self._replicas)), count)]
        check_fits(reserved)
        try:
            for pool in reserved:
                pool.bundles()
        except InsufficientResourcesError:
            for pool in reserved:
                pool.release()
            raise
        self._pools += reserved
        with self._replicas.alone():
            self._carrier.send_to([self._of(number).ranks for number in range(count)])
            while len(self._replicas) > count:
                self._replicas.leave()
            while len(self._replicas) < count:
                self._replicas.join(self._of(len(self._replicas)).place)
            self._pump.resize()
        while len(self._pools) > max(0, count - len(self._planned)):
            self._pools.pop().release()

    def _of(self, number: int) -> PlannedReplica:
        if number < len(self._planned):
            return self._planned[number]
        place = ReplicaPlace(self._pools[number - len(self._planned)])
        return PlannedReplica(place, [RankPlace(f"joined {number}", f"joined {number}:{rank}") for rank in range(self._num_ranks)])
