"""Test which ranks are simulated, and which sequences of calls would hang."""

from __future__ import annotations

import re

import pytest

from megarl.config.schema import ParallelConfig
from megarl.rehearse.dry_run.ranks import chosen_ranks, distinct_ranks, hangs, rounded_sums
from megarl.rehearse.dry_run.record import Collective, PhaseRecord, RankRecord


def record(rank: int, *calls: Collective) -> RankRecord:
    phase = PhaseRecord(name="train", held=0, peak=0, flops=0, collectives=calls, host_syncs=())
    return RankRecord(
        rank=rank,
        tensor_rank=0,
        context_rank=0,
        pipeline_rank=0,
        data_rank=0,
        num_parameters=0,
        phases=(phase,),
    )


def call(
    kind: str = "all_reduce",
    ranks: tuple[int, ...] = (0, 1),
    dtype: str = "float32",
    elements: int = 8,
    line: int = 1,
) -> Collective:
    return Collective(
        kind,
        "DATA_PARALLEL_GROUP",
        ranks,
        dtype,
        elements,
        4 * elements,
        f"megarl/engine/engine.py:{line} step",
    )


def test_one_rank_of_the_first_the_second_and_the_last_stage() -> None:
    assert distinct_ranks(
        ParallelConfig(tensor_parallel_size=8, pipeline_parallel_size=4, data_parallel_size=4)
    ) == [0, 32, 96]
    assert distinct_ranks(ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)) == [0, 2]
    assert distinct_ranks(ParallelConfig(data_parallel_size=4)) == [0]


def test_ranks_are_named_all_or_distinct() -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert chosen_ranks("all", parallel) == [0, 1, 2, 3]
    assert chosen_ranks("distinct", parallel) == [0, 2]
    assert chosen_ranks("3,0,3", parallel) == [0, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [("first", "must be distinct, all, or"), ("0,4", "the role has 4 ranks, from 0 to 3")],
)
def test_other_ranks_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chosen_ranks(text, ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2))


def test_the_same_calls_do_not_hang_whatever_a_rank_does_in_other_groups() -> None:
    other = call(ranks=(1, 3))
    assert hangs([record(0, call(), call("all_gather")), record(1, call(), other, call("all_gather"))]) == []


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        (
            call("all_reduce"),
            call("all_gather", line=2),
            "rank 0 is all_reduce of 8 float32 at megarl/engine/engine.py:1 step, but of rank 1 all_g",
        ),
        (call(dtype="float32"), call(dtype="bfloat16"), "8 float32 .* 8 bfloat16"),
        (call(elements=8), call(elements=1024), "of 8 float32 .* of 1,024 float32"),
        (call(), None, "rank 0 is all_reduce .* of rank 1 none"),
    ],
)
def test_a_call_that_differs_is_named_with_both_places(
    mine: Collective, theirs: Collective | None, said: str
) -> None:
    (problem,) = hangs([record(0, call(), mine), record(1, call(), *([theirs] if theirs else []))])
    assert problem.startswith("a hang in DATA_PARALLEL_GROUP of ranks 0, 1: call 2 of ")
    assert re.search(said, problem)


def test_messages_are_compared_from_sender_to_receiver() -> None:
    """Each direction is compared separately: within a batch, stages may use any order."""
    sent = call("send", (0, 1))
    received = call("recv", (0, 1))
    back = call("recv", (1, 0), elements=4), call("send", (1, 0), elements=4)
    batches = [[each._replace(batch=7) for each in calls] for calls in ((sent, back[0]), (back[1], received))]
    assert hangs([record(0, *batches[0]), record(1, *batches[1])]) == []
    (problem,) = hangs([record(0, sent), record(1, call("recv", (0, 1), elements=9))])
    assert "messages in DATA_PARALLEL_GROUP of ranks 0, 1: call 1 of rank 0 is send of 8 float32" in problem
    assert "of rank 1 recv of 9 float32" in problem


def test_ranks_that_were_not_rehearsed_are_not_compared() -> None:
    assert hangs([record(0, call(), call("send", (0, 5)))]) == []


def test_gradients_are_summed_in_float32() -> None:
    assert rounded_sums([record(0, call("reduce_scatter"), call("all_gather", dtype="bfloat16"))]) == []
    (problem,) = rounded_sums(
        [
            record(0, call("reduce_scatter", dtype="bfloat16")),
            record(1, call("reduce_scatter", dtype="bfloat16")),
        ]
    )
    assert problem.startswith(
        "gradients are summed over 2 data-parallel ranks in bfloat16, not in float32, at "
        "megarl/engine/engine.py:1"
    )
