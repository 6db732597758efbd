"""Test the assignment of devices when replicas join and leave, with fake pools and processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megarl.controller.resource_pool import InsufficientResourcesError
from megarl.rollout.driver import start_rollout
from megarl.rollout.driver.replicas import ReplicaPlace, unshared
from megarl.rollout.driver.start_rollout import ReplicaScaling
from megarl.weights.plan import RankLocation

NUM_FREE = 3  # pools for which the cluster has room, in addition to the planned one


class Pool:
    """Stub for RayResourcePool."""

    reserved: list[str] = []

    def __init__(self, name: str) -> None:
        self.name = name

    def bundles(self) -> None:
        if len(self.reserved) == NUM_FREE:
            raise InsufficientResourcesError(f"pool {self.name!r}: no room")
        self.reserved.append(self.name)

    def release(self) -> None:
        if self.name in self.reserved:
            self.reserved.remove(self.name)


class Replicas:
    """Stub for Replicas: the pool of each."""

    def __init__(self, first: ReplicaPlace) -> None:
        self.pools = [first.pool]
        self.exclusive = unshared

    def __len__(self) -> int:
        return len(self.pools)

    def join(self, place: ReplicaPlace) -> None:
        self.pools.append(place.pool)

    def leave(self) -> None:
        self.pools.pop()


def test_those_that_join_get_free_devices_and_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_rollout, "check_fits", lambda pools: None)
    monkeypatch.setattr(Pool, "reserved", [])
    place = ReplicaPlace(Pool("planned"))  # type: ignore[arg-type]
    planned = place, [RankLocation("0", "0:7"), RankLocation("0", "0:8")]
    replicas: Any = Replicas(place)
    sent: list[list[list[RankLocation]]] = []
    transport: Any = SimpleNamespace(send_to=sent.append)
    resized: list[int] = []
    scheduler: Any = SimpleNamespace(resize=lambda: resized.append(len(replicas)))
    scaling = ReplicaScaling(
        replicas, scheduler, transport, [planned], lambda number: Pool(f"joined-{number}"), 2
    )  # type: ignore[arg-type, return-value]

    def names() -> list[str]:
        return [pool.name for pool in replicas.pools]

    scaling.scale(3)
    assert names() == ["planned", "joined-1", "joined-2"]
    assert (Pool.reserved, resized) == (["joined-1", "joined-2"], [3])
    joined = [
        [RankLocation(f"joined {number}", f"joined {number}:{rank}") for rank in (0, 1)] for number in (1, 2)
    ]
    assert sent[-1] == [planned[1], *joined]
    with pytest.raises(InsufficientResourcesError, match="joined-4"):
        scaling.scale(6)
    assert names() == ["planned", "joined-1", "joined-2"]
    assert (Pool.reserved, resized, len(sent)) == (["joined-1", "joined-2"], [3], 1)
    scaling.scale(2)
    assert (names(), Pool.reserved) == (["planned", "joined-1"], ["joined-1"])
    scaling.scale(1)
    scaling.scale(2)
    assert (names(), Pool.reserved, resized) == (["planned", "joined-1"], ["joined-1"], [3, 2, 1, 2])
