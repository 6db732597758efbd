"""Every transport delivers every element, bitwise identical, to every engine rank that needs it, and no others."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megarl.machine.usage import PeakMemory, trim_heap
from megarl.weights.shard_layout import shard_shapes
from megarl.weights.shards import Shards
from megarl.weights.transfer import SendReport
from tests.nccl_communicator import num_live_communicators
from tests.unit.weights.models import architecture_of
from tests.unit.weights.transfers import (
    CPU,
    Case,
    Cut,
    EngineRank,
    TrainerRank,
    join,
    numel_of,
    trainers_group,
)

TRAINERS = {
    "TP1": Cut(),
    "TP2xEP2": Cut(tensor=2, expert=2),
    "PP2": Cut(pipeline=2),
    "PP2xVPP2": Cut(pipeline=2, virtual=2),
    "DP2xETP2": Cut(data=2, expert_tensor=2),
}
FAMILIES = [("qwen2", True), ("llama", False), ("qwen3_moe", False)]


class Result(NamedTuple):
    differing: list[str]
    received: list[int]
    reports: list[SendReport]


def transfer(case: Case, seeds: tuple[int, ...] = (1, 2)) -> Result:
    """Sync each seed's model to all engines."""
    rank = dist.get_rank()
    num_trainers = case.trainer.num_ranks
    plan = case.plan()
    p2p = trainers_group(case)
    own = TrainerRank(case, plan, rank, p2p) if rank < num_trainers else EngineRank(case, rank - num_trainers)
    replicas = list(range(len(case.engines)))
    for replica in replicas:
        join(case, plan, own, replica)
    result = Result([], [], [])

    for seed in seeds:
        if isinstance(own, TrainerRank):
            result.reports.append(own.send(seed, replicas))
        else:
            result.received.append(own.receive())
            result.differing.extend(own.differing(case, seed))

    dist.barrier()
    own.close()
    assert num_live_communicators() == 0

    return result


@pytest.mark.parametrize("transport", ["group", "device"])
@pytest.mark.parametrize(
    "engines", [(Cut(),), (Cut(tensor=2, expert_tensor=2),), (Cut(), Cut())], ids=["whole", "TP2", "two"]
)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_element_arrives_where_it_is_needed(
    rank_pool, trainer: str, engines: tuple[Cut, ...], transport: str
) -> None:
    cut = TRAINERS[trainer]
    num_engine_ranks = sum(engine.num_ranks for engine in engines)

    if transport == "device" and num_engine_ranks > cut.num_ranks:
        # refused by the placement: see test_transport.py
        pytest.skip("an engine rank has no trainer rank on its device")

    cases = [
        (family, tied, message_numel, "gloo")
        for (family, tied), message_numel in zip(FAMILIES, (500, 3000, 10**6), strict=True)
    ]
    for family, tied, message_numel, backend in [*cases, ("qwen3", False, 2000, "nccl_semantics")]:
        architecture = architecture_of(family, tied=tied)
        case = Case(architecture, family, tied, cut, engines, transport, message_numel, backend)
        results = rank_pool.run(transfer, world_size=case.num_ranks, case=case)
        for target, result in enumerate(results[cut.num_ranks :]):
            assert result.differing == []
            assert result.received == [4 * numel_of(case.needed(target))] * 2
        sent = [report.nbytes for result in results[: cut.num_ranks] for report in result.reports]
        assert sum(sent) == 2 * sum(4 * numel_of(case.needed(target)) for target in range(num_engine_ranks))
        for result in results[: cut.num_ranks]:
            assert all(report.planned_extra_bytes <= 6 * 4 * message_numel for report in result.reports)


def measured(case: Case) -> list[int]:
    """Return the extra bytes of a trainer rank in two passes, or of an engine rank's receive buffer.

    A pass before them allocates what is kept.
    """
    rank = dist.get_rank()
    num_trainers = case.trainer.num_ranks
    plan = case.plan()
    p2p = trainers_group(case)

    if rank < num_trainers:
        own: TrainerRank | EngineRank = TrainerRank(case, plan, rank, p2p)
        layout = case.trainer.layouts(case.architecture, case.padded_vocab)[rank]
        parameters = {
            name: torch.ones(shape) for name, shape in shard_shapes(case.architecture, layout).items()
        }
        shards = Shards(parameters=parameters, architecture=case.architecture, layout=layout)
    else:
        own = EngineRank(case, rank - num_trainers)
        for tensors in own.tensors.values():
            for tensor in tensors:
                tensor.zero_()

    join(case, plan, own, 0)
    extra = []

    for turn in range(3):
        dist.barrier()
        if turn == 2 and isinstance(own, TrainerRank):
            own.end.release()
        # An earlier test in this process may have told glibc to keep freed memory, which a pass would reuse.
        trim_heap()
        peak = PeakMemory(CPU)
        if isinstance(own, TrainerRank):
            sending = own.end.open(shards, [0])
            while not sending.run():
                pass
        else:
            own.receive()
        extra.append(peak.extra_bytes())
        dist.barrier()

    own.close()
    return extra


@pytest.mark.parametrize(
    ("transport", "trainer", "engine"), [("group", 1, 2), ("group", 2, 1), ("device", 2, 2)]
)
def test_memory_as_measured_is_at_most_two_messages_each_way(
    rank_pool, transport: str, trainer: int, engine: int
) -> None:
    """A 130 MB model, a third of it sharded along columns, which the side with fewer ranks packs or unpacks.

    The first pass allocates what is kept, the second reuses it, and the third follows its release.
    """
    architecture = replace(architecture_of("qwen3", num_layers=1), intermediate_size=10_000, hidden_size=1024)
    message_bytes = 16 * 2**20 if transport == "group" else 8 * 2**20  # with four IPC buffers
    case = Case(
        architecture,
        "qwen3",
        False,
        Cut(tensor=trainer),
        (Cut(tensor=engine),),
        transport,
        message_bytes // 4,
    )
    slack = 4 * 2**20  # for gloo and the interpreter
    results = rank_pool.run(measured, world_size=case.num_ranks, case=case)

    for number, extra in enumerate(results):
        # The IPC buffers are mapped by both sides.
        most = (4 if transport == "device" else 2) * message_bytes
        assert max(extra) <= most + slack, (number, extra)

    assert max(results[0 if trainer <= engine else -1]) > message_bytes  # it measures
