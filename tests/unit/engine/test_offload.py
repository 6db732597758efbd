"""Offloading: training is bitwise identical, memory is really freed, and offloaded state is never used."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.batch.metrics import Metric
from megarl.config.schema import OptimConfig, ParallelConfig
from megarl.machine.usage import trim_heap
from megarl.models.families import read_architecture
from tests.ranks import RankPool
from tests.unit.engine.models import make_batch, save_large_model, save_model
from tests.unit.engine.rank_side import (
    LAYOUTS,
    Rows,
    Tensors,
    build,
    deal,
    hf_weights,
    merge,
    replica_rows,
    start,
    take,
)

NUM_STEPS = 3
NUM_ROWS = 8
PARTS = ("gradients", "optimizer", "parameters")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("offload")
    for family in ("qwen2", "qwen2-tied"):
        save_model(family, folder / family)
    return {family: str(folder / family) for family in ("qwen2", "qwen2-tied")}


def negative_log_likelihood(outputs: Any, rows: Any) -> Any:
    loss = -outputs["log_probs"].sum()
    return loss, {"loss": Metric.sum(loss)}


class Trained(NamedTuple):
    statistics: list[tuple[float, float]]  # gradient norm, learning rate
    losses: list[float]
    scores: Rows | None
    weights: Tensors


def train(
    parallel: ParallelConfig, folder: str, dtype: torch.dtype, away: tuple[tuple[str, ...], ...]
) -> Trained:
    """Run in a rank: train, with a scoring pass after each step.

    `away`: the parts offloaded by each call and restored after it.
    """
    groups = start(parallel)
    engine = build(groups, folder, optim=OptimConfig(lr=1e-2, warmup_steps=2), dtype=dtype)
    from megarl.engine.offload import StatePart

    rows = replica_rows(groups, NUM_ROWS)
    batch = take(make_batch(NUM_ROWS), rows)
    cut = deal(len(rows), 2)
    statistics = []
    losses = []
    scores = None

    for _ in range(NUM_STEPS):
        losses += [
            metric.value for metric in engine.forward_backward(batch, cut, negative_log_likelihood).values()
        ]
        step = engine.step()
        statistics.append((step.grad_norm, step.lr))
        for parts in away:
            engine.offload(*(StatePart(part) for part in parts))
        engine.restore(*StatePart)
        scores = engine.forward(batch, cut)

    weights = hf_weights(engine) if dtype == torch.float32 else dict(engine.parameters())
    return Trained(statistics, losses, scores, weights)


LAYOUT_CASES = [
    ("TP2", "qwen2"),
    ("PP2", "qwen2"),
    ("DP2", "qwen2"),
    ("PP2xVPP2", "qwen2"),
    ("PP2", "qwen2-tied"),
    ("TP2xPP2", "qwen2-tied"),
]


@pytest.mark.parametrize(("layout", "family"), LAYOUT_CASES)
def test_a_run_with_everything_moved_between_its_steps_is_the_same(
    layout: str, family: str, rank_pool: RankPool, folders: dict[str, str]
) -> None:
    settings: dict[str, Any] = {
        "parallel": LAYOUTS[layout],
        "folder": folders[family],
        "dtype": torch.float32,
    }
    plain, moved = (
        rank_pool.run(train, world_size=LAYOUTS[layout].world_size, away=away, **settings)
        for away in ((), (PARTS[:2], PARTS[2:], PARTS))
    )

    for before, after in zip(plain, moved, strict=True):
        assert (before.statistics, before.losses) == (after.statistics, after.losses)
        assert (before.scores is None) == (after.scores is None)
        assert all(value == after.scores[key] for key, value in (before.scores or {}).items())

    weights = merge([rank.weights for rank in plain])
    same = merge([rank.weights for rank in moved])
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


@pytest.fixture(scope="module")
def undisturbed(rank_pool: RankPool, folders: dict[str, str]) -> Callable[[torch.dtype], list[Trained]]:
    """Return a function that trains two replicas without offloading, once with each dtype."""

    @cache
    def trained(dtype: torch.dtype) -> list[Trained]:
        folder = folders["qwen2"]
        return rank_pool.run(
            train, world_size=2, parallel=LAYOUTS["DP2"], folder=folder, dtype=dtype, away=()
        )

    return trained


@pytest.mark.parametrize(
    "away", [(("optimizer",),), (("parameters",),), (("gradients",),), (("parameters",), ("optimizer",))]
)
def test_parts_move_alone_and_in_any_order_with_masters_of_their_own(
    away: tuple[tuple[str, ...], ...],
    rank_pool: RankPool,
    folders: dict[str, str],
    undisturbed: Callable[[torch.dtype], list[Trained]],
) -> None:
    settings: dict[str, Any] = {
        "parallel": LAYOUTS["DP2"],
        "folder": folders["qwen2"],
        "dtype": torch.bfloat16,
    }
    plain = undisturbed(torch.bfloat16)
    moved = rank_pool.run(train, world_size=2, away=away, **settings)

    for before, after in zip(plain, moved, strict=True):
        assert before.statistics == after.statistics
        assert all(torch.equal(weight, after.weights[name]) for name, weight in before.weights.items())


def train_as_on_cuda(
    parallel: ParallelConfig, folder: str, dtype: torch.dtype, away: tuple[tuple[str, ...], ...]
) -> Trained:
    """Use the buffers that are pinned on CUDA instead of files."""
    from megarl.engine import offload

    start(parallel)
    of_cpu = offload.new_host_buffer
    made = []

    def make() -> offload.PinnedMemory:
        made.append(offload.PinnedMemory())
        return made[-1]

    offload.new_host_buffer = make
    try:
        trained = train(parallel, folder, dtype, away)
    finally:
        offload.new_host_buffer = of_cpu

    used = [host_buffer for host_buffer in made if host_buffer.places]

    # One buffer for each part that is kept.
    assert len(used) == sum(part != "gradients" for part in {part for parts in away for part in parts})
    for host_buffer in used:
        exact = sum(place.numel() for place in host_buffer.places)
        assert exact <= host_buffer.buffer.numel() < exact + 512 * len(host_buffer.places)

    return trained


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_waits_in_one_buffer_of_each_part_is_the_same(
    dtype: torch.dtype,
    rank_pool: RankPool,
    folders: dict[str, str],
    undisturbed: Callable[[torch.dtype], list[Trained]],
) -> None:
    settings: dict[str, Any] = {"parallel": LAYOUTS["DP2"], "folder": folders["qwen2"], "dtype": dtype}
    plain = undisturbed(dtype)
    moved = rank_pool.run(train_as_on_cuda, world_size=2, away=(PARTS[:2], PARTS), **settings)

    for before, after in zip(plain, moved, strict=True):
        assert (before.statistics, before.losses) == (after.statistics, after.losses)
        assert all(torch.equal(weight, after.weights[name]) for name, weight in before.weights.items())


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Memory(NamedTuple):
    reported: int  # bytes that offload reports as freed
    given_back: int
    taken_again: int
    again: int  # freed the second time


def measure(folder: str, optim: OptimConfig | None) -> Memory:
    """Run in a rank: return the change of resident memory.

    One step is made first, so that moments have been written.
    """
    engine = build(start(ParallelConfig()), folder, optim=optim)
    from megarl.engine.offload import StatePart

    if optim is not None:
        engine.forward_backward(take(make_batch(), [1]), [[0]], negative_log_likelihood)
        engine.step()

    trim_heap()  # memory freed before this test must not count
    before = resident_bytes()
    reported = engine.offload(*StatePart)
    away = resident_bytes()
    engine.restore(*StatePart)
    back = resident_bytes()
    engine.offload(*StatePart)

    return Memory(reported, before - away, back - away, back - resident_bytes())


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("large")
    save_large_model(folder)
    return str(folder)


@pytest.mark.parametrize("trains", [True, False])
def test_memory_goes_back_to_the_system(trains: bool, rank_pool: RankPool, large: str) -> None:
    from megarl.models.counts import num_parameters

    parameters = num_parameters(read_architecture(large))
    assert parameters > 50e6
    (memory,) = rank_pool.run(
        measure, world_size=1, folder=large, optim=OptimConfig(lr=1e-3) if trains else None
    )
    expected = parameters * 4 * (4 if trains else 1)  # weights; gradients and two moments
    assert expected <= memory.reported < expected * 1.01  # buffers are padded
    assert memory.given_back > 0.8 * memory.reported, memory
    assert memory.taken_again > 0.8 * memory.reported, memory
    assert memory.again > 0.8 * memory.reported, memory


def use_what_is_away(folder: str) -> list[str]:
    """Run in a rank: return the error of each call."""
    engine = build(start(ParallelConfig()), folder, optim=OptimConfig(lr=1e-3))
    from megarl.engine.offload import OffloadedError, StatePart

    batch = take(make_batch(), [1, 2])
    engine.forward_backward(batch, [[0, 1]], negative_log_likelihood)
    engine.step()
    calls = {
        StatePart.parameters: (lambda: engine.forward(batch, [[0, 1]]), engine.parameters),
        StatePart.gradients: (
            engine.gradients,
            lambda: engine.forward_backward(batch, [[0, 1]], negative_log_likelihood),
        ),
        StatePart.optimizer: (engine.step,),
    }
    said = []

    for part, forbidden in calls.items():
        assert engine.offload(part) > 0
        assert engine.offload(part) == 0
        for call in forbidden:
            try:
                call()
            except OffloadedError as error:
                said.append(str(error))
        assert engine.restore(part) > 0
        assert engine.restore(part) == 0

    try:
        engine.step()
    except AssertionError as error:
        said.append(str(error))

    return said


def test_offloaded_state_is_never_used(rank_pool: RankPool, folders: dict[str, str]) -> None:
    assert rank_pool.run(use_what_is_away, world_size=1, folder=folders["qwen2"])[0] == [
        "the engine cannot score: parameters offloaded; restore the offloaded state first",
        "the engine cannot return its parameters: parameters offloaded; restore the offloaded state first",
        "the engine cannot return its gradients: gradients offloaded; restore the offloaded state first",
        "the engine cannot train: gradients offloaded; restore the offloaded state first",
        "the engine cannot step: optimizer offloaded; restore the offloaded state first",
        "a step needs gradients computed after the last offload",
    ]


def fill_the_disk(folder: str) -> tuple[str, bool]:
    """Run in a rank whose files may be 1 MB large: return the error, and whether the model scores as before."""
    import resource
    import signal

    engine = build(start(ParallelConfig()), folder, optim=OptimConfig(lr=1e-3))
    from megarl.engine.offload import StatePart

    batch = take(make_batch(), [1, 2])
    before = engine.forward(batch, [[0, 1]])
    message = ""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    try:
        engine.offload(StatePart.parameters)
    except OSError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)

    after = engine.forward(batch, [[0, 1]])
    assert before is not None
    assert after is not None

    return message, before["log_probs"] == after["log_probs"]


def test_a_full_disk_is_an_error_that_leaves_the_model_whole(
    rank_pool: RankPool, folders: dict[str, str]
) -> None:
    message, same = rank_pool.run(fill_the_disk, world_size=1, folder=folders["qwen2"])[0]
    assert "too large; set TMPDIR to a folder with free space" in message
    assert same
