"""Dispatch plans and collection without Ray: who gets which rows, and whose result counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch.data_proto import DataProto
from megarl.config.schema import RankCoordinate
from megarl.controller.compat import VerlDispatch
from megarl.controller.dispatch import (
    RULES,
    Arguments,
    CallPlan,
    Collect,
    CollectKind,
    Dispatch,
    Mesh,
    collect,
    pad_dataproto_to_divisor,
    plan_call,
    route_mesh,
    unpad_dataproto,
)
from megarl.controller.futures import WorkerFuture

MESH_DP2_TP2 = tuple(RankCoordinate(dp=rank // 2, tp=rank % 2) for rank in range(4))


def rows(*values: int) -> DataProto:
    return DataProto.from_dict({"x": torch.tensor(values)})


def plan(
    mode: Dispatch | VerlDispatch, *arguments: object, mesh: Mesh = MESH_DP2_TP2, **named: object
) -> CallPlan:
    return plan_call(RULES[mode] if isinstance(mode, Dispatch) else mode.rule, mesh, arguments, named)


def received(call: CallPlan) -> list[Arguments]:
    """Return what the method of each called rank receives."""
    return [call.parts[part] for part in call.route.part_of_ranks]


def test_every_mode_has_a_rule() -> None:
    assert set(RULES) == set(Dispatch)


def test_megatron_mesh_pairs_replicas_with_parts_and_picks_the_last_stage() -> None:
    # Megatron's order for tp=2, dp=2, pp=2: tp fastest, then dp, then pp.
    mesh = tuple(RankCoordinate(dp=dp, tp=tp, pp=pp) for pp in range(2) for dp in range(2) for tp in range(2))
    route = route_mesh(mesh)
    assert route.part_of_ranks == (0, 0, 1, 1, 0, 0, 1, 1)
    assert route.results == (4, 6)
    with_context = tuple(RankCoordinate(dp=dp, cp=cp) for dp in range(2) for cp in range(2))
    assert route_mesh(with_context).results == (0, 2)


def test_a_mesh_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match="not a full grid"):
        route_mesh((RankCoordinate(0), RankCoordinate(0)))
    with pytest.raises(ValueError, match="not a full grid"):
        route_mesh((RankCoordinate(0), RankCoordinate(2)))


def test_ranks_of_a_replica_get_the_same_object() -> None:
    call = plan(Dispatch.MEGATRON_MESH, rows(0, 1, 2, 3), factor=7)
    arguments = received(call)
    assert [args[0].batch["x"].tolist() for args, _ in arguments] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert arguments[0][0][0] is arguments[1][0][0]
    assert all(named == {"factor": 7} for _, named in arguments)
    assert call.route.results == (0, 2)


@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_uneven_batches_come_back_with_their_own_rows(length: int) -> None:
    call = plan(VerlDispatch.DP_COMPUTE_PROTO, rows(*range(length)))
    parts = [args[0] for args, _ in received(call)]
    assert len({len(part) for part in parts}) == 1
    assert collect(parts, call.collect).batch["x"].tolist() == list(range(length))


def test_padding_comes_off_when_each_row_became_several() -> None:
    call = plan(Dispatch.MEGATRON_MESH, rows(5, 6, 7))
    parts = [received(call)[rank][0][0].repeat(2) for rank in call.route.results]
    assert collect(parts, call.collect).batch["x"].tolist() == [5, 5, 6, 6, 7, 7]


def test_padding_that_cannot_come_off_is_an_error() -> None:
    call = plan(Dispatch.MEGATRON_MESH, rows(5, 6, 7))
    with pytest.raises(
        ValueError,
        match="3 rows was padded by 1 to be split into 2 equal parts, but the method returns float",
    ):
        collect([0.5, 0.5], call.collect)

    with pytest.raises(
        ValueError, match="3 rows, padded to 4, resulted in 2 rows: the padding cannot be removed"
    ):
        collect([rows(5), rows(7)], call.collect)

    assert collect([0.5, 0.25], plan(Dispatch.MEGATRON_MESH, rows(5, 6)).collect) == [0.5, 0.25]


def test_a_batch_that_the_caller_split_comes_back_as_parts() -> None:
    parts = [rows(0), rows(1, 2, 3)]
    call = plan(Dispatch.MEGATRON_MESH, parts)
    assert [len(args[0]) for args, _ in received(call)] == [1, 1, 3, 3]
    assert collect(parts, call.collect) == parts
    with pytest.raises(
        ValueError, match="the caller split the batch into 2 parts, but the group has 4 replicas"
    ):
        plan(VerlDispatch.DP_COMPUTE_PROTO, parts)


def test_batches_of_one_call_are_split_alike() -> None:
    with pytest.raises(ValueError, match="split the same way; here: 4 rows, 2 rows"):
        plan(Dispatch.MEGATRON_MESH, rows(0, 1, 2, 3), rows(0, 1))
    call = plan(Dispatch.MEGATRON_MESH, rows(0, 1, 2), values=rows(5, 6, 7))
    args, named = received(call)[2]
    assert (args[0].batch["x"].tolist(), named["values"].batch["x"].tolist()) == ([2, 0], [7, 5])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="empty batch"):
        plan(VerlDispatch.DP_COMPUTE_PROTO, DataProto())


def test_rank_zero_one_to_all_and_all_to_all() -> None:
    batch = rows(1, 2)
    zero = plan(Dispatch.RANK_ZERO, batch)
    assert (zero.route.ranks, zero.collect.kind) == ((0,), CollectKind.first)
    everyone = plan(Dispatch.ONE_TO_ALL, batch)
    assert all(args[0] is batch for args, _ in received(everyone))
    assert collect([1, 2, 3, 4], everyone.collect) == [1, 2, 3, 4]
    each = plan(VerlDispatch.ALL_TO_ALL, [1, 2, 3, 4], b=["a", "b", "c", "d"])
    assert received(each)[2] == ((3,), {"b": "c"})
    with pytest.raises(ValueError, match="one value for each of the 4 ranks, not 3 values"):
        plan(VerlDispatch.ALL_TO_ALL, [1, 2, 3])
    with pytest.raises(ValueError, match="not DataProto"):
        plan(VerlDispatch.ALL_TO_ALL, batch)


def test_a_future_is_no_argument() -> None:
    with pytest.raises(ValueError, match=r"pass future.get\(\)"):
        plan(Dispatch.MEGATRON_MESH, rows(1, 2), later=WorkerFuture((), (), Collect(CollectKind.listed)))


@settings(max_examples=60, deadline=None)
@given(num_rows=st.integers(1, 9), divisor=st.integers(1, 12))
def test_padding_reaches_the_divisor_with_real_rows_and_comes_off(num_rows: int, divisor: int) -> None:
    batch = rows(*range(num_rows))
    padded, pad_size = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert padded.batch["x"].tolist() == [row % num_rows for row in range(num_rows + pad_size)]
    assert unpad_dataproto(padded, pad_size).batch["x"].tolist() == list(range(num_rows))


def test_an_empty_batch_cannot_be_padded() -> None:
    with pytest.raises(ValueError, match="empty batch"):
        pad_dataproto_to_divisor(DataProto(), 2)
