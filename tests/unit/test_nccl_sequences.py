"""Orders of calls that end well over gloo hang over NCCL, and so over its stub: in processes that are
killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.weights.p2p import ASYNC_ERROR_HANDLING
from tests.mortal_ranks import Place, mortal_ranks
from tests.nccl_communicator import num_live_communicators
from tests.nccl_semantics import NcclSemantics

LIMIT = timedelta(seconds=60)
A_WHILE_S = 1.0  # in which what does not hang would have ended

pytestmark = pytest.mark.usefixtures("forked_processes")


def join(place: Place, *, eager: bool, watchdog: bool = False) -> NcclSemantics:
    """Make a group, by default without a watchdog, as weight groups are: rank 0 is the trainer, others are
    engines."""
    os.environ[ASYNC_ERROR_HANDLING] = "3" if watchdog else "0"
    group = NcclSemantics(
        dist.FileStore(place.store_path, place.size), place.rank, place.size, LIMIT, device=place.rank
    )
    if eager:
        group.eager_connect_single_device(torch.device("cpu"))

    return group


def broadcast(group: NcclSemantics, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


# ---- a push of a split placement: the driver tells engines to receive when the trainer says that it has handed over


def pushing_trainer(eager: bool, place: Place) -> None:
    group = join(place, eager=eager)
    place.say("joined")
    place.listen()
    work = broadcast(group, torch.arange(4.0))
    place.say("handed over")
    work.wait()
    place.say("sent")


def receiving_engine(eager: bool, place: Place) -> None:
    group = join(place, eager=eager)
    place.say("joined")
    place.listen()
    received = torch.zeros(4)
    broadcast(group, received).wait()
    place.say(received.tolist())


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
def test_the_first_broadcast_of_a_push_hangs_unless_the_group_connects_when_it_is_joined(
    eager: bool, tmp_path: Path
) -> None:
    with mortal_ranks(tmp_path, [partial(pushing_trainer, eager), partial(receiving_engine, eager)]) as (
        trainer,
        engine,
    ):
        assert [trainer.hear(), engine.hear()] == ["joined"] * 2
        trainer.tell("push")
        if not eager:
            assert trainer.is_silent(A_WHILE_S)  # the driver waits for it, and would for ever
            engine.tell("receive")  # which the driver never comes to
            assert trainer.hear() == "handed over"
        else:
            assert trainer.hear() == "handed over"
            assert trainer.is_silent(A_WHILE_S)
            engine.tell("receive")
        assert engine.hear() == [0.0, 1.0, 2.0, 3.0]
        assert trainer.hear() == "sent"


# ---- an engine that is lost in a broadcast


def losing_trainer(place: Place) -> None:
    """Says what becomes of its second broadcast: before it aborts, and after."""
    group = join(place, eager=True)
    broadcast(group, torch.ones(4)).wait()
    place.say("sent one")
    place.listen()
    work = broadcast(group, torch.ones(4))
    later = broadcast(group, torch.ones(4))
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.append(how_it_ends(work.wait)), daemon=True)
    thread.start()
    thread.join(A_WHILE_S)
    place.say([thread.is_alive(), work.is_completed(), num_live_communicators()])
    group.abort()
    thread.join(LIMIT.total_seconds())
    place.say(
        [*ends, how_it_ends(later.wait), work.is_completed(), work.is_success(), num_live_communicators()]
    )
    place.say(how_it_ends(lambda: broadcast(group, torch.ones(4))))


def how_it_ends(call: Callable[[], Any]) -> str:
    try:
        return f"returned {call()}"
    except RuntimeError as error:
        return str(error)


def lost_engine(number: signal.Signals, place: Place) -> None:
    group = join(place, eager=True)
    broadcast(group, torch.zeros(4)).wait()
    place.say("received one")
    place.die(number)


def lasting_engine(place: Place) -> None:
    """Says whether it still waits for the last broadcast, when others have died and aborted."""
    group = join(place, eager=True)
    broadcast(group, torch.zeros(4)).wait()
    place.say("received one")
    broadcast(group, torch.zeros(4))
    last = broadcast(group, torch.zeros(4))
    place.listen()
    thread = threading.Thread(target=last.wait, daemon=True)
    thread.start()
    thread.join(A_WHILE_S)
    place.say(thread.is_alive())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_broadcast_to_a_lost_engine_neither_ends_nor_raises_until_it_is_aborted(
    number: signal.Signals, tmp_path: Path
) -> None:
    with mortal_ranks(tmp_path, [losing_trainer, lasting_engine, partial(lost_engine, number)]) as (
        trainer,
        lasting,
        lost,
    ):
        assert [trainer.hear(), lasting.hear(), lost.hear()] == ["sent one", "received one", "received one"]
        trainer.tell("broadcast")
        assert trainer.hear() == [True, False, 1]
        assert trainer.hear() == ["returned True", "returned True", True, False, 0]
        assert trainer.hear() == "NCCL communicator was aborted or shut down: the group is of no use"
        lasting.tell("the others have gone")
        assert lasting.hear() is True


def dropping_trainer(place: Place) -> None:
    """Closes as a weight group does: it lets the group go."""
    group = join(place, eager=True)
    place.listen()
    broadcast(group, torch.ones(4))
    del group
    gc.collect()
    place.say(num_live_communicators())


def engine_that_joins(place: Place) -> None:
    join(place, eager=True)
    place.say("joined")
    place.die(signal.SIGKILL)


def test_a_group_that_is_dropped_leaves_its_communicator(tmp_path: Path) -> None:
    with mortal_ranks(tmp_path, [dropping_trainer, engine_that_joins]) as (trainer, engine):
        assert engine.hear() == "joined"
        trainer.tell("broadcast")
        assert trainer.hear() == 1


# ---- the watchdog


def watched_trainer(watchdog: bool, limit_s: float, place: Place) -> None:
    """Broadcast to an engine that is lost, and say so if this process outlives the watchdog."""
    group = join(place, eager=True, watchdog=watchdog)
    for communicator in group.communicators.values():
        # of operations only: connecting may take its time on a busy machine
        communicator.limit = timedelta(seconds=limit_s)

    place.say("joined")
    work = broadcast(group, torch.ones(4))
    place.listen()
    place.say(work.is_completed())
    group.abort()
    place.say("alive")


def engine_to_lose(place: Place) -> None:
    join(place, eager=True)
    place.say("joined")
    place.listen()


@pytest.mark.parametrize("fault", ["peer dies", "peer is late"])
@pytest.mark.parametrize("watchdog", [True, False], ids=["watchdog", "none"])
def test_a_lost_peer_ends_the_process_unless_the_group_has_no_watchdog(
    fault: str, watchdog: bool, tmp_path: Path
) -> None:
    limit_s = 2.0 if fault == "peer is late" else LIMIT.total_seconds()
    with mortal_ranks(tmp_path, [partial(watched_trainer, watchdog, limit_s), engine_to_lose]) as (
        trainer,
        engine,
    ):
        assert [trainer.hear(), engine.hear()] == ["joined"] * 2
        if fault == "peer dies":
            engine.process.kill()
        if watchdog:
            assert trainer.ended_by() == -signal.SIGABRT
        else:
            assert trainer.is_silent(limit_s + A_WHILE_S if fault == "peer is late" else A_WHILE_S)
            trainer.tell("go on")
            assert [trainer.hear(), trainer.hear()] == [False, "alive"]


# ---- limits


def limited_trainer(place: Place) -> None:
    """Says how a wait with a limit ends, and a shutdown, where the engine never takes part."""
    group = join(place, eager=True)
    work = broadcast(group, torch.ones(4))
    place.say([how_it_ends(lambda: work.wait(timedelta(seconds=A_WHILE_S))), num_live_communicators()])
    other = NcclSemantics(
        dist.PrefixStore("other", group.store), place.rank, place.size, LIMIT, device=place.rank
    )
    other.eager_connect_single_device()
    broadcast(other, torch.ones(4))
    other.limit = timedelta(seconds=A_WHILE_S)
    place.say([how_it_ends(other.shutdown), num_live_communicators()])


def absent_engine(place: Place) -> None:
    group = join(place, eager=True)
    NcclSemantics(
        dist.PrefixStore("other", group.store), place.rank, place.size, LIMIT, device=place.rank
    ).eager_connect_single_device()
    place.listen()


def test_a_wait_and_a_shutdown_with_limits_abort_and_raise(tmp_path: Path) -> None:
    with mortal_ranks(tmp_path, [limited_trainer, absent_engine]) as (trainer, _):
        assert trainer.hear() == ["NCCL operation did not end within 0:00:01; its communicator is aborted", 0]
        assert trainer.hear() == [
            "NCCL communicators ['full'] had operations that did not end within 0:00:01",
            0,
        ]


# ---- orders


def receiving_first(place: Place) -> None:
    group = join(place, eager=True)
    works = [group.recv([torch.zeros(4)], 1, 0), broadcast(group, torch.ones(4))]
    place.listen()
    place.say([work.is_completed() for work in works])


def broadcasting_first(place: Place) -> None:
    group = join(place, eager=True)
    works = [broadcast(group, torch.zeros(4)), group.send([torch.ones(4)], 0, 0)]
    place.listen()
    place.say([work.is_completed() for work in works])


def test_ranks_that_differ_in_the_order_of_operations_hang(tmp_path: Path) -> None:
    """gloo would match each with its like."""
    with mortal_ranks(tmp_path, [receiving_first, broadcasting_first]) as ranks:
        assert ranks[0].is_silent(A_WHILE_S)
        for rank in ranks:
            rank.tell("and now?")
        assert [rank.hear() for rank in ranks] == [[False, False], [False, False]]
