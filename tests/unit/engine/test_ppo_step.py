"""One full PPO step on the engine gives the weights of a plain PyTorch and Hugging Face step, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from megarl.algorithms.groups import place_scores
from megarl.algorithms.kl import apply_kl_penalty
from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import (
    AdvantageConfig,
    AlgorithmConfig,
    KLConfig,
    OptimConfig,
    ParallelConfig,
    PolicyLossConfig,
    ValueLossConfig,
)
from tests.ranks import RankPool, gather
from tests.unit.engine import ppo_reference
from tests.unit.engine.comparison import assert_same, max_difference
from tests.unit.engine.models import load_critic, load_lm, make_batch, save_critic, save_model
from tests.unit.engine.ppo_reference import Outcome, Settings, Update
from tests.unit.engine.rank_side import (
    LAYOUTS,
    Tensors,
    build,
    deal,
    hf_weights,
    join_rows,
    merge,
    replica_rows,
    start,
    take,
)

# Relative to the norm of each tensor's change, which is less than a tenth of the weight: weights are accurate
# to 1e-5 or better.
CHANGE_TOLERANCE = 1e-4
SCORES = (1.0, -0.5, 0.0, 2.0, 0.3, -1.0, 0.7, 0.1)
SETTINGS = Settings()


def batch_with_hole() -> Tensors:
    """Return a batch in which row 0 has two tokens in its response that the model did not generate (tool output)."""
    batch = make_batch(num_rows=8)
    batch["response_mask"][0, 3:5] = False
    return batch


def algorithm() -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage=AdvantageConfig(gamma=SETTINGS.gamma, lam=SETTINGS.lam),
        policy_loss=PolicyLossConfig(clip_low=SETTINGS.clip_low, clip_high=SETTINGS.clip_high),
        value_loss=ValueLossConfig(clip=SETTINGS.value_clip),
        kl=KLConfig(coefficient=SETTINGS.beta),
        entropy_coefficient=SETTINGS.entropy_coefficient,
    )


def add_advantages(batch: Tensors) -> Tensors:
    """Do what the driver does between scoring and updating."""
    config = algorithm()
    mask = batch["response_mask"]
    rewards, _ = apply_kl_penalty(
        place_scores(SCORES, mask),
        batch["old_log_probs"],
        batch["ref_log_prob"],
        mask,
        config.kl.coefficient,
        config.kl.estimator,
    )
    inputs = AdvantageInputs(
        token_level_rewards=rewards, response_mask=mask, uid=np.arange(len(mask)), values=batch["values"]
    )
    advantages, returns = ADVANTAGE_ESTIMATORS[config.advantage.estimator](inputs, config.advantage)

    return {**batch, "advantages": advantages, "returns": returns}


def update(
    engine: Any, batch: Tensors, rows: list[int], loss: Any, prefix: str, names: tuple[str, str]
) -> Update:
    """Run one optimizer step on the mini-batch `rows`, with two micro-batches on each replica."""
    local = rows[engine.groups.data_rank :: engine.groups.parallel.data_parallel_size]
    metrics = engine.forward_backward(take(batch, local), deal(len(local), 2), loss)
    grad_norm = engine.step().grad_norm
    holder = engine.groups.tensor_rank == 0
    gathered = gather(metrics if holder else {})
    whole = values_of(merge_metrics(gathered))
    total, clipped = (whole[f"{prefix}/{name}"] for name in names)

    return Update(total, grad_norm, clipped)


def run_engine(parallel: ParallelConfig, folders: dict[str, str], batch: Tensors) -> Outcome:
    """Run in a rank: run the step. Weights are those of its stage; outputs are those of the whole batch."""
    groups = start(parallel)
    optim = OptimConfig(
        lr=SETTINGS.lr,
        betas=list(SETTINGS.betas),
        eps=SETTINGS.eps,
        weight_decay=SETTINGS.weight_decay,
        clip_grad=SETTINGS.clip_grad,
        warmup_steps=SETTINGS.warmup_steps,
    )
    trained = {"optim": optim, "total_optimizer_steps": SETTINGS.num_updates}
    actor = build(groups, folders["lm"], temperature=SETTINGS.temperature, **trained)
    reference = build(groups, folders["reference"], temperature=SETTINGS.temperature)
    critic = build(groups, folders["critic"], head="value", **trained)
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)

    def score(engine: Any, key: str) -> torch.Tensor:
        return join_rows(rows, engine.forward(take(batch, rows), deal(len(rows), 2)), num_rows)[key]

    batch = {
        **batch,
        "old_log_probs": score(actor, "log_probs"),
        "ref_log_prob": score(reference, "log_probs"),
        "values": score(critic, "values"),
    }
    batch = add_advantages(batch)
    config = algorithm()
    actor_updates = []
    critic_updates = []

    for _ in range(SETTINGS.epochs):
        for mini_batch in map(list, SETTINGS.mini_batches):
            counts = MiniBatchCounts.of(batch["response_mask"][mini_batch])
            critic_loss = CriticLoss(value_loss=config.value_loss, counts=counts)
            critic_updates.append(
                update(critic, batch, mini_batch, critic_loss, "critic", ("vf_loss", "vf_clipfrac"))
            )
            actor_loss = ActorLoss(algorithm=config, counts=counts)
            actor_updates.append(
                update(actor, batch, mini_batch, actor_loss, "actor", ("pg_loss", "pg_clipfrac"))
            )

    return Outcome(
        hf_weights(actor),
        hf_weights(critic),
        actor_updates,
        critic_updates,
        score(actor, "log_probs"),
        score(critic, "values"),
    )


class Reference(NamedTuple):
    folders: dict[str, str]
    batch: Tensors
    before: tuple[Tensors, Tensors]  # actor and critic
    after: Outcome


def perturbed_copy(source: Path, target: Path) -> None:
    """Write the reference policy of a run in progress: close to the actor, but different."""
    model = load_lm(source)
    generator = torch.Generator().manual_seed(5)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)

    model.save_pretrained(target)


@pytest.fixture(scope="module", params=["qwen2", "qwen3-tied"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder / "lm")
    perturbed_copy(folder / "lm", folder / "reference")
    save_critic(folder / "lm", folder / "critic")
    folders = {key: str(folder / key) for key in ("lm", "reference", "critic")}
    models = (load_lm(folder / "lm"), load_critic(folder / "critic"))
    before = tuple(
        {name: parameter.detach() for name, parameter in model.named_parameters()} for model in models
    )
    batch = batch_with_hole()
    after = ppo_reference.run(folders, batch, SCORES, SETTINGS)

    return Reference(folders, batch, before, after)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_gives_the_weights_of_the_reference(
    reference: Reference, layout: str, rank_pool: RankPool
) -> None:
    parallel = LAYOUTS[layout]
    want = reference.after
    ranks: list[Outcome] = rank_pool.run(
        run_engine,
        world_size=parallel.world_size,
        parallel=parallel,
        folders=reference.folders,
        batch=reference.batch,
    )

    for model, before in zip(("actor", "critic"), reference.before, strict=True):
        got = merge([getattr(rank, model) for rank in ranks])
        expected = getattr(want, model)
        assert got.keys() == before.keys()
        changes = ({name: weights[name] - before[name] for name in before} for weights in (got, expected))
        assert_same(*changes, CHANGE_TOLERANCE)

    for rank in ranks:
        np.testing.assert_allclose(rank.actor_updates, want.actor_updates, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rank.critic_updates, want.critic_updates, rtol=1e-4, atol=1e-5)
        # A tied output layer on another stage than its embedding is a copy. A stale copy would show here.
        assert max_difference(rank.log_probs, want.log_probs) <= 1e-4
        assert max_difference(rank.values, want.values) <= 1e-4


def test_every_part_of_the_step_is_active(reference: Reference) -> None:
    """Gradient clipping, loss clipping and decay all change the result."""
    after = reference.after
    for updates in (after.actor_updates, after.critic_updates):
        assert all(step.grad_norm > 1.5 * SETTINGS.clip_grad for step in updates)
        assert updates[0].clipped == 0.0  # nothing has moved yet
        assert any(0.1 < step.clipped < 0.9 for step in updates)

    for before, weights in zip(reference.before, (after.actor, after.critic), strict=True):
        assert all(
            1e-4 < float((weights[name] - before[name]).norm() / before[name].norm()) < 0.1 for name in before
        )

    unseen = sorted(set(range(199)) - set(reference.batch["input_ids"].flatten().tolist()))
    embedding = "model.embed_tokens.weight"
    decayed = reference.before[1][embedding][unseen] * (1 - SETTINGS.lr * SETTINGS.weight_decay) ** (
        SETTINGS.num_updates - 0.5
    )

    # the first step warms up at lr / 2
    torch.testing.assert_close(after.critic[embedding][unseen], decayed, rtol=1e-5, atol=1e-7)
