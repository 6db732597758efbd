"""Messages with patches are bounded, and those that do not fit their schedule are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megarl.config.schema import ParallelConfig
from megarl.models.architecture import LoRA
from megarl.models.fp8 import quantized_tensors
from megarl.models.tensor_table import hf_tensors
from megarl.weights import patch
from megarl.weights.block_scaling import QuantizedShards
from megarl.weights.message_words import byte_counts, pushed_shapes, slices_in_words, with_all_scales
from megarl.weights.patch import (
    AcknowledgedWeights,
    most_message_bytes,
    patch_chunks,
    read_message,
)
from megarl.weights.shard_layout import layouts_of, shard_shapes
from megarl.weights.shards import Shards, held_slices, merged_shards
from megarl.weights.tensors import Part, TensorSlice, TransferSchedule, WeightTransferError
from tests.families import example_architecture

# 1,000 elements of a matrix and 40 of a vector, in rounds of 260 elements
SCHEDULE = TransferSchedule(
    [Part("matrix", TensorSlice((0, 0), (50, 20))), Part("vector", TensorSlice((0,), (40,)))], num_rounds=4
)


class Model:
    """A model on the trainer's side, and what its messages make of an engine's copy."""

    def __init__(self) -> None:
        self.flat = torch.arange(1040.0)
        self.copy = torch.zeros(1040)
        self.weights = AcknowledgedWeights(SCHEDULE, torch.float32)
        self.buffer = torch.empty(self.weights.capacity, dtype=torch.uint8)

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        matrix = self.flat[:1000].view(50, 20)
        yield (matrix if part.name == "matrix" else self.flat[1000:])[part.tensor_slice.index]

    def transfer(self, *replicas: int) -> list[int]:
        """Return the bytes of each message."""
        self.weights.begin(replicas)
        sizes = []
        first = 0
        while not self.weights.is_complete:
            message = self.weights.next_message(self.buffer, self.regions, are_computed=False)
            data, num_patches = message
            sizes.append(len(data))
            for chunk, change in read_message(message, self.weights.chunks, first, torch.float32):
                start = self.weights.chunks.bounds[chunk]
                if change is None:
                    continue
                positions, values = change
                if positions is None:
                    self.copy[start : start + len(values)] = values
                else:
                    self.copy[start + positions] = values
            first += num_patches
        self.weights.end(replicas)
        return sizes


def test_messages_have_the_size_of_rounds_and_few_changes_take_one() -> None:
    assert patch_chunks(SCHEDULE).bounds == [0, 260, 520, 780, 1040]
    assert most_message_bytes(SCHEDULE, 4) == 260 * 4 + 8 * 4
    model = Model()
    # a chunk and a row of the table in each message
    assert model.transfer(0) == [260 * 4 + 8] * 4
    assert torch.equal(model.copy, model.flat)

    assert model.transfer(0) == [4 * 8]
    model.flat[300] = -0.0
    # a position below 260 in two bytes, padded, and a value, padded
    assert model.transfer(0) == [4 * 8 + 8 + 8]
    assert torch.equal(model.copy, model.flat)


def test_many_chunks_are_spread_over_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "MOST_PATCHES", 3)
    model = Model()
    model.transfer(0)
    assert model.transfer(0) == [3 * 8, 8]


def test_replicas_with_the_current_copy_are_listed() -> None:
    model = Model()
    model.transfer(0, 1)
    assert model.weights.holders == {0, 1}
    model.transfer(0)  # nothing changed
    assert model.weights.holders == {0, 1}
    model.flat[7] = -1.0
    model.weights.begin([0])
    assert model.weights.holders == set()  # as long as it is under way
    model.transfer(0)
    assert model.weights.holders == {0}
    model.transfer(1)
    assert model.weights.holders == {0, 1}
    model.weights.begin([0])
    model.weights.forget(1)
    model.transfer(0)
    assert model.weights.holders == {0}


def test_a_message_that_does_not_fit_is_refused() -> None:
    model = Model()
    model.weights.begin([0])
    message = model.weights.next_message(model.buffer, model.regions, are_computed=False)
    data, _ = message
    chunks = model.weights.chunks
    with pytest.raises(
        WeightTransferError, match="1 patches, the first for chunk 4, does not fit .* 4 chunks"
    ):
        list(read_message(message, chunks, 4, torch.float32))
    with pytest.raises(WeightTransferError, match="the patch of chunk 0 does not fit into its message"):
        list(read_message((data[-8:], 1), chunks, 0, torch.float32))


@pytest.mark.parametrize("quantizes", [False, True], ids=["merged", "fp8"])
def test_patches_after_a_transform_are_those_of_full_messages(quantizes: bool) -> None:
    """A trained adapter changes all elements of its matrix as sent; in FP8, most stay the same."""
    lora = None if quantizes else LoRA(rank=2, alpha=4, targets=("q_proj",))
    architecture = replace(example_architecture("qwen3", hidden_size=192, intermediate_size=344), lora=lora)
    (layout,) = layouts_of(architecture, ParallelConfig())
    generator = torch.Generator().manual_seed(1)
    parameters = {
        name: (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in shard_shapes(architecture, layout, "lm").items()
    }

    def sent() -> Shards | QuantizedShards:
        merged = merged_shards(parameters, architecture, layout, "lm")
        return QuantizedShards(merged, lambda maxima: None) if quantizes else merged

    base = architecture.base
    held = held_slices(base, layout)
    dtype = sent().dtype
    if quantizes:
        quantized = quantized_tensors(base)
        shapes = pushed_shapes({each.name: each.shape for each in hf_tensors(base, "lm")}, quantized)
        held = slices_in_words(with_all_scales(held, quantized), byte_counts(shapes, quantized, 2, {}))
    schedule = TransferSchedule([Part(name, each) for name, slices in held.items() for each in slices], 7)
    weights = AcknowledgedWeights(schedule, dtype)
    buffer = torch.empty(weights.capacity, dtype=torch.uint8)
    copy = torch.zeros(schedule.numel, dtype=dtype)
    sizes = []

    for _ in range(3):
        shards = sent()
        weights.begin([0])
        first = num_bytes = 0
        while not weights.is_complete:
            message = weights.next_message(buffer, shards.regions, shards.are_computed)
            data, num_patches = message
            num_bytes += len(data)
            for chunk, change in read_message(message, weights.chunks, first, dtype):
                start, stop = weights.chunks.bounds[chunk : chunk + 2]
                if change is not None:
                    positions, values = change
                    copy[start:stop][slice(None) if positions is None else positions] = values
            first += num_patches
        weights.end([0])
        sizes.append(num_bytes / weights.num_bytes)
        whole = torch.cat([region.reshape(-1) for part in schedule.parts for region in shards.regions(part)])
        assert torch.equal(copy.view(torch.uint8), whole.view(torch.uint8))

        # A step of training: of adapters, or of all weights, of which bfloat16 rounds most away.
        for name, parameter in parameters.items():
            if quantizes or ".lora." in name:
                step = torch.randn(parameter.shape, generator=generator) * 1e-5
                parameter.copy_(parameter.float() + step * (100 if not quantizes else 1))

    assert 1 < sizes[0] < 1.01
    assert all(0.001 < size < 0.5 for size in sizes[1:]), sizes
