"""Compare what ranks send in block-scaled FP8 with whole tensors quantized in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import Architecture
from megarl.models.fp8 import BLOCK, quantized_tensors, scale_name
from megarl.models.tensor_table import hf_tensors
from megarl.weights.block_scaling import QuantizedShards
from megarl.weights.checksum import MODULUS, add_checksums, checksum
from megarl.weights.message_words import (
    byte_counts,
    pushed_shapes,
    shape_in_words,
    slices_in_words,
    with_all_scales,
    with_own_scales,
    word_counts,
)
from megarl.weights.plan import RankLocation, plan_transfer, whole_slices
from megarl.weights.shard_layout import held_weights, layouts_of, pieces
from megarl.weights.shards import Shards, held_slices
from tests.families import example_architecture

Tensors = dict[str, torch.Tensor]
# The sizes of no family are multiples of the block, and those of shards are not either.
DENSE = {"hidden_size": 192, "intermediate_size": 344, "head_dim": 40}
MOE = {"hidden_size": 192, "moe_intermediate_size": 88, "head_dim": 40}
CASES = {
    "dense": ("qwen3", DENSE, ParallelConfig()),
    "TP2": ("qwen3", DENSE, ParallelConfig(tensor_parallel_size=2)),
    "TP2 PP2": ("llama", DENSE, ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)),
    "EP2": ("qwen3_moe", MOE, ParallelConfig(tensor_parallel_size=2, expert_parallel_size=2)),
    "ETP2": ("qwen3_moe", MOE, ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=2)),
}


@cache
def architecture_of(case: str) -> Architecture:
    family, changes, _ = CASES[case]
    return example_architecture(family, **changes)


@cache
def state_of(case: str) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    tensors = hf_tensors(architecture_of(case), "lm")
    return {each.name: (torch.randn(each.shape, generator=generator) * 0.02).bfloat16() for each in tensors}


def quantized_by_hand(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a whole matrix block by block, with float64 quotients."""
    rows, columns = tensor.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            where = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            block = tensor[where].double()
            scales[row, column] = (block.abs().max() / 448.0).float()
            values[where] = (block / scales[row, column].double()).float().to(torch.float8_e4m3fn)
    return values, scales


def dequantized_by_hand(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return values.float() * wide


@cache
def expected(case: str) -> Tensors:
    found: Tensors = {}
    for name, tensor in state_of(case).items():
        found[name] = tensor
        if name in quantized_tensors(architecture_of(case)):
            found[name], found[scale_name(name)] = quantized_by_hand(tensor)
    return found


def plain_shards(case: str) -> list[Shards]:
    """Return the shards of all ranks before they are quantized."""
    architecture = architecture_of(case)
    found = []
    for layout in layouts_of(architecture, CASES[case][2]):
        parameters: Tensors = {}
        for weight in held_weights(architecture, layout, "lm"):
            for piece in pieces(weight, layout):
                if weight.megatron_name not in parameters:
                    parameters[weight.megatron_name] = torch.zeros(piece.shard_view, dtype=torch.bfloat16)
                view = parameters[weight.megatron_name].view(piece.shard_view)
                view[piece.shard.index] = state_of(case)[piece.hf_name].view(piece.hf_view)[piece.hf.index]
        found.append(Shards(parameters=parameters, architecture=architecture, layout=layout))
    return found


@cache
def ranks_of(case: str) -> list[QuantizedShards]:
    """Return the shards of all ranks, with the maxima of blocks over all of them."""
    # The first pass collects each rank's maxima; the second one gets the maximum over the ranks.
    maxima: list[torch.Tensor] = []
    for each in plain_shards(case):
        QuantizedShards(each, lambda flat: maxima.append(flat.clone()))
    over_ranks = torch.stack(maxima).amax(0)
    return [QuantizedShards(each, lambda flat: flat.copy_(over_ranks)) for each in plain_shards(case)]


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_scales_equal_those_of_whole_tensors(case: str) -> None:
    architecture = architecture_of(case)
    quantized = quantized_tensors(architecture)
    shapes = {name: tuple(tensor.shape) for name, tensor in state_of(case).items()}
    pushed = pushed_shapes(shapes, quantized)
    counts = byte_counts(pushed, quantized, 2, word_counts(architecture, 2))
    in_bytes = {name: shape_in_words(shape, counts.get(name, 1)) for name, shape in pushed.items()}

    # Messages are small, so that parts end inside blocks, rows and elements.
    place = RankLocation("node", "device")
    layouts = layouts_of(architecture, CASES[case][2])
    held = [with_all_scales(held_slices(architecture, layout), quantized) for layout in layouts]
    needed = with_own_scales(whole_slices(shapes), quantized)
    sources = [(place, slices_in_words(each, counts)) for each in held]
    target = (place, slices_in_words(needed, counts))
    plan = plan_transfer(in_bytes, sources, [target], 50_001)

    received = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in in_bytes.items()}
    for (source, _), schedule in plan.schedules.items():
        for number in range(schedule.num_rounds):
            for part in schedule.message(number):
                regions = [each.reshape(-1) for each in ranks_of(case)[source].regions(part)]
                values = torch.cat(regions).view(part.tensor_slice.shape)
                received[part.name][part.tensor_slice.index] = values

    assert received.keys() == expected(case).keys()
    assert len(quantized) > 0
    for name, tensor in expected(case).items():
        assert torch.equal(received[name], tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("case", CASES)
def test_checksums_are_those_of_the_engines_bytes(case: str) -> None:
    parts = [
        rank.checksums(dense=True, experts=True, scales=number == 0)
        for number, rank in enumerate(ranks_of(case))
    ]
    # Without data parallelism, every element has one source.
    found = add_checksums(parts)
    assert found == {name: checksum(tensor.contiguous()) % MODULUS for name, tensor in expected(case).items()}


def test_a_ranks_own_maximum_is_not_that_of_the_tensor() -> None:
    first = ranks_of("TP2")[0]
    name = next(name for name in quantized_tensors(architecture_of("TP2")) if "down_proj" in name)
    own = QuantizedShards(plain_shards("TP2")[0], lambda flat: None)
    assert not torch.equal(own.scales(name), first.scales(name))


def test_a_dequantized_tensor_is_quantized_to_the_same_bytes() -> None:
    name = next(iter(quantized_tensors(architecture_of("dense"))))
    values, scales = expected("dense")[name], expected("dense")[scale_name(name)]
    rows, columns = values.shape
    wide = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    again, _ = quantized_by_hand((values.float() * wide).bfloat16())
    assert torch.equal(again.view(torch.uint8), values.view(torch.uint8))
