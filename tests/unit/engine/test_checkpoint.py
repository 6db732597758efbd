"""A checkpoint of an engine: what is loaded is what was there when the save began, in any layout, or an error that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.checkpoint_side import Saved, Settings, load_and_train, same, train_and_save
from tests.unit.engine.models import save_critic, save_model
from tests.unit.engine.rank_side import LAYOUTS

STEPS, AFTER = 2, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen2-tied", "qwen3-tied"):
        save_model(family, folder / family)
    save_critic(folder / "qwen2-tied", folder / "critic")
    return {name: str(folder / name) for name in ("qwen2", "qwen2-tied", "qwen3-tied", "critic")}


def saved(rank_pool: RankPool, settings: Settings, folder: Path, steps: int = STEPS) -> list[Saved]:
    return rank_pool.run(
        train_and_save, world_size=settings.parallel.world_size, settings=settings, folder=folder, num_steps=steps, num_after=AFTER
    )


def loaded(rank_pool: RankPool, settings: Settings, folder: Path, steps: int = STEPS) -> list[Saved]:
    return rank_pool.run(
        load_and_train, world_size=settings.parallel.world_size, settings=settings, folder=folder, num_steps=steps, num_after=AFTER
    )


SAME_LAYOUT = [
    ("TP2", "qwen2", "lm", torch.float32, 2),
    ("PP2xVPP2", "qwen2-tied", "lm", torch.bfloat16, 2),
    ("DP2", "qwen3-tied", "lm", torch.bfloat16, 2),
    ("TP2xPP2", "critic", "value", torch.float32, 2),
    ("TP1", "qwen2-tied", "lm", torch.float32, 0),
]


@pytest.mark.parametrize(("layout", "model", "head", "dtype", "steps"), SAME_LAYOUT)
def test_in_the_same_layout_it_goes_on_to_the_bit(
    layout: str, model: str, head: str, dtype: torch.dtype, steps: int, rank_pool: RankPool, folders: dict[str, str], tmp_path: Path
) -> None:
    """Also of a save before the first step, when Adam has no moments yet; and what was saved is the state of before `after`."""
    settings = Settings(LAYOUTS[layout], folders[model], head, dtype)
    before = saved(rank_pool, settings, tmp_path / "actor", steps)
    after = loaded(rank_pool, settings, tmp_path / "actor", steps)
    for one, other in zip(before, after, strict=True):
        assert one.after.losses == other.after.losses
        assert one.after.statistics == other.after.statistics
    for part in ("at_save", "draws"):
        assert same([getattr(rank, part) for rank in before], [getattr(rank, part) for rank in after])
    assert same([rank.after.state for rank in before], [rank.after.state for rank in after])
    assert not same([rank.at_save for rank in before], [rank.after.state for rank in before])


RESHAPED = [
    ParallelConfig(pipeline_parallel_size=2),
    ParallelConfig(data_parallel_size=2),
    ParallelConfig(pipeline_parallel_size=2, virtual_pipeline_parallel_size=2),
    ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2),
]


@pytest.mark.parametrize("model", ["qwen2", "qwen2-tied", "critic"])
def test_in_another_layout_the_next_steps_agree(model: str, rank_pool: RankPool, folders: dict[str, str], tmp_path: Path) -> None:
    """From TP2 to each, and back."""
    head = "value" if model == "critic" else "lm"
    source = Settings(LAYOUTS["TP2"], folders[model], head)
    want = saved(rank_pool, source, tmp_path / "actor")[0].after.losses
    for number, parallel in enumerate(RESHAPED):
        settings = Settings(parallel, folders[model], head)
        got = loaded(rank_pool, settings, tmp_path / "actor")[0].after.losses
        assert got == pytest.approx(want, rel=1e-5), parallel
        there = tmp_path / str(number)
        again = saved(rank_pool, settings, there)[0].after.losses
        assert again == pytest.approx(want, rel=1e-5), parallel
        back = loaded(rank_pool, source, there)[0].after.losses
        assert back == pytest.approx(want, rel=1e-5), parallel
