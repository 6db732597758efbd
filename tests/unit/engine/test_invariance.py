"""The gradient of a mini-batch does not depend on how it is split.

Covers micro-batches, token budgets, replicas, packing, padding and shared prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megarl.algorithms.losses import ActorLoss, CriticLoss, MiniBatchCounts
from megarl.batch.branches import EPISODE_TOKENS
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import (
    Aggregation,
    AlgorithmConfig,
    ExpertsConfig,
    KLConfig,
    KLEstimator,
    KLWhere,
    OptimConfig,
    ParallelConfig,
    PolicyLossConfig,
    Recomputation,
    Recompute,
    RecomputeModule,
    ValueLossConfig,
)
from megarl.data.packing import MicroBatchPlan, ReplicaMicroBatches, plan_micro_batches
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same
from tests.unit.engine.models import (
    load_lm,
    make_batch,
    reference_logits,
    save_critic,
    save_model,
    scores_of,
    with_one_prompt,
)
from tests.unit.engine.rank_side import (
    ALL_LAYOUTS,
    EXPERT_LAYOUTS,
    LAYOUTS,
    Tensors,
    build,
    hf_gradients,
    merge,
    start,
    take,
)

FAMILY = "yarn"  # with biases and a tied embedding
NUM_ROWS = 9
TOLERANCE = 1e-5  # relative to the tensor's norm
FLOOR = 1e-4  # relative to the whole gradient's norm
WAYS = ((True, False), (False, False), (True, True))  # packing and shared prompts
PROMPT_GROUPS = ((0, 5, 6, 3), (4, 2, 8))  # rows with one prompt
# Large enough to dominate the routers' gradients.
ROUTERS = ExpertsConfig(aux_loss_coefficient=10.0, z_loss_coefficient=1.0)
RECOMPUTED = {
    "whole layers": Recomputation(Recompute.full),
    "one layer of a stage": Recomputation(Recompute.full, num_layers=1),
    "experts": Recomputation(Recompute.selective, (RecomputeModule.mlp,)),
}
EPISODES = (0, 0, 0, 1, 2, 2, 3, 4, 4)  # of the rows, where episodes have several
LOSS_INPUTS = ("old_log_probs", "advantages", "ref_log_prob", "values", "returns")


class Split(NamedTuple):
    """One way to run the mini-batch."""

    plan: MicroBatchPlan
    packing: bool = True
    share_prompts: bool = False
    poisoned: bool = False  # NaN in every masked input of the loss, random ids as padding
    recomputation: Recomputation = Recomputation()


class Result(NamedTuple):
    gradients: Tensors
    metrics: dict[str, float]


def by_hand(*micro_batches: tuple[int, ...]) -> MicroBatchPlan:
    return MicroBatchPlan(
        ranks=(ReplicaMicroBatches(micro_batches=micro_batches),),
        num_rows=NUM_ROWS,
    )


def splits_of(parallel: ParallelConfig, lengths: list[int]) -> dict[str, Split]:
    """Return several splits per layout. Pipelines with virtual stages need an even number of micro-batches."""
    dp = parallel.data_parallel_size
    multiple = 2 if parallel.virtual_pipeline_parallel_size else 1

    def plan(**limit: int) -> MicroBatchPlan:
        return plan_micro_batches(lengths, dp, multiple_of=multiple, **limit)

    splits = {
        "one row each": Split(plan(sequences=1)),
        "two rows each": Split(plan(sequences=2)),
        "two rows each, padded": Split(plan(sequences=2), packing=False),
        "all rows": Split(plan(sequences=NUM_ROWS)),
        "all rows, padded": Split(plan(sequences=NUM_ROWS), packing=False),
        "a budget of 16 tokens": Split(plan(max_tokens=16)),
        "a budget of 40 tokens": Split(plan(max_tokens=40)),
        "a budget of 40 tokens, padded": Split(plan(max_tokens=40), packing=False),
    }
    for name in ("two rows each", "all rows", "a budget of 40 tokens"):
        splits[f"{name}, shared"] = splits[name]._replace(share_prompts=True)

    if dp == 1:
        splits["uneven"] = Split(by_hand((5,), (8, 0, 7, 3, 1, 6, 4, 2)))
        splits["uneven, padded"] = Split(splits["uneven"].plan, packing=False)

    if parallel.context_parallel_size > 1:  # splits packed rows
        return {name: split for name, split in splits.items() if split.packing}
    return splits


def loss_for(head: str, batch: Tensors, aggregation: Aggregation, episodes: tuple[int, ...] | None) -> Any:
    counts = MiniBatchCounts.of(batch["response_mask"], None if episodes is None else np.array(episodes))
    if head == "value":
        return CriticLoss(value_loss=ValueLossConfig(clip=0.2, aggregation=aggregation), counts=counts)
    kl = KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3, coefficient=0.1)
    policy = PolicyLossConfig(aggregation=aggregation)
    return ActorLoss(
        algorithm=AlgorithmConfig(policy_loss=policy, kl=kl, entropy_coefficient=0.05), counts=counts
    )


def poison(batch: Tensors) -> Tensors:
    generator = torch.Generator().manual_seed(9)
    garbage = torch.randint(0, 199, batch["input_ids"].shape, generator=generator)
    nan = {
        key: torch.where(batch["response_mask"], batch[key], float("nan"))
        for key in (*LOSS_INPUTS, EPISODE_TOKENS)
        if key in batch
    }

    return {
        **batch,
        **nan,
        "input_ids": torch.where(batch["attention_mask"].bool(), batch["input_ids"], garbage),
    }


def run_splits(
    parallel: ParallelConfig,
    folders: dict[str, str],
    batch: Tensors,
    splits: dict[str, Split],
    routers: ExpertsConfig,
    aggregation: Aggregation,
    episodes: tuple[int, ...] | None,
) -> dict[str, dict[str, Result]]:
    """Run in a rank: return, by head and split, the stage's gradients and the mini-batch's metrics."""
    groups = start(parallel)
    results: dict[str, dict[str, Result]] = {}

    for head, folder in folders.items():
        engines: dict[Any, Any] = {}
        for name, split in splits.items():
            way = {
                "packing": split.packing,
                "share_prompts": split.share_prompts,
                "recomputation": split.recomputation,
            }
            if (key := tuple(way.values())) not in engines:
                engines[key] = build(groups, folder, head=head, optim=OptimConfig(), routers=routers, **way)
            engine = engines[key]
            mine = split.plan.ranks[groups.data_rank]
            part = take(poison(batch) if split.poisoned else batch, mine.rows)
            masks = list(part["response_mask"].each())
            for row, is_filler in enumerate(mine.is_filler):
                masks[row] &= not is_filler
            metrics = (
                engine.forward_backward(
                    part, mine.local_micro_batches, loss_for(head, batch, aggregation, episodes)
                )
                | engine.router_metrics
            )
            gathered = gather(metrics if groups.tensor_rank == groups.context_rank == 0 else {})
            results.setdefault(head, {})[name] = Result(
                hf_gradients(engine), values_of(merge_metrics(gathered))
            )

    return results


class Setting(NamedTuple):
    folders: dict[str, str]
    batch: Tensors
    whole: dict[str, Result]  # head -> all rows in one packed micro-batch on one rank
    routers: ExpertsConfig
    aggregation: Aggregation = Aggregation.token_mean
    episodes: tuple[int, ...] | None = None  # of the rows; None: each row is one


@pytest.fixture(scope="module")
def setting(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("invariance")
    save_model(FAMILY, folder / "lm")
    save_critic(folder / "lm", folder / "value")
    return make_setting(rank_pool, {head: folder / head for head in ("lm", "value")}, ExpertsConfig())


@pytest.fixture(scope="module")
def with_experts(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    save_model("qwen3_moe", folder := tmp_path_factory.mktemp("experts"))
    return make_setting(rank_pool, {"lm": folder}, ROUTERS)


def make_setting(
    rank_pool: RankPool,
    folders: dict[str, Path],
    routers: ExpertsConfig,
    aggregation: Aggregation = Aggregation.token_mean,
    episodes: tuple[int, ...] | None = None,
) -> Setting:
    batch = with_one_prompt(make_batch(num_rows=NUM_ROWS), *PROMPT_GROUPS)
    batch["response_mask"][0, 2:4] = False  # tool output
    batch["response_mask"][7] = False  # a row without a token for the loss
    with torch.no_grad():
        log_probs = scores_of(reference_logits(load_lm(folders["lm"]), batch), batch)["log_probs"]
    generator = torch.Generator().manual_seed(3)
    noise = {key: torch.randn(log_probs.shape, generator=generator) for key in LOSS_INPUTS}
    near = {key: log_probs + 0.2 * noise[key] for key in ("old_log_probs", "ref_log_prob")}
    batch = {**batch, **noise, **near}
    if episodes is not None and aggregation is Aggregation.sequence_mean_token_mean:
        counts = batch["response_mask"].sum(1)
        totals = torch.zeros(NUM_ROWS, dtype=torch.int64).index_add(0, torch.tensor(episodes), counts)
        batch[EPISODE_TOKENS] = totals[list(episodes), None].expand(log_probs.shape).to(torch.float32)
    whole = {"whole": Split(by_hand(tuple(range(NUM_ROWS))))}
    paths = {head: str(path) for head, path in folders.items()}
    made = Setting(paths, batch, {}, routers, aggregation, episodes)
    found = run(rank_pool, made, ParallelConfig(), whole)

    return made._replace(whole={head: result for (head, _), result in found.items()})


def total_norm(gradients: Tensors) -> float:
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def run(
    rank_pool: RankPool, setting: Setting, parallel: ParallelConfig, splits: dict[str, Split]
) -> dict[tuple[str, str], Result]:
    """Return the whole model's gradients by (head, split)."""
    ranks = rank_pool.run(
        run_splits,
        world_size=parallel.world_size,
        parallel=parallel,
        folders=setting.folders,
        batch=setting.batch,
        splits=splits,
        routers=setting.routers,
        aggregation=setting.aggregation,
        episodes=setting.episodes,
    )
    return {
        (head, name): Result(
            merge([rank[head][name].gradients for rank in ranks]), ranks[0][head][name].metrics
        )
        for head in setting.folders
        for name in splits
    }


@pytest.mark.parametrize("layout", ["TP1", "DP2", "TP2+SP", "PP2", "PP2xVPP2", "CP2"])
def test_gradient_and_metrics_do_not_depend_on_the_split(
    setting: Setting, layout: str, rank_pool: RankPool
) -> None:
    lengths = setting.batch["attention_mask"].sum(1).tolist()
    parallel = ALL_LAYOUTS[layout]
    splits = splits_of(parallel, lengths)

    if parallel.data_parallel_size > 1:  # an odd number of rows, one each: a filler row must not count
        assert any(rank.num_fillers for rank in splits["one row each"].plan.ranks)

    assert_all_alike(setting, run(rank_pool, setting, parallel, splits))


def assert_all_alike(setting: Setting, results: dict[tuple[str, str], Result]) -> None:
    for (head, _), result in results.items():
        want = setting.whole[head]
        assert_same(result.gradients, want.gradients, TOLERANCE, floor=FLOOR * total_norm(want.gradients))
        assert result.metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "aggregation"),
    [
        ("DP2", Aggregation.sequence_mean_token_mean),
        ("CP2", Aggregation.sequence_mean_token_mean),
        ("DP2", Aggregation.sequence_mean_token_sum),
    ],
)
def test_losses_of_episodes_do_not_either(
    setting: Setting, layout: str, aggregation: Aggregation, rank_pool: RankPool
) -> None:
    """Rows of an episode are in different micro-batches and on different replicas; one has no token."""
    folders = {head: Path(folder) for head, folder in setting.folders.items()}
    rows = make_setting(rank_pool, folders, ExpertsConfig(), aggregation)
    episodes = make_setting(rank_pool, folders, ExpertsConfig(), aggregation, EPISODES)
    every = splits_of(ALL_LAYOUTS[layout], episodes.batch["attention_mask"].sum(1).tolist())
    splits = {
        name: every[name] for name in ("one row each", "two rows each", "a budget of 40 tokens, shared")
    }
    splits["poisoned"] = splits["two rows each"]._replace(poisoned=True)
    assert_all_alike(episodes, run(rank_pool, episodes, ALL_LAYOUTS[layout], splits))

    # Otherwise the splits would agree with rows that count as episodes, too.
    for head, whole in episodes.whole.items():
        loss = "critic/vf_loss" if head == "value" else "actor/pg_loss"
        assert whole.metrics[loss] != pytest.approx(rows.whole[head].metrics[loss], rel=1e-2)


@pytest.mark.parametrize("layout", ["DP2xEP2", "TP2+SPxEP2", "CP2xEP2", "PP2"])
def test_losses_of_routers_do_not_either(with_experts: Setting, layout: str, rank_pool: RankPool) -> None:
    """They do not depend on recomputation either.

    In a pipeline, backward of a micro-batch follows the next forward.
    """
    assert with_experts.whole["lm"].metrics["aux_loss"] > 1.1
    lengths = with_experts.batch["attention_mask"].sum(1).tolist()
    parallel = EXPERT_LAYOUTS[layout]
    every = splits_of(parallel, lengths)
    names = ("one row each", "two rows each, padded", "all rows, shared", "a budget of 40 tokens, shared")
    splits = {name: every[name] for name in names if name in every}

    if parallel.pipeline_parallel_size > 1:
        splits |= {
            how: splits["one row each"]._replace(recomputation=recomputed)
            for how, recomputed in RECOMPUTED.items()
        }

    assert_all_alike(with_experts, run(rank_pool, with_experts, parallel, splits))


@pytest.mark.parametrize("layout", ["TP1", "TP2+SP"])
def test_nan_in_masked_slots_changes_nothing(setting: Setting, layout: str, rank_pool: RankPool) -> None:
    plan = by_hand((5, 0), (8, 7, 3, 1), (6, 4, 2))
    splits = {
        f"{way} {poisoned}": Split(plan, packing=way[0], share_prompts=way[1], poisoned=poisoned)
        for way in WAYS
        for poisoned in (True, False)
    }
    results = run(rank_pool, setting, LAYOUTS[layout], splits)

    for head in setting.folders:
        for way in WAYS:
            clean = results[head, f"{way} False"]
            poisoned = results[head, f"{way} True"]
            assert clean.metrics == poisoned.metrics
            for name, gradient in clean.gradients.items():
                assert torch.equal(poisoned.gradients[name], gradient), name


def test_the_loss_is_not_trivial(setting: Setting) -> None:
    """Some tokens are clipped and some are not, and every parameter has a gradient above the floor."""
    assert 0.1 < setting.whole["lm"].metrics["actor/pg_clipfrac"] < 0.9
    assert 0.1 < setting.whole["value"].metrics["critic/vf_clipfrac"] < 0.9
    for result in setting.whole.values():
        norm = total_norm(result.gradients)
        assert all(float(gradient.norm()) > FLOOR * norm for gradient in result.gradients.values())
