"""Test every preset and every policy loss on the real engine: the gradient of a mini-batch is independent of
how it is split and of the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megarl.algorithms.groups import place_scores
from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.load import load_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    Aggregation,
    AlgorithmConfig,
    CorrectionLevel,
    CovarianceConfig,
    KLConfig,
    KLEstimator,
    KLWhere,
    OptimConfig,
    ParallelConfig,
    PolicyLossConfig,
    PolicyLossKind,
    PPOConfig,
    RejectionConfig,
    RejectionEstimator,
    RolloutCorrectionConfig,
)
from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.roles.models import actor_rows
from megarl.trainers.advantages import AdvantageStep, correct_rollout
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same
from tests.unit.engine.models import load_lm, make_batch, reference_logits, save_model, scores_of
from tests.unit.engine.rank_side import ALL_LAYOUTS, Tensors, build, hf_gradients, merge, start, take

CONFIGS = Path(__file__).parents[2] / "configs"
NUM_ROWS = 8
RESPONSE_LENGTH = 9
GROUPS = ["a", "a", "a", "b", "b", "b", "c", "c"]
SCORES = [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.25, 0.75]
TOLERANCE = 1e-5  # relative to a tensor's norm
FLOOR = 1e-4  # relative to the whole gradient's norm
SPLITS: dict[str, dict[str, int]] = {
    "1 row": {"sequences": 1},
    "2 rows": {"sequences": 2},
    "all rows": {"sequences": NUM_ROWS},
}


def presets() -> dict[str, AlgorithmConfig]:
    """Return the presets as `algorithm=NAME` loads them."""
    files = sorted((CONFIGS / "algorithm").glob("*.yaml"))
    overrides = ["data.max_response_length=9"]
    return {
        file.stem: load_config(
            PPOConfig, str(CONFIGS / "quickstart.yaml"), [f"algorithm={file.stem}", *overrides]
        ).algorithm
        for file in files
    }


def policy_losses() -> dict[str, AlgorithmConfig]:
    """Return the kinds that are in no preset, with an entropy bonus and a KL term; clip_cov and kl_cov select
    tokens."""
    kl = KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3_straight_through, coefficient=0.1)
    covariance = CovarianceConfig(share=0.2, low=-9.0, high=9.0)
    made = {}

    for kind in PolicyLossKind:
        loss = PolicyLossConfig(
            kind=kind, aggregation=Aggregation.sequence_mean_token_mean, covariance=covariance
        )
        grouped = AdvantageConfig(estimator=AdvantageEstimator.rloo)
        made[kind.name] = AlgorithmConfig(
            advantage=grouped, policy_loss=loss, kl=kl, entropy_coefficient=0.01
        )

    return made


def corrections() -> dict[str, AlgorithmConfig]:
    rejection = RejectionConfig(estimator=RejectionEstimator.k3, high=0.02)
    decoupled = RolloutCorrectionConfig(level=CorrectionLevel.token, rejection=rejection)
    return {
        "decoupled": replace(presets()["grpo"], rollout_correction=decoupled),
        "off-policy limit": replace(
            presets()["grpo"], policy_loss=replace(presets()["grpo"].policy_loss, off_policy_limit=0.001)
        ),
        "bypass": replace(presets()["grpo"], rollout_correction=RolloutCorrectionConfig(bypass=True)),
    }


class Case(NamedTuple):
    algorithm: AlgorithmConfig
    rows: Tensors  # the actor's inputs for the mini-batch, padded


class Result(NamedTuple):
    """Result as one flat tensor, because thousands of small ones do not fit through a process queue."""

    names: tuple[tuple[str, tuple[int, ...]], ...]
    flat: torch.Tensor
    metrics: dict[str, float]

    @property
    def gradients(self) -> Tensors:
        parts = self.flat.split([torch.Size(shape).numel() for _, shape in self.names])
        return {name: part.view(shape) for (name, shape), part in zip(self.names, parts, strict=True)}


def run_cases(
    parallel: ParallelConfig, folder: str, cases: dict[str, Case], plans: dict[str, MicroBatchPlan]
) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Run in a rank. Returns (case, split) -> the fields of a Result."""
    groups = start(parallel)
    engine = build(groups, folder, optim=OptimConfig())
    results: dict[tuple[str, str], tuple[Any, ...]] = {}

    for name, case in cases.items():
        loss = ActorLoss(algorithm=case.algorithm, counts=MiniBatchCounts.of(case.rows["response_mask"]))
        for split, plan in plans.items():
            mine = plan.ranks[groups.data_rank]
            metrics = engine.forward_backward(
                take(case.rows, mine.rows), mine.local_micro_batches, loss, loss.extras
            )
            gathered = gather(metrics if groups.tensor_rank == groups.context_rank == 0 else {})
            gradients = hf_gradients(engine)
            names = tuple((key, tuple(value.shape)) for key, value in gradients.items())
            flat = (
                torch.cat([value.flatten() for value in gradients.values()]) if gradients else torch.zeros(0)
            )
            results[name, split] = (names, flat, values_of(merge_metrics(gathered)))

    return results


def scored_batch(folder: Path) -> DataProto:
    """Return everything that a batch has before its advantages, close to the model's own values."""
    tensors = make_batch(num_rows=NUM_ROWS, response_length=RESPONSE_LENGTH)
    tensors["response_mask"][0, 2:4] = False  # written by a tool
    with torch.no_grad():
        scores = scores_of(reference_logits(load_lm(folder), tensors), tensors)
    generator = torch.Generator().manual_seed(3)

    def near(scale: float) -> torch.Tensor:
        return scores["log_probs"] + scale * torch.randn(scores["log_probs"].shape, generator=generator)

    made = {
        "old_log_probs": near(0.1),
        "rollout_log_probs": near(0.2),
        "ref_log_prob": near(0.3),
        "values": near(1.0),
        "baseline_scores": torch.rand(NUM_ROWS, generator=generator),
        "token_level_scores": place_scores(SCORES, tensors["response_mask"]),
    }

    return DataProto.from_dict({**tensors, **made}, {"uid": GROUPS})


def case_of(algorithm: AlgorithmConfig, batch: DataProto, one_update: bool) -> Case:
    """Run the driver's processing of the batch."""
    corrected, _ = correct_rollout(batch, algorithm.rollout_correction)
    with_advantages, _ = AdvantageStep(algorithm, max_response_length=RESPONSE_LENGTH)(corrected)
    rows = actor_rows(with_advantages, algorithm, one_update=one_update, seed=1).tensors
    keys = ["input_ids", "attention_mask", *(key for key in rows if key not in ("prompts", "responses"))]

    return Case(algorithm, {key: rows[key].clone() for key in keys})


class Setting(NamedTuple):
    folder: str
    cases: dict[str, Case]
    lengths: list[int]
    whole: dict[str, Result]  # all rows in one micro-batch on one rank


@pytest.fixture(scope="module")
def setting(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("presets") / "lm"
    save_model("qwen2-tied", folder)
    batch = scored_batch(folder)
    several = {
        name: case_of(each, batch, one_update=False)
        for name, each in {**policy_losses(), **corrections(), **presets()}.items()
    }

    # One with a ratio per token, one with a ratio per response, one without gradient; the other presets have
    # the first kind.
    single = {
        f"{name}, one update": case_of(presets()[name], batch, one_update=True)
        for name in ("ppo", "gspo", "cispo")
    }
    cases = {**several, **single}
    lengths = batch.tensors["attention_mask"].sum(1).tolist()
    results = run(rank_pool, Setting(str(folder), cases, lengths, {}), ParallelConfig(), ["all rows"])

    return Setting(str(folder), cases, lengths, {name: result for (name, _), result in results.items()})


def run(
    rank_pool: RankPool, setting: Setting, parallel: ParallelConfig, splits: list[str]
) -> dict[tuple[str, str], Result]:
    plans = {
        split: plan_micro_batches(setting.lengths, parallel.data_parallel_size, **SPLITS[split])
        for split in splits
    }
    ranks = rank_pool.run(
        run_cases,
        world_size=parallel.world_size,
        parallel=parallel,
        folder=setting.folder,
        cases=setting.cases,
        plans=plans,
    )
    joined = {}

    for key in ranks[0]:
        parts = [Result(*rank[key]) for rank in ranks]
        gradients = merge([part.gradients for part in parts])
        names = tuple((name, tuple(value.shape)) for name, value in sorted(gradients.items()))
        joined[key] = Result(
            names, torch.cat([gradients[name].flatten() for name, _ in names]), parts[0].metrics
        )

    return joined


@pytest.mark.parametrize("layout", ["TP1", "DP2", "TP2", "CP2", "PP2"])
def test_the_gradient_is_the_same_however_the_mini_batch_is_cut(
    setting: Setting, layout: str, rank_pool: RankPool
) -> None:
    # Every split on one rank, and one of several micro-batches per rank in the other layouts: both differ
    # from `setting.whole` in the layout and in the split.
    splits = ["1 row", "2 rows"] if layout == "TP1" else ["2 rows"]
    results = run(rank_pool, setting, ALL_LAYOUTS[layout], splits)
    assert len(results) == len(setting.cases) * len(splits)

    for (name, split), result in results.items():
        want = setting.whole[name]
        try:
            assert_same(result.gradients, want.gradients, TOLERANCE, floor=FLOOR * float(want.flat.norm()))
            assert result.metrics == pytest.approx(want.metrics, rel=1e-5, abs=1e-6)
        except AssertionError as error:
            raise AssertionError(f"{name}, micro-batches of {split} in {layout}: {error}") from error


def test_every_case_has_a_gradient_of_its_own(setting: Setting) -> None:
    """No gradient is 0, and no two are equal except where expected: one update of presets that differ in
    nothing else."""
    norms = {name: float(result.flat.norm()) for name, result in setting.whole.items()}
    assert min(norms.values()) > 1e-2, norms
    assert {
        "ppo",
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "remax",
        "gspo",
        "cispo",
    } <= norms.keys()

    for kind in PolicyLossKind:
        assert norms[kind.name] != pytest.approx(
            norms["sapo" if kind.name != "sapo" else "cispo"], rel=1e-4
        ), kind


def test_one_update_has_ratios_of_one(setting: Setting) -> None:
    for name, result in setting.whole.items():
        ratios = (result.metrics["actor/ratio_min"], result.metrics["actor/ratio_max"])
        assert (ratios == (1.0, 1.0)) == name.endswith(", one update"), name
