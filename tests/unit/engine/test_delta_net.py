"""Layers with states in an engine: padded rows, and how a checkpoint holds the parts of a projection."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.config.schema import ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.models import load_lm, make_batch, reference_logits, save_model, scores_of
from tests.unit.engine.rank_side import Tensors, build, deal, join_rows, start, take


@pytest.fixture(scope="module", params=["qwen3_next", "nemotron_h"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save_model(request.param, path)
    return path


def log_probs(folder: str, batch: Tensors) -> dict[bool, Tensor]:
    """Run in a rank: return the log-probs of padded and of packed rows."""
    groups = start(ParallelConfig())
    num_rows = len(batch["input_ids"])
    rows = list(range(num_rows))
    found = {}
    for packing in (False, True):
        engine = build(groups, folder, packing=packing)
        outputs = engine.forward(take(batch, rows), deal(num_rows, 2))
        found[packing] = join_rows(rows, outputs, num_rows)["log_probs"]
    return found


def test_padded_rows_are_packed_rows(folder: Path, rank_pool: RankPool) -> None:
    """In both, a state begins and ends with its row."""
    batch = make_batch()
    (found,) = rank_pool.run(log_probs, world_size=1, folder=str(folder), batch=batch)
    expected = scores_of(reference_logits(load_lm(folder), batch), batch)["log_probs"]
    mask = batch["response_mask"]
    for got in found.values():
        assert float((got - expected)[mask].abs().max()) < 1e-5


def test_the_order_of_rows_in_a_batch_does_not_matter(folder: Path, rank_pool: RankPool) -> None:
    """A state that was carried from one row to the next would change with the order."""
    batch = make_batch()
    reverse = {key: value.flip(0) for key, value in batch.items()}
    (found,) = rank_pool.run(log_probs, world_size=1, folder=str(folder), batch=batch)
    (other,) = rank_pool.run(log_probs, world_size=1, folder=str(folder), batch=reverse)
    mask = batch["response_mask"]
    assert float((found[True] - other[True].flip(0))[mask].abs().max()) < 1e-5


def sections(folder: str) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Run in a rank: return the key, shape, offset and size of each slice of the first input projection."""
    groups = start(ParallelConfig(tensor_parallel_size=2))
    engine = build(groups, folder)
    described = engine.models[0].sharded_state_dict(metadata={"dp_cp_group": groups.data_context})
    entry = described["decoder.layers.0.self_attention.in_proj.weight"]
    slices = entry.build_fn(entry.key, entry.data, entry.replica_id, None)
    merged = entry.merge_fn([part.data for part in slices])
    assert torch.equal(merged, entry.data)
    return [(part.key, part.global_shape, part.global_offset, part.local_shape) for part in slices]


# Gated delta nets have 4 key heads of 16 numbers and 8 value heads of 12; Mamba-2 mixers 4 groups of state
# vectors of 16 numbers and 8 heads of 12.
SECTIONS = {
    "qwen3_next": ((0, 64, 128, 224, 320, 328), (64, 64, 96, 96, 8, 8)),
    "nemotron_h": ((0, 96, 192, 256, 320), (96, 96, 64, 64, 8)),
}


def test_a_checkpoint_has_the_parts_of_a_projection_one_after_another(
    folder: Path, rank_pool: RankPool
) -> None:
    """Queries, keys, values, gates, strengths and decays; or gates, inputs, both vectors and time steps."""
    found = rank_pool.run(sections, world_size=2, folder=str(folder))
    starts, sizes = next(each for name, each in SECTIONS.items() if folder.name.startswith(name))
    for rank, slices in enumerate(found):
        assert [part[2:] for part in slices] == [
            ((first + rank * size // 2, 0), (size // 2, 64))
            for first, size in zip(starts, sizes, strict=True)
        ]
        assert {part[:2] for part in slices} == {
            ("decoder.layers.0.self_attention.in_proj.weight", (sum(sizes), 64))
        }
