"""Mistakes that would fail on a GPU, planted into the engine, are found by a dry run and named with their line."""

from __future__ import annotations

import re

import pytest

from megarl.config.schema import ParallelConfig
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs, rounded_sums
from megarl.rehearse.dry_run.record import RankRecord
from megarl.weights.tensors import Part, PeerTransfers, TensorSlice, TransferSchedule
from tests.unit.rehearse.dry_run import planted
from tests.unit.rehearse.dry_run.runs import SMALL, TINY, ppo, requests, save_config

PAIR = ParallelConfig(tensor_parallel_size=2)
REPLICAS = ParallelConfig(data_parallel_size=2)
STAGES = ParallelConfig(pipeline_parallel_size=2)
# (64, 64), of which the second rank holds the last 32 rows.
QUERIES = "model.layers.1.self_attn.q_proj.weight"
PARTS = [Part(QUERIES, TensorSlice((0, 0), (32, 64))), Part(QUERIES, TensorSlice((32, 0), (48, 64)))]
SENDS = PeerTransfers({0: TransferSchedule(PARTS)})
# Name of the change, layout, ranks.
PLANTED = (
    ("weight_of_the_head_on_the_host", ParallelConfig(), [0]),
    ("another_order_on_rank_one", PAIR, [0, 1]),
    ("another_order_between_groups_on_rank_one", PAIR, [0, 1]),
    ("a_number_that_nobody_knows", ParallelConfig(), [0]),
    ("a_call_less_on_rank_one", REPLICAS, [0, 1]),
    ("gradients_in_sixteen_bits", REPLICAS, [0]),
    ("a_token_less_from_the_first_stage", STAGES, [0, 1]),
    ("another_shape_than_the_layout", ParallelConfig(), [0]),
    ("too_small_a_device", SMALL, [0]),
    ("a_push_of_what_another_rank_holds", PAIR, [0]),
)

pytestmark = pytest.mark.usefixtures("forked_rehearsals")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankRecord]]:
    """Run all in one process, one rank at a time, so that records arrive in request order."""
    folder = tmp_path_factory.mktemp("models")
    asked = []

    for name, parallel, ranks in PLANTED:
        device_gb = 240_000 / 2**30 if name == "too_small_a_device" else None
        sends = SENDS if name == "a_push_of_what_another_rank_holds" else None
        config = ppo(save_config(folder / name, TINY), parallel, device_gb=device_gb)
        asked += [request._replace(sends=sends) for request in requests(config, ranks)]

    records = list(rehearse_ranks(asked, 1, planted.make_ready_with_mistakes))
    return {name: [records.pop(0) for _ in ranks] for name, _, ranks in PLANTED}


def test_a_tensor_of_the_host_in_a_product_on_the_device(found: dict[str, list[RankRecord]]) -> None:
    (record,) = found["weight_of_the_head_on_the_host"]
    assert record.error is not None
    assert "at least two devices, cuda:0 and cpu" in record.error
    assert "at megarl/engine/cpu_kernels.py:" in record.error
    assert [phase.name for phase in record.phases] == ["build"]


def test_a_number_that_is_read_and_cannot_be_known(found: dict[str, list[RankRecord]]) -> None:
    (record,) = found["a_number_that_nobody_knows"]
    assert record.error is not None
    assert record.error.startswith(
        "a number (torch.int64) is read that is not computed from host numbers, at "
        "tests/unit/rehearse/dry_run/planted.py:"
    )


def test_collectives_in_another_order_on_one_rank(found: dict[str, list[RankRecord]]) -> None:
    records = found["another_order_on_rank_one"]
    assert [record.error for record in records] == [None, None]
    (problem,) = hangs(records)
    assert problem.startswith("a hang in TENSOR_MODEL_PARALLEL_GROUP of ranks 0, 1: call ")
    assert "rank 0 is all_reduce of 3 float32 at tests/unit/rehearse/dry_run/planted.py:" in problem
    assert "of rank 1 all_reduce of 5 float32 at tests/unit/rehearse/dry_run/planted.py:" in problem


def test_collectives_in_another_order_between_groups(found: dict[str, list[RankRecord]]) -> None:
    """Within each group, both ranks make the same calls."""
    records = found["another_order_between_groups_on_rank_one"]
    assert [record.error for record in records] == [None, None]
    (problem,) = hangs(records)
    line = r"all_reduce of 3 float32 in {} at tests/unit/rehearse/dry_run/planted\.py:\d+ planted"
    assert re.fullmatch(
        "a hang, because the order of calls differs between groups: "
        f"rank 0 in {line.format('TENSOR_MODEL_PARALLEL_GROUP')} waits for rank 1 in "
        f"{line.format('default_pg')}",
        problem,
    )


def test_a_collective_that_one_rank_leaves_out(found: dict[str, list[RankRecord]]) -> None:
    problems = hangs(found["a_call_less_on_rank_one"])
    assert any(
        "of rank 0 is reduce_scatter of " in problem and "of rank 1 all_gather" in problem
        for problem in problems
    )


def test_gradients_that_are_summed_in_a_reduced_type(found: dict[str, list[RankRecord]]) -> None:
    records = found["gradients_in_sixteen_bits"]
    assert records[0].error is None
    (problem,) = rounded_sums(records)
    assert problem.startswith(
        "gradients are summed over 2 data-parallel ranks in bfloat16, not in float32, at megatron/core/"
    )


def test_a_shape_that_differs_between_stages(found: dict[str, list[RankRecord]]) -> None:
    records = found["a_token_less_from_the_first_stage"]
    problems = [
        problem
        for problem in hangs(records)
        if "messages" in problem and "rank 0 is send of 32,704 bfloat16" in problem
    ]
    assert (
        "of rank 1 recv of 32,768 bfloat16 at megatron/core/pipeline_parallel/p2p_communication.py:"
        in problems[0]
    )


def test_a_parameter_of_another_size_than_the_layout_has(found: dict[str, list[RankRecord]]) -> None:
    (record,) = found["another_shape_than_the_layout"]
    assert record.error is not None
    assert (
        "decoder.layers.0.input_layernorm.weight has shape (65,), but the layout implies (64,)"
        in record.error
    )


def test_memory_beyond_the_device(found: dict[str, list[RankRecord]]) -> None:
    """The parameters (47,360 bytes) and gradients (94,720) fit; the optimizer state (142,080) does not."""
    (record,) = found["too_small_a_device"]
    assert record.error is not None
    assert " KiB would be allocated on a device that has 234.38 KiB, " in record.error
    assert "at megarl/engine/optimizer.py:" in record.error or "at megatron/core/optimizer/" in record.error
    assert record.phases == ()


def test_a_push_of_what_the_rank_does_not_hold(found: dict[str, list[RankRecord]]) -> None:
    (record,) = found["a_push_of_what_another_rank_holds"]
    assert record.error is not None
    assert record.error.startswith(
        f"a weight sync sends 1,024 elements of {QUERIES} as torch.bfloat16, but this rank does not hold ["
    )
    assert record.error.endswith(f"] of {QUERIES}")
    assert record.phases[-1].name == "offload"
