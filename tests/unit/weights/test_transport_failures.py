"""Engines that die or hang in any round of a weight sync, with every transport, over gloo and NCCL's semantics.

The other engines receive their weights, and so does the replacement of the lost one. Nothing is left over.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megarl.weights.p2p import P2PAddress, P2PGroup, reserve_port
from megarl.weights.tensors import Part, WeightTransferError
from megarl.weights.transfer import SendReport
from megarl.weights.transports.interface import Address, EngineLink, Routes
from tests.mortal_ranks import MortalRank, Place, mortal_ranks
from tests.nccl_communicator import num_live_communicators
from tests.unit.weights.models import architecture_of
from tests.unit.weights.transfers import CPU, Case, Cut, EngineRank, TrainerRank

pytestmark = pytest.mark.usefixtures("forked_processes")

NUM_TRAINERS = 2
LIMIT_S = 45.0


class Obeying:
    """A rank that executes the test's commands one by one."""

    def __init__(self, case: Case, place: Place) -> None:
        self.case = case
        self.place = place
        self._listener: Any = None

    def serve(self) -> None:
        while (call := self.place.listen()) is not None:
            name, *arguments = call
            try:
                self.place.say(getattr(self, name)(*arguments))
            except WeightTransferError as error:
                self.place.say(error)

    def reserve(self) -> int:
        self._listener = reserve_port("127.0.0.1")
        return self._listener.getsockname()[1]

    def p2p(self, address: P2PAddress, rank: int) -> P2PGroup:
        listener = self._listener
        self._listener = None
        return P2PGroup.join(address, rank, CPU, listener)


class ObeyingTrainer(Obeying):
    def join_trainers(self, address: P2PAddress | None) -> None:
        p2p = None if address is None else self.p2p(address, self.place.rank)
        self.own = TrainerRank(self.case, self.case.plan(), self.place.rank, p2p)

    def listen(self, replica: int) -> Address:
        return self.own.end.listen(replica, self.routes(replica).listeners[self.place.rank])

    def join(self, replica: int, addresses: list[Address]) -> None:
        link = self.routes(replica).senders[self.place.rank]
        self.own.end.join(replica, replace(link, addresses=addresses))

    def routes(self, replica: int) -> Routes:
        return self.case.routes(self.own.plan, replica, LIMIT_S)

    def send(self, seed: int, replicas: list[int]) -> SendReport | None:
        self.sending = self.own.end.open(self.own.shards(seed), replicas)
        return self.go_on([])

    def go_on(self, dropped: list[int]) -> SendReport | None:
        return self.sending.report() if self.sending.run(dropped) else None

    def leave(self, replica: int) -> None:
        self.own.end.leave(replica)

    def close(self) -> tuple[int, int]:
        """Close remaining communicators and mapped IPC buffers."""
        self.own.close()
        maps = Path("/proc/self/maps").read_text()
        return num_live_communicators(), maps.count("megarl-ipc")


class ObeyingEngine(Obeying):
    """The engine rank of replica `replica`."""

    def __init__(self, case: Case, replica: int, place: Place) -> None:
        super().__init__(case, place)
        self.replica = replica
        self.own = EngineRank(case, replica)

    def link(self, link: EngineLink) -> None:
        self.own.link(link)

    def doom(self, parts: int, number: signal.Signals) -> None:
        """Make the rank end after that many more parts have arrived."""
        places = self.own.places
        count = 0

        def counted(part: Part) -> Any:
            nonlocal count
            count += 1
            if count == parts:
                self.place.die(number)
            return places(part)

        self.own.places = counted
        self.own.has_moved = True  # it looks up the views again

    def receive(self, seed: int) -> list[str]:
        self.own.receive()
        return self.own.differing(self.case, seed)

    def close(self) -> int:
        self.own.close()
        return num_live_communicators()


def serve_trainer(case: Case, place: Place) -> None:
    ObeyingTrainer(case, place).serve()


def serve_engine(case: Case, replica: int, place: Place) -> None:
    ObeyingEngine(case, replica, place).serve()


class World(NamedTuple):
    """The driver's view. `spares`: engines that can replace lost ones."""

    case: Case
    trainers: list[MortalRank]
    engines: dict[int, MortalRank]
    spares: dict[int, MortalRank]

    def ask(self, rank: MortalRank, *call: Any) -> Any:
        rank.tell(call)
        return rank.hear()

    def join(self, replica: int) -> None:
        routes = self.case.routes(self.case.plan(), replica, LIMIT_S)
        engine = self.engines[replica]
        addresses = [self.ask(self.trainers[listener], "listen", replica) for listener in routes.listeners]
        for sender in routes.senders:
            self.trainers[sender].tell(("join", replica, addresses))
        engine.tell(("link", replace(routes.receivers[0], addresses=addresses)))
        assert [self.trainers[sender].hear() for sender in routes.senders] == [None] * len(routes.senders)
        assert engine.hear() is None

    def push(self, seed: int, replicas: list[int], doomed: int | None = None) -> list[SendReport]:
        """Run a weight sync and return the trainers' reports.

        Engines in `doomed` are dropped when the driver has noticed their death.
        """
        for replica in replicas:
            self.engines[replica].tell(("receive", seed))
        for trainer in self.trainers:
            trainer.tell(("send", seed, replicas))
        waiting = list(self.trainers)
        reports = []
        turns = 0
        start_s = time.monotonic()

        while waiting:
            assert time.monotonic() - start_s < LIMIT_S, "a trainer waits for ever"
            turns += 1
            for trainer in list(waiting):
                answer = trainer.hear()
                if answer is not None:
                    waiting.remove(trainer)
                    reports.append(answer)
                else:
                    trainer.tell(("go_on", [doomed] if doomed is not None and turns > 1 else []))

        for replica in replicas:
            if replica != doomed:
                assert self.engines[replica].hear() == []

        return reports


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    transport, backend = request.param
    architecture = architecture_of("qwen3")
    case = Case(architecture, "qwen3", False, Cut(tensor=2), (Cut(), Cut()), transport, 3000, backend)
    functions = [partial(serve_trainer, case)] * NUM_TRAINERS + [
        partial(serve_engine, case, replica) for replica in (0, 1, 0, 1)
    ]

    with mortal_ranks(tmp_path, functions) as ranks:
        trainers = ranks[:NUM_TRAINERS]
        first = ranks[NUM_TRAINERS : NUM_TRAINERS + 2]
        again = ranks[NUM_TRAINERS + 2 :]
        made = World(case, trainers, dict(enumerate(first)), dict(enumerate(again)))
        address = None
        if transport == "device":
            address = P2PAddress(
                "trainers", "127.0.0.1", made.ask(trainers[0], "reserve"), NUM_TRAINERS, backend, LIMIT_S
            )
        for trainer in trainers:
            trainer.tell(("join_trainers", address))
        assert [trainer.hear() for trainer in trainers] == [None] * NUM_TRAINERS
        yield made
        for rank in [*trainers, *made.engines.values()]:
            assert made.ask(rank, "close") in (0, (0, 0))


KILLS = list(product(("device", "group"), ("gloo", "nccl_semantics"), (signal.SIGKILL, signal.SIGSTOP)))


@pytest.mark.parametrize(
    ("world", "number"),
    [((transport, backend), number) for transport, backend, number in KILLS],
    indirect=["world"],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "-".join(value),
)
@pytest.mark.parametrize("seed", range(int(os.environ.get("MEGARL_SOAK", "1"))))  # tests/soak asks for more
def test_an_engine_that_dies_or_hangs_is_the_only_one_lost(
    world: World, number: signal.Signals, seed: int
) -> None:
    chance = random.Random(f"{seed} {number} {world.case.transport} {world.case.backend}")
    for replica in (0, 1):
        world.join(replica)
    world.push(1, [0, 1])
    lost = chance.randrange(2)
    world.ask(world.engines[lost], "doom", chance.randrange(1, 60), number)
    reports = world.push(2, [0, 1], doomed=lost)
    assert any(lost in report.lost for report in reports)
    assert all(list(report.lost) in ([], [lost]) for report in reports)
    for trainer in world.trainers:
        assert world.ask(trainer, "leave", lost) is None
    world.engines[lost] = world.spares[lost]
    world.join(lost)  # without effect on the other engine
    world.push(2, [lost])
    world.push(3, [0, 1])
