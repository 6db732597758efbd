"""verl's names for worker groups on real Ray: each does what megarl's own call does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.controller import compat
from megarl.controller.compat import Dispatch, Execute
from megarl.controller.dispatch import RULES
from megarl.controller.dispatch import Dispatch as OwnDispatch
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, Worker, create_colocated_worker_cls
from tests.unit.controller.workers import ClashingWorker, EchoWorker


class VerlStyleWorker(Worker):
    @compat.register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> int:
        return self.rank

    @compat.register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self) -> int:
        return self.rank

    @compat.register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def add_rank(self, value: int, *, factor: int) -> int:
        return value * factor + self.rank

    @compat.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def square(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"square": batch.batch["x"] ** 2, "rank": torch.full((len(batch),), self.rank)}
        )

    @compat.register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def twice(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] * 2})


@pytest.fixture(scope="module")
def fused(ray_cluster: None) -> Iterator[compat.RayWorkerGroup]:
    pool = RayResourcePool([2], use_gpu=False, name="verl")
    roles = {"actor": RayClassWithInitArgs(VerlStyleWorker), "echo": RayClassWithInitArgs(EchoWorker)}
    yield (group := compat.RayWorkerGroup(pool, create_colocated_worker_cls(roles)))
    group.shutdown()
    pool.release()


@pytest.fixture(scope="module")
def actor(fused: compat.RayWorkerGroup) -> compat.RayWorkerGroup:
    return fused.spawn()["actor"]  # type: ignore[return-value]


def test_registered_methods_are_methods_of_the_group(actor: compat.RayWorkerGroup) -> None:
    assert actor.who() == [0, 1]
    assert actor.first() == 0
    assert actor.add_rank([1, 2], factor=[10, 100]).get() == [10, 201]
    batch = DataProto.from_dict({"x": torch.arange(3)})
    squared = actor.square(batch)
    assert (squared.batch["square"].tolist(), squared.batch["rank"].tolist()) == ([0, 1, 4], [0, 0, 1])
    assert actor.twice(batch).batch["x"].tolist() == [0, 2, 4]

    with pytest.raises(
        AttributeError,
        match="VerlStyleWorker, the worker of role 'actor', has no registered method 'nothing'",
    ):
        actor.nothing()


def test_execute_by_name(actor: compat.RayWorkerGroup) -> None:
    assert (
        actor.execute_all_sync("who")
        == actor.execute_all_async("who").get()
        == actor.execute_all("who").get()
        == [0, 1]
    )
    assert actor.execute_rank_async(1, "who").get() == 1
    assert actor.execute_rank_zero_sync("who") == actor.execute_rank_zero_async("who").get() == 0
    assert actor.execute_rank_zero("who").get() == 0
    with pytest.raises(ValueError, match="ranks 0 to 1, not 2"):
        actor.execute_rank_async(2, "who")
    with pytest.raises(ValueError, match="'actor', has no registered method 'nothing'"):
        actor.execute_all_sync("nothing")


def test_calls_that_do_not_belong_to_one_role_are_refused(fused: compat.RayWorkerGroup) -> None:
    with pytest.raises(AttributeError, match=r"who: several roles share .* spawn\(\)"):
        fused.who()
    with pytest.raises(ValueError, match=r"who: several roles share .* spawn\(\)"):
        fused.execute_all_sync("who")
    assert fused.spawn()["echo"].who() == 0  # megarl's own @register works as well


def test_a_method_that_the_group_has_itself_is_refused(ray_cluster: None) -> None:
    pool = RayResourcePool([1], use_gpu=False)
    with pytest.raises(ValueError, match="ClashingWorker.shutdown cannot be called by its name"):
        compat.RayWorkerGroup(pool, RayClassWithInitArgs(ClashingWorker))
    pool.release()


def test_modes_are_megarls_rules() -> None:
    assert Dispatch.RANK_ZERO.rule is RULES[OwnDispatch.RANK_ZERO]
    assert Dispatch.MEGATRON_COMPUTE_PROTO.rule is RULES[OwnDispatch.MEGATRON_MESH]
    assert {mode.name for mode in Dispatch} >= {"DP_COMPUTE", "ALL_TO_ALL"}  # not aliases of each other
    with pytest.raises(ValueError, match="execute_mode=RANK_ZERO requires .* not DP_COMPUTE_PROTO"):
        compat.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
