"""Scaling: replicas that join and leave a running job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.controller.resource_pool import InsufficientResourcesError, RayResourcePool, check_fits
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.tracking.run_files import take_request
from megarl.weights.plan import RankLocation
from megarl.weights.sync.sync import WeightSync

_log = logging.getLogger(__name__)

# A replica of the placement plan, and the locations of its engine's ranks.
PlannedReplica = tuple[ReplicaPlace, Sequence[RankLocation]]


class ReplicaScaling:
    """Scales the replicas of a run whose engines have their own devices.

    Args:
        replicas: The replicas.
        scheduler: Request scheduler, which is notified of the change.
        sync: Weight sync, which is notified of the replicas' locations.
        planned: Initial replicas, whose devices stay reserved.
        reserve: Returns a pool of one process with the devices of an engine, given the replica's number.
        num_ranks: Number of ranks of an engine.
    """

    def __init__(
        self,
        replicas: Replicas,
        scheduler: RequestScheduler,
        sync: WeightSync,
        planned: Sequence[PlannedReplica],
        reserve: Callable[[int], RayResourcePool],
        num_ranks: int,
    ) -> None:
        self._replicas = replicas
        self._scheduler = scheduler
        self._sync = sync
        self._planned = planned
        self._reserve = reserve
        self._num_ranks = num_ranks
        self._pools: list[RayResourcePool] = []  # the pools of replicas beyond the planned ones

    def scale(self, count: int) -> None:
        """Change the number of replicas to `count`.

        New replicas are still starting when this returns, while the others generate; each gets the current
        weights before its first request. Replicas with the highest numbers leave, and their requests go to
        the others.

        Raises:
            InsufficientResourcesError: The cluster has no free devices. Nothing has changed.
        """
        # Reserve all devices before anything changes, so that a refusal leaves the run as it was.
        reserved = [
            self._reserve(number) for number in range(max(len(self._planned), len(self._replicas)), count)
        ]
        check_fits(reserved)

        try:
            for pool in reserved:
                pool.bundles()
        except InsufficientResourcesError:
            for pool in reserved:
                pool.release()
            raise

        # The generation thread must have no call in progress while replicas join or leave.
        self._pools += reserved
        with self._replicas.exclusive():
            # The transfer schedules depend on the locations of all replicas; the next weight sync rebuilds
            # them.
            self._sync.send_to([self._of(number)[1] for number in range(count)])
            while len(self._replicas) > count:
                self._replicas.leave()
            while len(self._replicas) < count:
                self._replicas.join(self._of(len(self._replicas))[0])
            self._scheduler.resize()

        # Release devices only after their replicas have ended.
        while len(self._pools) > max(0, count - len(self._planned)):
            self._pools.pop().release()

    def _of(self, number: int) -> PlannedReplica:
        if number < len(self._planned):
            return self._planned[number]

        # A replica that joined shares no device with a trainer, so its rank locations only have to be unique.
        node = f"joined {number}"
        ranks = [RankLocation(node, f"{node}:{rank}") for rank in range(self._num_ranks)]
        return ReplicaPlace(self._pools[number - len(self._planned)]), ranks


def apply_request(scaling: ReplicaScaling | None, run_dir: Path) -> None:
    """Apply a pending request of `megarl scale`, a file in the run's folder that is deleted when it is read.

    If it cannot be satisfied, log the reason and continue unchanged.
    """
    try:
        count = take_request(run_dir)
        if count is not None and scaling is not None:
            scaling.scale(count)
            _log.warning("the run now has %d rollout replicas", count)
    except (ValueError, OSError) as error:
        _log.warning("the number of rollout replicas is unchanged: %s", error)
