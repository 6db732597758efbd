"""The checksum against a loop over Python's unlimited integers, and over partitions of a tensor.

The contributions of shards add up to the checksums of whole tensors in every layout, and a mismatch is named.
"""

import struct
from pathlib import Path

import pytest
import torch

from megarl.weights.checksum import (
    BLOCK_ELEMENTS,
    MODULUS,
    WeightMismatchError,
    add_checksums,
    checksum,
    compare_checksums,
    shard_checksums,
)
from megarl.weights.manifest import manifest_of
from megarl.weights.shards import Shards
from megarl.weights.tensors import row_major_strides
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save
from tests.unit.weights.test_load import loaded
from tests.unit.weights.transfers import Cut

MASK = MODULUS - 1


def weight(index: int) -> int:
    """Return w(i), with SplitMix64's constants and shifts that keep the sign like signed 64-bit integers."""

    def shifted(value: int, bits: int) -> int:
        signed = value - MODULUS if value >> 63 else value
        return (signed >> bits) & MASK

    mixed = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = ((mixed ^ shifted(mixed, 29)) * 0xBF58476D1CE4E5B9) & MASK
    return (mixed ^ shifted(mixed, 32)) | 1


def slow(values: list[float]) -> int:
    return (
        sum(
            struct.unpack("<i", struct.pack("<f", value))[0] * weight(index)
            for index, value in enumerate(values)
        )
        % MODULUS
    )


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 3, 4), (0,), ()])
def test_equals_a_slow_loop(shape: tuple[int, ...]) -> None:
    tensor = random(*shape)
    assert checksum(tensor) == slow(tensor.reshape(-1).tolist())


def test_equals_a_slow_loop_over_several_blocks() -> None:
    tensor = random(3, 40_000)  # a row is longer than a block
    assert checksum(tensor) == slow(tensor.reshape(-1).tolist())


@pytest.mark.parametrize("shape", [(70_000,), (3, 40_000), (40, 50, 60)])
def test_is_the_same_whatever_the_block(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random(*shape, dtype=torch.bfloat16)
    sums = set()
    for block in (1000, *BLOCK_ELEMENTS.values()):
        monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", block)
        sums |= {checksum(tensor), checksum(tensor.t().contiguous().t() if len(shape) == 2 else tensor)}
    assert len(sums) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12, 10), (200, 300), (4, 70_000)])
def test_adds_up_over_any_cut(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tensor = random(*shape, dtype=dtype)
    strides = row_major_strides(shape)
    rows = shape[0] // 4
    columns = shape[1] // 2
    parts = [
        checksum(
            tensor[row : row + rows, column : column + columns].clone(), row * shape[1] + column, strides
        )
        for row in range(0, shape[0], rows)
        for column in range(0, shape[1], columns)
    ]
    assert sum(parts) % MODULUS == checksum(tensor)
    flat = tensor.view(-1)
    assert (checksum(flat[:17]) + checksum(flat[17:], 17)) % MODULUS == checksum(tensor)
    assert checksum(tensor.t().contiguous(), 0, (1, shape[1])) == checksum(tensor)  # stored transposed


def test_sees_what_a_sum_would_not() -> None:
    tensor = random(40, 50)
    whole = checksum(tensor)
    swapped = tensor.clone()
    swapped[[3, 9]] = tensor[[9, 3]]
    negative = tensor.clone()
    negative[7, 7] *= -1
    signs = tensor.clone()
    signs[7, 7:9] *= -1
    last_bit = tensor.clone()
    last_bit.view(torch.int32)[39, 49] ^= 1
    for changed in (swapped, negative, signs, last_bit, tensor.roll(1, 0), tensor.t().contiguous()):
        assert checksum(changed) != whole
    assert checksum(torch.zeros(5)) != checksum(-torch.zeros(5))  # bits, not values


def test_elements_of_eight_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64 has elements of 8 bytes"):
        checksum(torch.zeros(2, dtype=torch.float64))


LAYOUTS = {
    "TP1": Cut(),
    "TP2": Cut(tensor=2),
    "PP2": Cut(pipeline=2),
    "TP2xPP2": Cut(tensor=2, pipeline=2),
    "PP2xVPP2": Cut(1, 2, 2),
}


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_shards_add_up_to_the_whole(tmp_path: Path, family: str, tied: bool) -> None:
    model = random_model(family, tied=tied)
    folder = save(model, tmp_path / "model")
    architecture = architecture_of(family, tied=tied)
    manifest = manifest_of(architecture, torch.float32)
    true = {name: checksum(tensor) for name, tensor in model.state_dict().items() if name in manifest}

    for cut in LAYOUTS.values():
        parts = [
            shard_checksums(
                Shards(
                    parameters=loaded(folder, architecture, layout), architecture=architecture, layout=layout
                ),
                torch.float32,
            )
            for layout in cut.layouts(architecture, PADDED_VOCAB)
        ]
        assert add_checksums(parts) == true
        compare_checksums(manifest, add_checksums(parts), true, "the engine")


def test_a_lie_is_found_and_named() -> None:
    architecture = architecture_of("qwen3")
    manifest = manifest_of(architecture, torch.float32)
    state = random_model("qwen3").state_dict()
    trainer = {name: checksum(state[name]) for name in manifest}
    engine = dict(trainer)
    changed = state["model.layers.2.mlp.up_proj.weight"].clone()
    changed[[1, 4]] = changed[[4, 1]]  # two rows swapped
    engine["model.layers.2.mlp.up_proj.weight"] = checksum(changed)
    del engine["model.norm.weight"]

    with pytest.raises(
        WeightMismatchError,
        match=r"replica 1 does not hold.*2 of \d+ tensors.*layers\.2\.mlp\.up_proj.*model\.norm",
    ):
        compare_checksums(manifest, trainer, engine, "replica 1")
