"""The engine apart from parity: bfloat16 with float32 masters, recomputation, and errors with remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.config.schema import (
    Device,
    OptimConfig,
    ParallelConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
)
from tests.ranks import RankPool
from tests.unit.engine.models import load_lm, make_batch, reference_logits, save_model, scores_of
from tests.unit.engine.rank_side import (
    LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    hf_weights,
    join_rows,
    merge,
    start,
    take,
    unpadded,
)

FAMILY = "qwen2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("engine") / "lm"
    save_model(FAMILY, path)
    return str(path)


def negative_log_likelihood(outputs: Any, rows: Any) -> Any:
    loss = -(outputs["log_probs"] + 0.1 * outputs["entropy"]).sum()
    return loss, {}


# ---- bfloat16


class Trained(NamedTuple):
    scores: Tensors  # before training
    dtypes: set[torch.dtype]
    before: Tensors
    after_one: Tensors
    after_all: Tensors


def train(parallel: ParallelConfig, folder: str, dtype: torch.dtype, lr: float, num_steps: int) -> Trained:
    groups = start(parallel)
    optim = OptimConfig(lr=lr, weight_decay=0.0, betas=[0.9, 0.9])
    engine = build(groups, folder, dtype=dtype, optim=optim)
    batch = make_batch()
    scores = join_rows(range(7), engine.forward(unpadded(batch), deal(7, 2)), 7)
    dtypes = {value.dtype for value in engine.parameters().values()}
    before = hf_weights(engine)
    after_one = {}

    for step in range(num_steps):
        engine.forward_backward(take(batch, [1, 2]), [[0, 1]], negative_log_likelihood)
        engine.step()
        if step == 0:
            after_one = hf_weights(engine)

    return Trained(scores, dtypes, before, after_one, hf_weights(engine))


def test_updates_below_bfloat16_resolution_add_up(rank_pool: RankPool, folder: str) -> None:
    """Each update is an eighth of the distance between neighboring bfloat16 numbers in [0.5, 1), and would be lost there.

    Twenty-four are three such distances, which the float32 masters keep.
    """
    lr = 2.0**-8 / 8
    num_steps = 24
    runs: dict[torch.dtype, list[Trained]] = {
        dtype: rank_pool.run(
            train,
            world_size=2,
            parallel=LAYOUTS["TP2"],
            folder=folder,
            dtype=dtype,
            lr=lr,
            num_steps=num_steps if dtype.itemsize == 2 else 1,
        )
        for dtype in (torch.bfloat16, torch.float32)
    }
    low = runs[torch.bfloat16]
    high = runs[torch.float32]
    assert low[0].dtypes == {torch.bfloat16}
    name = "model.norm.weight"  # near 1, above which neighbors are twice as far apart
    before, after_one, after_all = (
        merge([getattr(rank, key) for rank in low])[name] for key in ("before", "after_one", "after_all")
    )
    assert torch.equal(after_one, before)
    moved = (after_all - before).abs()
    assert float(moved.median()) > 0.5 * lr * num_steps

    for rank in low:
        for key, value in rank.scores.items():
            assert value.dtype == torch.float32
            assert float((value - high[0].scores[key]).abs().max()) < 0.1


# ---- recomputation


class Recomputed(NamedTuple):
    gradients: Tensors
    calls: dict[str, int]


def run_recompute(parallel: ParallelConfig, folder: str, recomputation: Recomputation) -> Recomputed:
    """Run in a rank: return the gradients, and how often the first layer and its parts ran per micro-batch."""
    engine = build(start(parallel), folder, recomputation=recomputation, optim=OptimConfig())
    layer = engine.models[0].decoder.layers[0]
    parts = {"layer": layer, "attention": layer.self_attention.core_attention, "mlp": layer.mlp}
    parts |= {"last layer": engine.models[0].decoder.layers[-1]}
    calls = dict.fromkeys(parts, 0)

    def count(key: str) -> Any:
        def hook(*unused: Any) -> None:
            calls[key] += 1

        return hook

    for key, part in parts.items():
        part.register_forward_hook(count(key))
    micro_batches = deal(7, 2)
    engine.forward_backward(unpadded(make_batch()), micro_batches, negative_log_likelihood)
    assert all(number % len(micro_batches) == 0 for number in calls.values())

    return Recomputed(
        hf_gradients(engine), {key: number // len(micro_batches) for key, number in calls.items()}
    )


SELECTIVE = Recompute.selective
FULL = Recompute.full
RECOMPUTATIONS = [  # and which parts of the first layer, and whether the last layer, run twice
    (Recomputation(SELECTIVE), {"attention"}),
    (Recomputation(SELECTIVE, (RecomputeModule.core_attn, RecomputeModule.mlp)), {"attention", "mlp"}),
    (Recomputation(FULL), {"layer", "attention", "mlp", "last layer"}),
    (Recomputation(FULL, num_layers=1), {"layer", "attention", "mlp"}),
]


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP", "PP2xVPP2"])
def test_recomputation_changes_no_gradient(layout: str, rank_pool: RankPool, folder: str) -> None:
    parallel = LAYOUTS[layout]

    def run(recomputation: Recomputation) -> list[Recomputed]:
        return rank_pool.run(
            run_recompute,
            world_size=parallel.world_size,
            parallel=parallel,
            folder=folder,
            recomputation=recomputation,
        )

    kept = run(Recomputation())
    assert set(kept[0].calls.values()) == {1}
    want = merge([rank.gradients for rank in kept])

    for recomputation, again in RECOMPUTATIONS:
        ranks = run(recomputation)
        one_layer = (
            parallel.virtual_pipeline_parallel_size is not None
        )  # one layer per chunk: the first is the last
        twice = again | {"last layer"} if one_layer and "layer" in again else again
        assert {key for key, number in ranks[0].calls.items() if number == 2} == twice, recomputation
        gradients = merge([rank.gradients for rank in ranks])
        for name, gradient in want.items():
            assert torch.equal(gradients[name], gradient), (recomputation, name)


# ---- tokens that the last layer omits


def count_tokens(parallel: ParallelConfig, folder: str) -> dict[str, int]:
    """Run in a rank: return the number of tokens in the MLPs of the first and last layers, and in the final norm."""
    engine = build(start(parallel), folder, optim=OptimConfig())
    decoder = engine.models[0].decoder
    counted = {}

    def count(key: str) -> Any:
        def hook(module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            counted[key] = arguments[0].shape[0]

        return hook

    for key, module in {
        "first": decoder.layers[0].mlp,
        "last": decoder.layers[-1].mlp,
        "norm": decoder.final_layernorm,
    }.items():
        if module is not None:
            module.register_forward_pre_hook(count(key))

    engine.forward_backward(unpadded(make_batch()), [range(7)], negative_log_likelihood)
    return counted


def test_the_last_layer_ends_with_tokens_that_predict_one(rank_pool: RankPool, folder: str) -> None:
    """All rows are in one micro-batch. test_parity checks that the numbers are the same."""
    mask = make_batch()["attention_mask"]
    responses = make_batch()["response_mask"]
    tokens = int(mask.sum())
    predicting = int(responses.sum())
    assert predicting < tokens - 14
    (alone,) = rank_pool.run(count_tokens, world_size=1, parallel=LAYOUTS["TP1"], folder=folder)
    assert alone == {"first": tokens, "last": predicting, "norm": predicting}
    stages = rank_pool.run(count_tokens, world_size=2, parallel=LAYOUTS["PP2"], folder=folder)
    assert stages == [
        {"first": tokens, "last": tokens},
        {"first": tokens, "last": predicting, "norm": predicting},
    ]
    halves = rank_pool.run(count_tokens, world_size=2, parallel=LAYOUTS["TP2+SP"], folder=folder)
    assert halves[0] == halves[1]
    assert halves[0]["first"] == -(-tokens // 2)
    assert predicting / 2 <= halves[0]["last"] == halves[0]["norm"] < halves[0]["first"]


# ---- a frozen model, and gradients that do not accumulate


def run_beside(folder: str) -> tuple[Tensors, Tensors, torch.Tensor, torch.Tensor]:
    """Run in one rank: train an engine, and score with it and with a frozen one.

    Returns the trained engine's gradients, twice, its log-probs after a step, and the frozen engine's.
    Both share their groups.
    """
    groups = start(ParallelConfig())
    batch = unpadded(make_batch())
    cut = deal(7, 3)
    actor = build(groups, folder, optim=OptimConfig(lr=1e-2))
    reference = build(groups, folder)
    actor.forward_backward(batch, cut, negative_log_likelihood)
    first = hf_gradients(actor)
    actor.forward_backward(batch, cut, negative_log_likelihood)
    second = hf_gradients(actor)
    actor.step()
    trained = actor.forward(batch, cut)
    frozen = reference.forward(batch, cut)
    assert trained is not None
    assert frozen is not None

    return first, second, *(scores["log_probs"].padded() for scores in (trained, frozen))


def test_gradients_replace_those_before_and_a_frozen_model_stays(rank_pool: RankPool, folder: str) -> None:
    first, second, trained, frozen = rank_pool.run(run_beside, world_size=1, folder=folder)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    batch = make_batch()
    with torch.no_grad():
        want = scores_of(reference_logits(load_lm(Path(folder)), batch), batch)
    torch.testing.assert_close(frozen, want["log_probs"], rtol=0.0, atol=1e-5)
    assert float((trained - want["log_probs"]).abs().max()) > 0.1


# ---- errors


def run_micro_batches(folder: str, count: int) -> None:
    engine = build(start(LAYOUTS["PP2xVPP2"]), folder)
    engine.forward(unpadded(make_batch()), deal(7, count))


def test_virtual_stages_want_a_multiple_of_the_stages(rank_pool: RankPool, folder: str) -> None:
    with pytest.raises(
        AssertionError, match="ValueError: 3 micro-batches: .* must be a multiple of pipeline_parallel_size 2"
    ):
        rank_pool.run(run_micro_batches, world_size=2, folder=folder, count=3)


def test_a_layout_of_another_size_than_the_world(rank_pool: RankPool) -> None:
    with pytest.raises(
        AssertionError, match="needs 4 ranks, but the process group has 2: tensor x context x pipeline x data"
    ):
        rank_pool.run(start, world_size=2, parallel=LAYOUTS["TP2xPP2"])


def activate_both() -> None:
    from megarl.engine import platform

    platform.activate(Device.cpu)
    assert platform.activate(Device.cpu) is platform.current()
    platform.activate(Device.cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu(rank_pool: RankPool) -> None:
    with pytest.raises(
        AssertionError, match="ValueError: device=cuda, but torch sees no GPU: use device=cpu or auto"
    ):
        rank_pool.run(activate_both, world_size=1)
