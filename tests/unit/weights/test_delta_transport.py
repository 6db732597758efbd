"""Patches leave every engine rank with the bits of a full transfer, in all layouts, whoever has what before."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch.distributed as dist

from megarl.weights.transfer import SendReport
from tests.nccl_communicator import num_live_communicators
from tests.unit.weights.models import architecture_of
from tests.unit.weights.transfers import Case, Cut, EngineRank, TrainerRank, join, numel_of, trainers_group

HEADER_BYTES = 16


class Step(NamedTuple):
    """A transfer of the version `seed` to some replicas.

    Attributes:
        forgotten: Replicas that need everything, since they no longer have their weights.
        joins_again: Replicas that are replaced before.
    """

    seed: int
    replicas: tuple[int, ...]
    forgotten: tuple[int, ...] = ()
    joins_again: tuple[int, ...] = ()


class Result(NamedTuple):
    differing: list[list[str]]
    received: list[int]
    reports: list[SendReport]


def transfer(case: Case, steps: tuple[Step, ...]) -> Result:
    rank = dist.get_rank()
    num_trainers = case.trainer.num_ranks
    plan = case.plan()
    p2p = trainers_group(case)
    own = TrainerRank(case, plan, rank, p2p) if rank < num_trainers else EngineRank(case, rank - num_trainers)
    for replica in range(len(case.engines)):
        join(case, plan, own, replica)
    result = Result([], [], [])

    for step in steps:
        for replica in step.joins_again:
            if isinstance(own, TrainerRank):
                own.end.leave(replica)
            elif own_replica(case, rank - num_trainers) == replica:
                own.close()
                own = EngineRank(case, rank - num_trainers)
            join(case, plan, own, replica)
        if isinstance(own, TrainerRank):
            for replica in step.forgotten:
                own.end.forget_weights(replica)
            result.reports.append(own.send(step.seed, step.replicas))
        elif own_replica(case, rank - num_trainers) in step.replicas:
            result.received.append(own.receive())
            result.differing.append(own.differing(case, step.seed))

    dist.barrier()
    own.close()
    assert num_live_communicators() == 0
    return result


def own_replica(case: Case, target: int) -> int:
    return next(number for number, ranks in enumerate(case.engine_ranks) if target in ranks)


LAYOUTS = {
    "TP2": ("qwen2", True, Cut(tensor=2), (Cut(),)),
    "PP2": ("llama", False, Cut(pipeline=2), (Cut(),)),
    "EP2": ("qwen3_moe", False, Cut(tensor=2, expert=2), (Cut(),)),
    "DP2": ("qwen3", False, Cut(data=2), (Cut(), Cut())),
    "engine TP2": ("llama", False, Cut(), (Cut(tensor=2, expert_tensor=2),)),
}


@pytest.mark.parametrize("backend", ["gloo", "nccl_semantics"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_what_changed_is_sent(rank_pool, layout: str, backend: str) -> None:
    family, tied, trainer, engines = LAYOUTS[layout]
    case = Case(
        architecture_of(family, tied=tied),
        family,
        tied,
        trainer,
        engines,
        "delta",
        2000,
        backend,
        changed_share=0.01,
    )
    everyone = tuple(range(len(engines)))
    # The last version is sent twice.
    steps = tuple(Step(seed, everyone) for seed in (1, 2, 4, 4))
    results = rank_pool.run(transfer, world_size=case.num_ranks, case=case, steps=steps)

    for target, result in enumerate(results[trainer.num_ranks :]):
        assert result.differing == [[]] * 4
        full, first, second, nothing = result.received
        whole = 4 * numel_of(case.needed(target))
        assert whole < full < 1.05 * whole
        # 1 and about 2 % of the elements, with their positions, padding, and tables of small chunks
        assert 0.01 * whole < first < 0.05 * whole
        assert first < second < 0.07 * whole
        assert nothing < 0.015 * whole

    reports = [result.reports for result in results[: trainer.num_ranks]]
    for number in range(4):
        received = sum(result.received[number] for result in results[trainer.num_ranks :])
        assert sum(each[number].nbytes for each in reports) == received
        assert sum(each[number].full_bytes for each in reports) == sum(
            4 * numel_of(case.needed(target)) for target in range(case.num_ranks - trainer.num_ranks)
        )


def test_everything_is_sent_to_those_that_do_not_have_the_last_weights(rank_pool) -> None:
    """Of two engines, one sleeps, one is replaced, and each is left out once."""
    case = Case(
        architecture_of("llama", tied=False),
        "llama",
        False,
        Cut(),
        (Cut(), Cut()),
        "delta",
        3000,
        changed_share=0.01,
    )
    both = (0, 1)
    steps = (
        Step(1, both),
        Step(2, both),
        Step(3, (0,)),  # 0 gets changes
        Step(3, (1,)),  # 1 has version 2: everything
        Step(4, both),  # changes
        Step(5, (0,)),  # changes
        Step(5, (1,), forgotten=(1,)),  # everything, to an engine that slept
        Step(6, both),  # changes
        Step(6, (1,), joins_again=(1,)),  # everything, to a replacement
        Step(7, both),  # changes
        Step(9, (1,)),  # changes, two versions further
        Step(9, both),  # one has them, so that both get everything
        Step(10, both),  # changes
    )
    trainer, *engines = rank_pool.run(transfer, world_size=3, case=case, steps=steps)
    whole = 4 * numel_of(case.needed(0))
    got_all = [[received > 0.9 * whole for received in result.received] for result in engines]
    assert got_all[0] == [True, *[False] * 6, True, False]
    assert got_all[1] == [True, False, True, False, True, False, True, False, False, True, False]
    assert [result.differing for result in engines] == [[[]] * 9, [[]] * 11]
    assert [report.full_bytes for report in trainer.reports] == [whole * len(step.replicas) for step in steps]
