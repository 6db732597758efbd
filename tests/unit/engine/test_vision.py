"""Vision towers in the engine: what parity with transformers does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import IMAGE_GRIDS, PIXEL_VALUES, token_positions
from megarl.config.schema import OptimConfig, ParallelConfig, Recomputation, Recompute
from megarl.engine.micro_batch import row_images
from tests.families import example_architecture
from tests.ranks import RankPool
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.models import make_image_batch, save_model
from tests.unit.engine.rank_side import (
    LAYOUTS,
    build,
    deal,
    hf_gradients,
    hf_weights,
    merge,
    start,
    take,
    weighted_sum,
)

TOWER = ".visual."


def test_positions_of_an_image_between_texts() -> None:
    """Two tokens of text, an image of 2 x 3 tokens, and text that continues after the wider side."""
    positions = token_positions(10, [2], torch.tensor([[1, 4, 6]]), merge=2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def columns_of(prompt: list[int], grids: list[int], num_values: int) -> dict[str, RaggedTensor]:
    return {
        "prompts": RaggedTensor.of_rows([prompt], torch.int32),
        "responses": RaggedTensor.of_rows([[7]], torch.int32),
        IMAGE_GRIDS: RaggedTensor.of_rows([grids], torch.int32),
        PIXEL_VALUES: RaggedTensor.of_rows([[0.0] * num_values], torch.float32),  # type: ignore[list-item]
    }


@pytest.mark.parametrize(
    ("prompt", "grids", "num_values", "problem"),
    [
        ([1, 190, 2], [1, 2, 4], 8 * 24, "row 5 .* has 1 image token .id 190., but 2 features of 1 image"),
        ([190, 2, 190], [1, 2, 4], 8 * 24, "row 5 .* the 2 tokens of an image are not contiguous"),
        ([1, 190, 190], [1, 2, 4], 7 * 24, "'pixel_values' has 7 patches .* 'image_grids' has 8 patches"),
    ],
)
def test_images_that_are_not_those_of_the_prompt(
    prompt: list[int], grids: list[int], num_values: int, problem: str
) -> None:
    vision = example_architecture("qwen3_vl").vision
    assert vision is not None
    ids = torch.tensor([*prompt, 7])
    with pytest.raises(ValueError, match=problem):
        row_images(columns_of(prompt, grids, num_values), [5], ids, vision)


def run_variants(parallel: ParallelConfig, folder: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Run in a rank: gradients with recomputation, and of a run with a frozen tower, with weights after a step."""
    groups = start(parallel)
    rows = take(batch, range(len(batch["input_ids"])))
    micro_batches = [*deal(7, 2)[:1], [1, 5], [3]]  # the last one has no images
    found: dict[str, Any] = {}

    variants = {
        "plain": {},
        "recomputed": {"recomputation": Recomputation(Recompute.full)},
        "frozen": {"freeze_vision": True},
    }
    for name, spec in variants.items():
        engine = build(groups, folder, optim=OptimConfig(lr=0.01), share_prompts=True, **spec)
        engine.forward_backward(rows, micro_batches, weighted_sum(["log_probs"]))
        gradients = hf_gradients(engine)
        engine.step()
        found[name] = gradients, hf_weights(engine)
    return found


def merged(ranks: list[dict[str, Any]], name: str, which: int) -> dict[str, Tensor]:
    return merge([rank[name][which] for rank in ranks])


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_vl-tied", "TP1"), ("qwen3_vl-tied", "TP2+SP"), ("qwen3_vl_moe", "TP2+SP")]
)
def test_recomputed_layers_and_a_frozen_tower(
    tmp_path: Path, rank_pool: RankPool, family: str, layout: str
) -> None:
    save_model(family, tmp_path)
    batch = make_image_batch()
    generator = torch.Generator().manual_seed(3)
    batch["weight/log_probs"] = torch.randn(batch["response_mask"].shape, generator=generator)
    parallel = LAYOUTS[layout]
    ranks = rank_pool.run(
        run_variants, world_size=parallel.world_size, parallel=parallel, folder=str(tmp_path), batch=batch
    )

    # Features are added inside recomputed layers, and the tower is recomputed too.
    plain = merged(ranks, "plain", 0)
    assert_same(merged(ranks, "recomputed", 0), plain, 1e-5)

    # A frozen tower has neither gradients nor changes, and the language model has the same gradients.
    frozen = merged(ranks, "frozen", 0)
    assert not any(value.any() for name, value in frozen.items() if TOWER in name)
    language = {name: value for name, value in plain.items() if TOWER not in name}
    assert_same({name: value for name, value in frozen.items() if TOWER not in name}, language, 1e-6)

    stored = load_file(tmp_path / "model.safetensors")
    for name, value in merged(ranks, "frozen", 1).items():
        assert (max_difference(value, stored[name]) == 0) == (TOWER in name), name
    assert all(
        max_difference(value, stored[name]) > 0
        for name, value in merged(ranks, "plain", 1).items()
        if TOWER in name
    )
