"""Old log-probs from the training pass give the same update as those of a separate pass, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megarl.algorithms.losses import ActorLoss, MiniBatchCounts
from megarl.algorithms.rollout_correction import correct
from megarl.batch.metrics import merge_metrics, values_of
from megarl.config.schema import (
    AlgorithmConfig,
    CorrectionKind,
    CorrectionLevel,
    KLConfig,
    KLEstimator,
    KLWhere,
    OptimConfig,
    RolloutCorrectionConfig,
)
from tests.ranks import RankPool, gather
from tests.unit.engine.comparison import assert_same
from tests.unit.engine.models import load_lm, make_batch, reference_logits, save_model, scores_of
from tests.unit.engine.rank_side import (
    LAYOUTS,
    Tensors,
    build,
    deal,
    hf_gradients,
    join_rows,
    merge,
    replica_rows,
    start,
    take,
)

TOLERANCE = 1e-5  # relative to a tensor's norm, and to a metric
CORRECTIONS = {
    "no correction": RolloutCorrectionConfig(),
    "a weight for each token": RolloutCorrectionConfig(level=CorrectionLevel.token, high=1.1),
    "a weight for each response": RolloutCorrectionConfig(
        level=CorrectionLevel.sequence, kind=CorrectionKind.mask, low=0.5, high=1.5
    ),
}


class Pass(NamedTuple):
    gradients: Tensors
    metrics: dict[str, float]


def run_both(layout: str, folder: str, batch: Tensors) -> dict[str, tuple[Pass, Pass]]:
    """Run in a rank: return, by correction, the results with old log-probs of a separate pass and without.

    The gradients are those of the stage.
    """
    groups = start(LAYOUTS[layout])
    engine = build(groups, folder, optim=OptimConfig())
    num_rows = len(batch["input_ids"])
    rows = replica_rows(groups, num_rows)
    micro_batches = deal(len(rows), 2)
    old = join_rows(rows, engine.forward(take(batch, rows), micro_batches, ()), num_rows)["log_probs"]

    def train(correction: RolloutCorrectionConfig, **extra: torch.Tensor) -> Pass:
        kl = KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3, coefficient=0.1)
        counts = MiniBatchCounts.of(batch["response_mask"])
        loss = ActorLoss(
            algorithm=AlgorithmConfig(kl=kl, rollout_correction=correction), counts=counts, with_entropy=True
        )
        metrics = engine.forward_backward(take({**batch, **extra}, rows), micro_batches, loss, loss.extras)
        gathered = gather(metrics if groups.tensor_rank == 0 else {})

        return Pass(hf_gradients(engine), values_of(merge_metrics(gathered)))

    rollout = old + 0.3 * batch["noise"]
    results = {}

    for name, correction in CORRECTIONS.items():
        weights = correct(old, rollout, batch["response_mask"], correction).weights
        before = {"old_log_probs": old} | ({} if weights is None else {"rollout_weights": weights})
        own = {} if weights is None else {"rollout_log_probs": rollout}
        results[name] = (train(correction, **before), train(correction, **own))

    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_model("qwen2-tied", folder := tmp_path_factory.mktemp("one_pass") / "lm")
    return folder


@pytest.mark.parametrize("layout", ["DP2", "TP2+SP", "PP2", "PP2xVPP2"])
def test_one_pass_gives_the_gradient_and_metrics_of_two(
    layout: str, folder: Path, rank_pool: RankPool
) -> None:
    batch = make_batch(num_rows=8)
    batch["response_mask"][0, 2:4] = False  # tool output
    generator = torch.Generator().manual_seed(3)
    batch |= {
        key: torch.randn(batch["response_mask"].shape, generator=generator)
        for key in ("noise", "advantages", "ref_noise")
    }

    with torch.no_grad():
        batch["ref_log_prob"] = (
            scores_of(reference_logits(load_lm(folder), batch), batch)["log_probs"] + 0.2 * batch["ref_noise"]
        )

    batch = {
        key: value.masked_fill(~batch["response_mask"], torch.nan) if value.is_floating_point() else value
        for key, value in batch.items()
    }
    ranks = rank_pool.run(
        run_both, world_size=LAYOUTS[layout].world_size, layout=layout, folder=str(folder), batch=batch
    )
    seen = set()

    for name in CORRECTIONS:
        two, one = ([rank[name][number] for rank in ranks] for number in (0, 1))
        assert_same(
            merge([each.gradients for each in one]),
            merge([each.gradients for each in two]),
            TOLERANCE,
            floor=1e-4,
        )
        assert one[0].metrics == pytest.approx(two[0].metrics, rel=TOLERANCE, abs=TOLERANCE)
        assert (
            one[0].metrics["actor/ratio_min"],
            one[0].metrics["actor/ratio_max"],
            one[0].metrics["actor/approx_kl"],
        ) == (1.0, 1.0, 0.0)
        assert one[0].metrics["actor/entropy"] > 0
        seen.add(round(one[0].metrics["actor/pg_loss"], 4))

    assert len(seen) == len(CORRECTIONS)
