"""The emulation of NCCL has NCCL's semantics: each is seen here with groups of two or three ranks that end
well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.logical_devices import VARIABLE
from tests.nccl_communicator import num_live_communicators
from tests.nccl_semantics import NcclSemantics
from tests.ranks import RankPool

LIMIT = timedelta(seconds=60)
A_WHILE_S = 0.3  # in which what does not block would have returned
CPU = torch.device("cpu")


def make_group(name: str, limit: timedelta = LIMIT, device: int | None = None) -> NcclSemantics:
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return NcclSemantics(store, dist.get_rank(), dist.get_world_size(), limit, device)


def broadcast(group: NcclSemantics, tensor: Tensor, root: int = 0) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return group.broadcast([tensor], options)


class InThread:
    """A call that may block."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._result = self._call()

    def blocks(self) -> bool:
        self._thread.join(A_WHILE_S)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(LIMIT.total_seconds())
        assert not self._thread.is_alive(), "the call still blocks"
        return self._result


# ---- communicators


def first_collective() -> tuple[bool, list[float]]:
    """In a rank: does the call block before the last rank makes it? What came then."""
    group = make_group("collective")
    tensor = torch.full((2,), float(dist.get_rank()))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    call = None if is_last else InThread(lambda: broadcast(group, tensor, root=1))
    blocked = call is not None and call.blocks()
    dist.barrier()
    work = broadcast(group, tensor, root=1) if call is None else call.result()
    work.wait()
    assert num_live_communicators() == 1
    group.shutdown()

    return blocked, tensor.tolist()


def test_the_first_operation_blocks_until_all_ranks_have_come(rank_pool: RankPool) -> None:
    assert rank_pool.run(first_collective, world_size=3) == [
        (True, [1.0, 1.0]),
        (True, [1.0, 1.0]),
        (False, [1.0, 1.0]),
    ]


def exchange(group: NcclSemantics, tensor: Tensor) -> Any:
    """Ranks 0 and 1 to each other, as one operation."""
    peer = 1 - dist.get_rank()
    received = torch.empty_like(tensor)
    group._start_coalescing(CPU)
    assert group.send([tensor], peer, 0) is None
    assert group.recv([received], peer, 0) is None

    return group._end_coalescing(CPU), received


def coalesced_transfers() -> tuple[bool, float]:
    """Exchange coalesced tensors between ranks 0 and 1, and later with rank 2. Runs in a rank.

    Returns:
        Whether the first exchange blocked before rank 2 joined, and what was received.
    """
    group = make_group("coalesced")
    rank = dist.get_rank()
    call = InThread(lambda: exchange(group, torch.full((2,), float(rank)))) if rank < 2 else None
    blocked = call is not None and call.blocks()
    dist.barrier()
    received = torch.full((2,), 2.0)

    if call is None:
        group.eager_connect_single_device(CPU)
    else:
        work, received = call.result()
        work.wait()

    assert group.num_pair_communicators == 0
    group.shutdown()
    return blocked, float(received[0])


def test_coalesced_transfers_of_two_ranks_need_the_communicator_of_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(coalesced_transfers, world_size=3) == [(True, 1.0), (True, 0.0), (False, 2.0)]


def single_transfers() -> tuple[bool, float, int, int]:
    """Send a tensor from rank 0 to rank 1. Runs in a rank.

    Returns:
        Whether the send blocked before rank 1 received, what was received, and the numbers of communicators
        of pairs and of live communicators.
    """
    group = make_group("single")
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    call = InThread(lambda: group.send([tensor], 1, 0)) if rank == 0 else None
    blocked = call is not None and call.blocks()
    dist.barrier()

    if call is not None:
        call.result().wait()
        group.recv([tensor], 1, 7).wait()  # the same communicator
    elif rank == 1:
        group.recv([tensor], 0, 0).wait()
        group.send([tensor + 1], 0, 8).wait()

    counts = group.num_pair_communicators, num_live_communicators()
    group.shutdown()
    return blocked, float(tensor[0]), *counts


def test_a_single_transfer_makes_a_communicator_of_its_pair_and_waits_for_the_peer_only(
    rank_pool: RankPool,
) -> None:
    assert rank_pool.run(single_transfers, world_size=3) == [
        (True, 1.0, 1, 1),
        (False, 0.0, 1, 1),
        (False, 2.0, 0, 0),
    ]


def eager_transfers() -> tuple[list[float], int, int]:
    """Send a tensor to the other rank and back after an eager connect. Runs in a rank.

    Returns:
        What was received, and the numbers of communicators of pairs and of live communicators.
    """
    group = make_group("eager")
    rank = dist.get_rank()
    group.eager_connect_single_device(CPU)
    received = torch.empty(1)

    if rank == 0:
        group.send([torch.tensor([5.0])], 1, 0).wait()
        group.recv([received], 1, 0).wait()
    else:
        group.recv([received], 0, 0).wait()
        group.send([received + 1], 0, 0).wait()

    counts = group.num_pair_communicators, num_live_communicators()
    group.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        group.send([received], 1 - rank, 0)
    assert num_live_communicators() == 0

    return received.tolist(), *counts


def test_after_an_eager_connect_single_transfers_use_the_communicator_of_all(rank_pool: RankPool) -> None:
    assert rank_pool.run(eager_transfers, world_size=2) == [([6.0], 0, 1), ([5.0], 0, 1)]


def connect_alone() -> str:
    """Connect one rank at a time, and then both. Runs in a rank.

    Returns:
        The error of the rank that connected alone.
    """
    group = make_group("alone", limit=timedelta(seconds=A_WHILE_S))
    message = ""

    for turn in range(dist.get_world_size()):
        if dist.get_rank() == turn:
            with pytest.raises(RuntimeError) as raised:
                group.eager_connect_single_device(CPU)
            message = str(raised.value)
        dist.barrier()

    assert num_live_communicators() == 0
    group.limit = LIMIT
    group.eager_connect_single_device(CPU)
    group.shutdown()

    return message


def test_an_eager_connect_ends_with_the_limit_of_the_group(rank_pool: RankPool) -> None:
    messages = rank_pool.run(connect_alone, world_size=2)
    assert messages == ["NCCL communicator: its 2 ranks have not all come within 0:00:00.300000"] * 2


def abort_while_made() -> tuple[bool, str]:
    """Abort the group while rank 0 waits in its first operation, and let the peer join afterwards.

    Returns:
        In rank 0, whether the operation still blocked after the abort, and how it ended.
    """
    group = make_group("aborted while made")
    if dist.get_rank() == 1:
        dist.barrier()
        group.eager_connect_single_device(CPU)
        dist.barrier()
        group.abort()
        return False, ""

    def call() -> str:
        with pytest.raises(RuntimeError) as raised:
            broadcast(group, torch.zeros(1))
        return str(raised.value)

    in_thread = InThread(call)
    assert in_thread.blocks()
    group.abort()
    blocked = in_thread.blocks()
    dist.barrier()
    message = in_thread.result()
    dist.barrier()
    assert num_live_communicators() == 0

    return blocked, message


def test_abort_does_not_reach_a_communicator_that_is_being_made(rank_pool: RankPool) -> None:
    (blocked, message), _ = rank_pool.run(abort_while_made, world_size=2)
    assert blocked
    assert message == "NCCL communicator was aborted or shut down: the group is of no use"


def on_devices(devices: list[int | None], environment: list[str]) -> str:
    """In a rank: how it is refused, or what it broadcasts."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if environment:
            patch.setenv(VARIABLE, environment[rank])
        group = make_group("devices", device=devices[rank])

    try:
        broadcast(group, torch.zeros(1)).wait()
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
        group.shutdown()
        assert num_live_communicators() == 0

    return "agreed"


@pytest.mark.parametrize(
    ("devices", "environment", "answer"),
    [
        ([0, 1, 1], [], "Duplicate GPU detected : rank 1 and rank 2 both on CUDA device 1"),
        ([None] * 3, ["2,0", "1", "2"], "Duplicate GPU detected : rank 0 and rank 2 both on CUDA device 2"),
        ([None] * 3, ["2,0", "1", "0,2"], "agreed"),
        ([None, None, 0], [], "agreed"),
    ],
    ids=["by argument", "by environment", "all different", "devices of their own"],
)
def test_two_ranks_on_one_device_are_refused(
    devices: list[int | None], environment: list[str], answer: str, rank_pool: RankPool
) -> None:
    assert rank_pool.run(on_devices, world_size=3, devices=devices, environment=environment) == [answer] * 3


# ---- operations


def two_sources() -> tuple[list[bool], list[float]]:
    """Receive from two ranks, of which the first one sends late.

    Returns:
        In rank 0, which receives had ended before and after the first source sent, and what was received.
    """
    group = make_group("order")
    rank = dist.get_rank()
    group.eager_connect_single_device(CPU)
    first = torch.zeros(1)
    second = torch.zeros(1)
    completed: list[bool] = []

    if rank == 0:
        works = [group.recv([first], 1, 0), group.recv([second], 2, 0)]
        dist.barrier()  # reached, so both calls have returned
        assert InThread(works[1].wait).blocks()
        completed = [work.is_completed() for work in works]
        dist.barrier()
        works[0].wait()
        works[1].wait()
        completed += [work.is_completed() and work.is_success() for work in works]
    else:
        work = group.send([torch.tensor([float(rank)])], 0, 0) if rank == 2 else None
        dist.barrier()
        dist.barrier()
        (work or group.send([torch.tensor([float(rank)])], 0, 0)).wait()

    group.shutdown()
    return completed, [float(first), float(second)]


def test_an_operation_that_cannot_end_holds_up_later_ones_of_its_communicator(rank_pool: RankPool) -> None:
    completed, received = rank_pool.run(two_sources, world_size=3)[0]
    assert completed == [False, False, True, True]
    assert received == [1.0, 2.0]


def gather(group: NcclSemantics, tensor: Tensor) -> Any:
    """To rank 1."""
    options = dist.GatherOptions()
    options.rootRank = 1
    return group.gather([[torch.empty(1), torch.empty(1)]] if dist.get_rank() == 1 else [], [tensor], options)


ALONE = {"send": lambda group, tensor: group.send([tensor], 1, 0), "broadcast": broadcast, "gather": gather}


def begin_alone() -> list[str]:
    """In rank 0: which operations on one element end when rank 1 has not begun them."""
    group = make_group("alone")
    ended = []
    group.eager_connect_single_device(CPU)

    for name, begin in ALONE.items():
        tensor = torch.ones(1)
        if dist.get_rank() == 0:
            work = begin(group, tensor)
            if not InThread(work.wait).blocks() or work.is_completed():
                ended.append(name)
        dist.barrier()
        if dist.get_rank() == 1:
            work = group.recv([tensor], 0, 0) if name == "send" else begin(group, tensor)
        assert work.wait()

    group.shutdown()
    return ended


def test_no_operation_ends_before_the_peer_has_begun_it(rank_pool: RankPool) -> None:
    """However small it is."""
    assert rank_pool.run(begin_alone, world_size=2)[0] == []


def mistaken() -> list[str]:
    """In a rank: what arguments that are wrong raise, at once or from `wait`."""
    group = make_group("mistakes")
    messages = []
    group.eager_connect_single_device(CPU)

    for call in (
        lambda: group.allgather([[torch.zeros(1)]], [torch.zeros(1)]).wait(),
        lambda: group.send([torch.zeros(1)], dist.get_rank(), 0),
        lambda: group.recv_anysource([torch.zeros(1)], 0),
    ):
        with pytest.raises((RuntimeError, ValueError)) as raised:
            call()
        messages.append(str(raised.value))

    broadcast(group, torch.zeros(1)).wait()  # the group is none the worse
    group.shutdown()
    return messages


def test_mistakes_are_told(rank_pool: RankPool) -> None:
    for gather, to_itself, anysource in rank_pool.run(mistaken, world_size=2):
        assert "ProcessGroupGloo::allgather" in gather
        assert "itself" in to_itself
        assert "any source" in anysource
