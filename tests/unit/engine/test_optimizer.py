"""The optimizer's schedule, clipping, and handling of non-finite gradients, against numbers worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.schema import Decay, OnNonFinite, OptimConfig, ParallelConfig
from tests.ranks import RankPool
from tests.unit.engine.comparison import relative_differences
from tests.unit.engine.models import make_batch, save_model
from tests.unit.engine.rank_side import LAYOUTS, Tensors, build, deal, hf_weights, merge, start, take

FAMILY = "qwen2"
LR = 1e-3
MIN_LR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("optimizer") / "lm"
    save_model(FAMILY, path)
    return str(path)


def negative_log_likelihood(outputs: Any, rows: Any) -> Any:
    loss = -outputs["log_probs"].sum()
    return loss, {}


class Steps(NamedTuple):
    lrs: list[float]
    grad_norms: list[float]
    before: Tensors  # weights of the stage
    after_first: Tensors


def run_steps(folder: str, optim: OptimConfig, total_steps: int, num_steps: int) -> Steps:
    """Run in one rank: run steps on the same two rows."""
    groups = start(ParallelConfig())
    engine = build(groups, folder, optim=optim, total_optimizer_steps=total_steps)
    batch = take(make_batch(), [1, 2])
    statistics = []
    before = hf_weights(engine)
    after_first: Tensors = {}

    for step in range(num_steps):
        engine.forward_backward(batch, [[0, 1]], negative_log_likelihood)
        statistics.append(engine.step())
        if step == 0:
            after_first = hf_weights(engine)

    return Steps(
        [each.lr for each in statistics], [each.grad_norm for each in statistics], before, after_first
    )


def steps(
    rank_pool: RankPool, folder: str, *, total_steps: int = 100, num_steps: int = 1, **optim: Any
) -> Steps:
    config = OptimConfig(**{"lr": LR, "weight_decay": 0.0, **optim})
    return rank_pool.run(
        run_steps, world_size=1, folder=folder, optim=config, total_steps=total_steps, num_steps=num_steps
    )[0]


WARM_UP = [0.25e-3, 0.5e-3, 0.75e-3, 1e-3]


@pytest.mark.parametrize(
    ("decay", "after_warm_up"),
    [
        (Decay.constant, [1e-3] * 7),
        # down by 9e-4 in six updates, then flat
        (Decay.linear, [8.5e-4, 7e-4, 5.5e-4, 4e-4, 2.5e-4, 1e-4, 1e-4]),
        (
            Decay.cosine,
            [
                1e-4 + 9e-4 * (1 + math.sqrt(3) / 2) / 2,  # cos 30 degrees
                1e-4 + 9e-4 * 0.75,  # cos 60
                5.5e-4,
                1e-4 + 9e-4 * 0.25,
                1e-4 + 9e-4 * (1 - math.sqrt(3) / 2) / 2,
                1e-4,
                1e-4,
            ],
        ),
    ],
)
def test_warm_up_of_four_and_decay_until_update_ten(
    decay: Decay, after_warm_up: list[float], rank_pool: RankPool, folder: str
) -> None:
    got = steps(rank_pool, folder, total_steps=10, num_steps=11, warmup_steps=4, decay=decay, min_lr=MIN_LR)
    assert got.lrs == pytest.approx([*WARM_UP, *after_warm_up], rel=1e-6)


def test_first_update_uses_the_rate_it_reports(rank_pool: RankPool, folder: str) -> None:
    """Adam's first step is the rate times the gradient's sign: a quarter of the rate during warm-up over four."""
    got = steps(rank_pool, folder, warmup_steps=4, eps=1e-12, clip_grad=0.0)
    change = (got.after_first["model.norm.weight"] - got.before["model.norm.weight"]).abs()
    torch.testing.assert_close(change, torch.full_like(change, LR / 4), rtol=1e-3, atol=0.0)


def test_without_warm_up_the_first_update_has_the_full_rate(rank_pool: RankPool, folder: str) -> None:
    assert steps(rank_pool, folder).lrs == [LR]


def test_clipping_scales_the_whole_gradient(rank_pool: RankPool, folder: str) -> None:
    """A huge epsilon makes the first update lr * g / eps, so that its size reveals the gradient's."""
    settings = {"lr": 1e5, "eps": 1e8}
    free = steps(rank_pool, folder, clip_grad=0.0, **settings)
    norm = free.grad_norms[0]
    loose = steps(rank_pool, folder, clip_grad=2 * norm, **settings)
    clipped = steps(rank_pool, folder, clip_grad=norm / 10, **settings)
    assert loose.grad_norms == clipped.grad_norms == free.grad_norms  # before clipping

    # Compared as one vector: the change of a single tensor is too close to the rounding of weights.
    changes = [
        torch.cat([(run.after_first[name] - run.before[name]).flatten().double() for name in run.before])
        for run in (free, loose, clipped)
    ]
    assert torch.equal(changes[1], changes[0])
    assert float(changes[0].norm()) == pytest.approx(norm * 1e-3, rel=1e-3)
    assert float((changes[2] * 10 - changes[0]).norm() / changes[0].norm()) < 1e-3


def test_decay_acts_on_matrices_only(rank_pool: RankPool, folder: str) -> None:
    """A huge epsilon leaves only the decay: w <- w (1 - lr * decay)."""
    got = steps(rank_pool, folder, eps=1e12, weight_decay=10.0)
    shrunk = {name: weight * (0.99 if weight.dim() == 2 else 1.0) for name, weight in got.before.items()}
    assert max(relative_differences(got.after_first, shrunk).values()) < 1e-6


class Diverged(NamedTuple):
    message: str
    before: Tensors
    after: Tensors
    next_lr: float


def run_divergence(parallel: ParallelConfig, folder: str, value: float) -> Diverged:
    """Run in a rank: a normal step, one whose loss is `value` on the last replica only, and a normal step."""
    groups = start(parallel)
    engine = build(groups, folder, optim=OptimConfig(lr=LR, warmup_steps=4))
    from megarl.engine.optimizer import TrainingDivergedError

    batch = take(make_batch(), [1, 2, 3, 4])
    cut = deal(4, 2)

    def bad(outputs: Any, rows: Any) -> Any:
        loss, metrics = negative_log_likelihood(outputs, rows)
        return (loss * value if groups.data_rank == parallel.data_parallel_size - 1 else loss), metrics

    engine.forward_backward(batch, cut, negative_log_likelihood)
    engine.step()
    before = hf_weights(engine)
    message = ""
    engine.forward_backward(batch, cut, bad)

    try:
        engine.step()
    except TrainingDivergedError as error:
        message = str(error)

    after = hf_weights(engine)
    engine.forward_backward(batch, cut, negative_log_likelihood)
    return Diverged(message, before, after, engine.step().lr)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["TP2xPP2", "DP2"])
def test_divergence_is_raised_on_every_rank_and_changes_nothing(
    layout: str, value: float, rank_pool: RankPool, folder: str
) -> None:
    parallel = LAYOUTS[layout]
    ranks = rank_pool.run(
        run_divergence, world_size=parallel.world_size, parallel=parallel, folder=folder, value=value
    )
    before = merge([rank.before for rank in ranks])
    after = merge([rank.after for rank in ranks])
    assert all(torch.equal(after[name], before[name]) for name in before)

    for rank in ranks:
        assert "no update was made" in rank.message
        assert rank.next_lr == pytest.approx(LR * 2 / 4)  # the failed step does not count


class Skipped(NamedTuple):
    is_skipped: bool
    before: Tensors
    after: Tensors
    next_lr: float


def run_skip(parallel: ParallelConfig, folder: str) -> Skipped:
    """Run in a rank: the loss of a rank is infinite, but its gradient is finite; then a normal step."""
    groups = start(parallel)
    optim = OptimConfig(lr=LR, warmup_steps=4, on_nonfinite=OnNonFinite.skip)
    engine = build(groups, folder, optim=optim)
    batch = take(make_batch(), [1, 2, 3, 4])

    def bad(outputs: Any, rows: Any) -> Any:
        loss, metrics = negative_log_likelihood(outputs, rows)
        return (loss + float("inf") if groups.rank == parallel.world_size - 1 else loss), metrics

    before = {name: value.clone() for name, value in engine.parameters().items()}
    engine.forward_backward(batch, deal(4, 2), bad)
    is_skipped = engine.step().is_skipped
    after = {name: value.clone() for name, value in engine.parameters().items()}
    engine.forward_backward(batch, deal(4, 2), negative_log_likelihood)
    return Skipped(is_skipped, before, after, engine.step().lr)


@pytest.mark.parametrize("layout", ["TP2xPP2", "DP2"])
def test_an_infinite_loss_of_one_rank_skips_the_update_of_all(
    layout: str, rank_pool: RankPool, folder: str
) -> None:
    parallel = LAYOUTS[layout]
    ranks = rank_pool.run(run_skip, world_size=parallel.world_size, parallel=parallel, folder=folder)
    assert all(rank.is_skipped for rank in ranks)
    for rank in ranks:
        assert all(torch.equal(rank.after[name], rank.before[name]) for name in rank.before)
        assert rank.next_lr == pytest.approx(LR / 4)  # the skipped update does not count
