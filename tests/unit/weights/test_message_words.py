"""Float32 tensors of a bfloat16 model: bitwise identical in an engine, in files and in checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from megarl.models.architecture import Architecture
from megarl.weights.checksum import checksum, shard_checksums
from megarl.weights.export_plan import plan_export
from megarl.weights.manifest import manifest_of
from megarl.weights.message_words import (
    places_in_words,
    shape_in_words,
    slices_in_words,
    word_counts,
)
from megarl.weights.plan import RankLocation, plan_transfer, whole_slices
from megarl.weights.shard_layout import whole_layout
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import Part, WeightTransferError
from megarl.weights.transports.folder import FolderTransfer
from megarl.weights.transports.interface import DestinationViews
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, shards_of, stored_state

BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"
WORD = torch.bfloat16


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return architecture_of("glm4_moe")


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    """Return the tensors of a folder: all bfloat16 but the selection biases."""
    model = stored_state(random_model("glm4_moe"))
    return {
        name: value if name.endswith("correction_bias") else value.to(WORD) for name, value in model.items()
    }


@pytest.fixture(scope="module")
def shards(architecture: Architecture, state: dict[str, torch.Tensor]) -> Shards:
    layout = whole_layout(architecture, PADDED_VOCAB)
    parameters = {
        name: value.contiguous() if name.endswith("expert_bias") else value.to(WORD).contiguous()
        for name, value in shards_of(state, architecture, layout).items()
    }
    return Shards(parameters=parameters, architecture=architecture, layout=layout)


def send(shards: Shards, received: dict[str, torch.Tensor], message_words: int) -> None:
    """Send all weights of one rank to `received` in messages of that many words."""
    architecture = shards.architecture
    counts = word_counts(architecture, WORD.itemsize)
    shapes = {name: meta.shape for name, meta in manifest_of(architecture, WORD).items()}
    needed = whole_slices(shapes)
    held = held_slices(architecture, shards.layout)
    plan = plan_transfer(
        {name: shape_in_words(shape, counts.get(name, 1)) for name, shape in shapes.items()},
        [(RankLocation("node", "trainer"), slices_in_words(held, counts))],
        [(RankLocation("node", "engine"), slices_in_words(needed, counts))],
        message_words,
    )

    def places(part: Part) -> list[torch.Tensor]:
        return [received[part.name][part.tensor_slice.index]]

    sources = plan.of_target(0)
    destinations = DestinationViews(
        sources, slices_in_words(needed, counts), WORD, places_in_words(places, counts, WORD)
    )
    for number in range(sources.num_rounds):
        parts = sources.schedules[0].message(number)
        regions = [region.reshape(-1) for part in parts for region in shards.regions(part)]
        destinations.unpack(number, torch.cat(regions))


def test_only_selection_biases_are_wide(architecture: Architecture) -> None:
    assert set(word_counts(architecture, 2).values()) == {2}
    assert BIAS in word_counts(architecture, 2)
    assert len(word_counts(architecture, 2)) == len(architecture.sparse_layers)
    assert word_counts(architecture, 4) == {}


@pytest.mark.parametrize("message_words", [1001, 2**20])
def test_an_engine_receives_every_bit(
    shards: Shards, state: dict[str, torch.Tensor], message_words: int
) -> None:
    """With 1001 words, messages end in the middle of tensors and of elements."""
    received = {name: torch.zeros_like(value) for name, value in state.items()}
    send(shards, received, message_words)
    for name, value in state.items():
        assert torch.equal(received[name], value), name
    assert received[BIAS].dtype == torch.float32
    assert not torch.equal(received[BIAS], received[BIAS].to(WORD).float())


def test_an_engine_that_would_round_is_refused(shards: Shards, state: dict[str, torch.Tensor]) -> None:
    received = {name: torch.zeros_like(value, dtype=WORD) for name, value in state.items()}
    with pytest.raises(WeightTransferError, match=r"stores .*e_score_correction_bias as torch\.bfloat16"):
        send(shards, received, 2**20)


def test_checksums_are_those_of_float32(shards: Shards, state: dict[str, torch.Tensor]) -> None:
    sums = shard_checksums(shards, shards.dtype)
    assert sums == {name: checksum(value) for name, value in state.items()}


@pytest.mark.parametrize("message_bytes", [202, 2**20])
def test_files_have_every_bit(
    tmp_path: Path,
    architecture: Architecture,
    shards: Shards,
    state: dict[str, torch.Tensor],
    message_bytes: int,
) -> None:
    plan = plan_export(
        architecture, [shards.layout], ["node"], WORD, message_bytes=message_bytes, max_file_bytes=2**30
    )
    assert FolderTransfer(None, 0, plan.of_rank(0), shards, tmp_path, durable=False).run()
    (file,) = plan.files
    with safe_open(tmp_path / file.name, framework="pt") as opened:
        for name, value in state.items():
            assert torch.equal(opened.get_tensor(name), value), name
            assert opened.get_tensor(name).dtype == value.dtype
