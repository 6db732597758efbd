"""The plan of a transfer: every needed element once, from the nearest source, in bounded rounds, for all sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

import pytest
import torch

from megarl.models.architecture import Architecture
from megarl.models.counts import padded_vocab_size
from megarl.weights.manifest import manifest_of
from megarl.weights.plan import (
    RankLocation,
    RankSlices,
    TensorSlices,
    TransferPlan,
    plan_repeated,
    plan_transfer,
    whole_slices,
)
from megarl.weights.shard_layout import model_layouts
from megarl.weights.shards import slices_by_rank
from megarl.weights.tensors import Part, TensorSlice, TransferSchedule, WeightTransferError, tiling_fault
from tests.unit.weights.models import architecture_of
from tests.unit.weights.transfers import numel_of

SHAPES = {"a": (8, 6), "b": (4,), "c": (6, 10)}
WHOLE = whole_slices(SHAPES)


def rank(device: int, slices: TensorSlices, per_node: int = 8) -> RankSlices:
    node = str(device // per_node)
    return (RankLocation(node, f"{node}:{device % per_node}"), slices)


def rows(start: int, stop: int) -> TensorSlices:
    """Return the slices: rows of a and c; all of b."""
    return {
        "a": [TensorSlice((start, 0), (stop, 6))],
        "b": [TensorSlice((0,), (4,))],
        "c": [TensorSlice((start * 6 // 8, 0), (stop * 6 // 8, 10))],
    }


def columns(start: int, stop: int) -> TensorSlices:
    return {"a": [TensorSlice((0, start), (8, stop))], "c": [TensorSlice((0, start), (6, stop))]}


def check(plan: TransferPlan, targets: Sequence[RankSlices], message_numel: int) -> None:
    """Check that each needed element arrives once and that no round is too large for any rank."""
    sends: dict[tuple[int, int], int] = defaultdict(int)
    for target, (_, needed) in enumerate(targets):
        coming: dict[str, list[TensorSlice]] = defaultdict(list)
        for number in range(plan.num_rounds):
            received = 0
            for source, schedule in plan.of_target(target).schedules.items():
                parts = list(schedule.message(number))
                assert sum(part.tensor_slice.volume for part in parts) == schedule.length(number)
                received += schedule.length(number)
                sends[source, number] += schedule.length(number)
                for name, tensor_slice in parts:
                    coming[name].append(tensor_slice)
            assert received <= message_numel
        for name, slices in needed.items():
            for tensor_slice in slices:
                inside = [part for part in coming[name] if part.intersect(tensor_slice)]
                assert (
                    tiling_fault(
                        tensor_slice.shape, [part.relative_to(tensor_slice.starts) for part in inside]
                    )
                    is None
                )
        assert plan.of_target(target).numel == numel_of(needed)

    assert max(sends.values()) <= message_numel


@pytest.mark.parametrize("message_numel", [4, 7, 50, 10**6])
def test_any_cut_to_any_other(message_numel: int) -> None:
    by_rows = [rank(number, rows(4 * number, 4 * number + 4)) for number in range(2)]
    for needed in (
        [WHOLE],
        [rows(0, 2), rows(2, 7), rows(7, 8)],
        [columns(0, 2), columns(2, 6)],
        [WHOLE, columns(1, 3)],
    ):
        targets = [rank(10 + number, slices) for number, slices in enumerate(needed)]
        plan = plan_transfer(SHAPES, by_rows, targets, message_numel)
        check(plan, targets, message_numel)
        assert plan.num_rounds >= ceil(max(numel_of(slices) for slices in needed) / message_numel)


def test_the_nearest_holder_sends() -> None:
    """One copy is on the target's device, one on its node, two elsewhere."""
    sources = [rank(number, WHOLE) for number in (1, 0, 9, 17)]
    assert set(plan_transfer(SHAPES, sources, [rank(0, WHOLE)], 1000).schedules) == {(1, 0)}
    assert set(plan_transfer(SHAPES, sources, [rank(3, WHOLE)], 1000).schedules) == {(0, 0), (1, 0)}
    assert set(plan_transfer(SHAPES, sources, [rank(12, WHOLE)], 1000).schedules) == {(2, 0)}
    assert {source for source, _ in plan_transfer(SHAPES, sources, [rank(99, WHOLE)], 1000).schedules} == {
        0,
        1,
        2,
        3,
    }


@pytest.mark.parametrize("num_copies", [2, 3, 5])
@pytest.mark.parametrize("num_targets", [1, 2, 4])
def test_equal_copies_share_the_work(num_copies: int, num_targets: int) -> None:
    sources = [rank(number, WHOLE, per_node=99) for number in range(num_copies)]
    targets = [rank(200 + number, WHOLE, per_node=99) for number in range(num_targets)]
    plan = plan_transfer(SHAPES, sources, targets, 1000)
    sent = [plan.of_source(source).numel for source in range(num_copies)]
    assert max(sent) - min(sent) <= 1
    assert sum(sent) == num_targets * numel_of(WHOLE)
    check(plan, targets, 1000)


def test_who_must_send_more_of_one_thing_sends_less_of_another() -> None:
    """Only the first has `c`, which is more than half: the second sends what both have."""
    sources = [rank(0, WHOLE), rank(1, {name: WHOLE[name] for name in ("a", "b")})]
    plan = plan_transfer(SHAPES, sources, [rank(5, WHOLE)], 1000)
    assert (plan.of_source(0).numel, plan.of_source(1).numel) == (60, 52)


def test_the_same_fraction_of_every_stream_in_each_round() -> None:
    schedule = TransferSchedule([Part("a", WHOLE["a"][0]), Part("c", WHOLE["c"][0])], num_rounds=7)
    lengths = [schedule.length(number) for number in range(7)]
    assert (sum(lengths), max(lengths) - min(lengths)) == (108, 1)


def test_what_cannot_be_planned_is_named() -> None:
    half = rows(0, 4)
    with pytest.raises(
        WeightTransferError, match=r"2 tensors cannot be sent: a: 24 needed elements.*c: 30 needed elements"
    ):
        plan_transfer(SHAPES, [rank(0, half)], [rank(1, WHOLE)], 100)

    with pytest.raises(WeightTransferError, match="d is not a tensor of the model"):
        plan_transfer(SHAPES, [rank(0, WHOLE)], [rank(1, {"d": [TensorSlice((0,), (2,))]})], 100)
    by_rows = [rank(number, rows(number, number + 1)) for number in range(8)]

    with pytest.raises(
        ValueError,
        match=r"a message of 7 elements is too small: rank 0 receives parts of 8 .*"
        r"resharding\.bucket_mb",
    ):
        plan_transfer(SHAPES, by_rows, [rank(20, WHOLE)], 7)


# ---- whole models


def of_size(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int
) -> Architecture:
    return Architecture(
        model_type=model_type,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=model_type == "qwen2",
        qk_norm=False,
    )


def shapes_of(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    return {name: meta.shape for name, meta in manifest_of(architecture, torch.float32).items()}


def cut(architecture: Architecture, tensor: int, pipeline: int = 1, data: int = 1) -> list[TensorSlices]:
    """Return slices in Megatron's rank order."""
    layouts = model_layouts(
        architecture,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        padded_vocab_size=padded_vocab_size(architecture.vocab_size, tensor),
    )
    order = [
        stage * tensor + each for stage in range(pipeline) for _ in range(data) for each in range(tensor)
    ]
    return slices_by_rank(architecture, [layouts[number] for number in order])  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("architecture", "least_gb"),
    [
        (of_size("qwen2", 28, 3584, 18944, 28, 4, 152064), 7.62),
        (of_size("llama", 80, 8192, 28672, 64, 8, 128256), 70.6),
    ],
    ids=["7B", "70B"],
)
@pytest.mark.parametrize("data", [1, 2])
def test_each_rank_of_two_engines_gets_its_half_and_no_more(
    architecture: Architecture, least_gb: float, data: int
) -> None:
    sources = [rank(number, slices) for number, slices in enumerate(cut(architecture, 4, 2, data))]
    targets = [rank(100 + number, slices) for number, slices in enumerate(cut(architecture, 2) * 2)]
    plan = plan_transfer(shapes_of(architecture), sources, targets, 2**28)
    assert [
        round(2 * plan.of_target(target).numel / 1e9, 2 if least_gb < 10 else 1) for target in range(4)
    ] == [least_gb] * 4
    sent = [plan.of_source(source).numel for source in range(len(sources))]
    assert min(sent) > 0.9 * max(sent)
    assert (
        plan.num_rounds <= 1.02 * ceil(max(plan.of_target(target).numel for target in range(4)) / 2**28) + 1
    )


def test_a_model_with_experts_is_planned_in_seconds() -> None:
    """235B: 94 layers of 128 experts with three matrices each, as synthetic slices.

    A trainer with EP 8 has two copies; engines have EP 4.
    """
    matrices = {"gate_proj": (1536, 4096), "up_proj": (1536, 4096), "down_proj": (4096, 1536)}
    layers = [f"model.layers.{layer}.mlp.experts" for layer in range(94)]
    shapes = {
        f"{layer}.{expert}.{name}": shape
        for layer in layers
        for expert in range(128)
        for name, shape in matrices.items()
    }

    def ranks(num_ranks: int, copies: int, first: int) -> list[RankSlices]:
        """Return ranks with equally many whole experts."""
        held = [
            {
                f"{layer}.{expert}.{name}": whole[name]
                for layer in layers
                for expert in range(start, start + 128 // num_ranks)
                for name in whole
            }
            for start in range(0, 128, 128 // num_ranks)
        ]
        return [rank(first + number, slices) for number, slices in enumerate(held * copies)]

    whole = {name: [TensorSlice.whole(shape)] for name, shape in matrices.items()}
    sources = ranks(8, 2, 0)
    targets = ranks(4, 2, 100)
    plan = plan_transfer(shapes, sources, targets, 2**28)
    total = sum(first * second for first, second in shapes.values())
    assert [plan.of_target(target).numel for target in range(8)] == [total // 4] * 8
    sent = [plan.of_source(source).numel for source in range(16)]
    assert min(sent) > 0.9 * max(sent)


def test_layouts_of_tiny_models_are_all_planned_exactly() -> None:
    for family, tied in (("qwen2", True), ("qwen3", False), ("llama", False)):
        architecture = architecture_of(family, tied=tied)
        for tensor, pipeline, data in ((1, 1, 1), (4, 1, 1), (2, 2, 2), (1, 2, 3)):
            sources = [
                rank(number, slices)
                for number, slices in enumerate(cut(architecture, tensor, pipeline, data))
            ]
            shapes = shapes_of(architecture)
            for needed in ([whole_slices(shapes)] * 2, cut(architecture, 2), cut(architecture, 4) * 2):
                targets = [rank(number, slices) for number, slices in enumerate(needed)]
                check(plan_transfer(shapes, sources, targets, 1500), targets, 1500)


def test_repeated_tensors_are_the_last_rounds() -> None:
    """Without the earlier rounds, the schedules contain each element of the repeated tensors once."""
    sources = [rank(0, rows(0, 4)), rank(1, rows(4, 8))]
    targets = [rank(2, columns(0, 3)), rank(3, columns(3, 6))]
    plan = plan_repeated(SHAPES, sources, targets, 7, {"a"})
    first_round = plan.first_repeated_round
    check(plan, targets, 7)
    assert 0 < first_round < plan.num_rounds

    found = {target: set[tuple[int, ...]]() for target in range(2)}
    for (_, target), schedule in plan.schedules.items():
        later = schedule.after(first_round)
        assert {part.name for part in later.parts} == {"a"}
        assert later.num_rounds == plan.num_rounds - first_round
        for number in range(later.num_rounds):
            assert later.length(number) == schedule.length(first_round + number)
            assert later.message(number) == schedule.message(first_round + number)
            for _, tensor_slice in later.message(number):
                block = torch.zeros(SHAPES["a"])
                block[tensor_slice.index] = 1
                elements = set(map(tuple, block.nonzero().tolist()))
                assert not elements & found[target]
                found[target] |= elements
    assert [len(elements) for elements in found.values()] == [24, 24]
