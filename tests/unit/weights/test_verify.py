"""Checksums of shards add up to those of the whole tensors, in every layout, and a lie is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.weights.checksum import checksum
from megarl.weights.manifest import manifest_of
from megarl.weights.shards import Shards
from megarl.weights.verify import WeightMismatchError, add_checksums, compare_checksums, shard_checksums
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save
from tests.unit.weights.test_load import loaded
from tests.unit.weights.transfers import Cut

LAYOUTS = {"TP1": Cut(), "TP2": Cut(tensor=2), "PP2": Cut(pipeline=2), "TP2xPP2": Cut(tensor=2, pipeline=2), "PP2xVPP2": Cut(1, 2, 2)}


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
                Shards(parameters=loaded(folder, architecture, layout), architecture=architecture, layout=layout), torch.float32
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
    changed[[1, 4]] = changed[[4, 1]]  # two rows in each other's place
    engine["model.layers.2.mlp.up_proj.weight"] = checksum(changed)
    del engine["model.norm.weight"]
    with pytest.raises(WeightMismatchError, match=r"replica 1 does not hold.*2 of \d+ tensors.*layers\.2\.mlp\.up_proj.*model\.norm"):
        compare_checksums(manifest, trainer, engine, "replica 1")
