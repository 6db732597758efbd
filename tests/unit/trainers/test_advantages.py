"""Test the computation of advantages from scores, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CorrectionLevel,
    KLConfig,
    KLControllerConfig,
    KLControllerKind,
    KLWhere,
    OverlongConfig,
    RejectionConfig,
    RejectionEstimator,
    RejectionLevel,
    RolloutCorrectionConfig,
)
from megarl.trainers.advantages import AdvantageStep, correct_rollout, leave_out_late

MASK = torch.tensor([[True, True], [True, False]])
_OF_TOKENS = ("token_level_scores", "response_mask")
NAN = float("nan")  # values outside the mask must not count


def batch(**tensors: Tensor) -> DataProto:
    scores = torch.tensor([[0.0, 1.0], [0.5, NAN]])
    return DataProto.from_dict(
        {"token_level_scores": scores, "response_mask": MASK, **tensors}, {"uid": ["a", "a"]}
    )


def log_probs() -> dict[str, Tensor]:
    """KL (k1) per token: 0.1, 0.3 | 0.4. Row means: 0.2 and 0.4, with mean 0.3."""
    return {
        "old_log_probs": torch.tensor([[-1.0, -1.0], [-1.0, NAN]]),
        "ref_log_prob": torch.tensor([[-1.1, -1.3], [-1.4, NAN]]),
    }


def gae_config(kl: KLConfig) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=AdvantageConfig(gamma=1.0, lam=1.0), kl=kl)


def test_the_penalty_is_in_the_rewards() -> None:
    """Rewards with beta 0.5: -0.05, 1 - 0.15 | 0.5 - 0.2. Returns with gamma = lambda = 1 are sums of future
    rewards."""
    values = torch.tensor([[0.1, 0.2], [0.3, NAN]])
    result, metrics = AdvantageStep(gae_config(KLConfig(coefficient=0.5)), max_response_length=2)(
        batch(**log_probs(), values=values)
    )
    tensors = result.tensors
    assert torch.allclose(tensors["token_level_rewards"], torch.tensor([[-0.05, 0.85], [0.3, 0.0]]))
    assert torch.allclose(tensors["returns"], torch.tensor([[0.8, 0.85], [0.3, 0.0]]))

    # Before whitening: 0.7, 0.65 | 0.0; mean 0.45, deviations 0.25, 0.2, -0.45, variance (0.0625 + 0.04 +
    # 0.2025) / 2.
    deviation = 0.1525**0.5
    assert torch.allclose(tensors["advantages"], torch.tensor([[0.25, 0.2], [-0.45, 0.0]]) / deviation)
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.3, "actor/reward_kl_penalty_coeff": 0.5})


def test_the_controller_moves_after_the_step() -> None:
    """A KL of 0.3 is 50 % over the target, clipped to 20 %; two samples of a horizon of ten give beta *
    1.04."""
    controller = KLControllerConfig(kind=KLControllerKind.adaptive, target=0.2, horizon=10)
    step = AdvantageStep(gae_config(KLConfig(coefficient=0.5, controller=controller)), max_response_length=2)
    coefficients = [
        step(batch(**log_probs(), values=torch.zeros(2, 2)))[1]["actor/reward_kl_penalty_coeff"]
        for _ in range(3)
    ]
    assert coefficients == pytest.approx([0.5, 0.52, 0.5408])


def test_a_penalty_in_the_loss_leaves_rewards_and_controller_alone() -> None:
    controller = KLControllerConfig(kind=KLControllerKind.adaptive, target=0.2, horizon=10)
    step = AdvantageStep(
        gae_config(KLConfig(where=KLWhere.loss, coefficient=0.5, controller=controller)),
        max_response_length=2,
    )
    result, metrics = step(batch(**log_probs(), values=torch.zeros(2, 2)))
    assert torch.equal(result.tensors["token_level_rewards"], torch.tensor([[0.0, 1.0], [0.5, 0.0]]))
    assert metrics == {}  # a penalty that is not applied is not logged
    assert step.kl_controller.coefficient == 0.5


def test_a_sample_whose_scoring_failed_is_compared_with_no_other() -> None:
    """Prompt a has outcomes 1, 0.5 and one that failed. Without the failed one, the mean is 0.75 and the
    deviation 0.5 / sqrt 2, so the advantages are +-0.25 / 0.35355 = +-0.7071. Prompt b has one sample left,
    and nothing to compare it with. If failed samples counted as 0, a's first advantage would be 1 - 0.5 over
    a deviation of 0.5, and b's would be +-0.7071."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.5], [0.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    columns = {"token_level_scores": scores, "response_mask": torch.ones(5, 2, dtype=torch.bool)}
    failed = torch.tensor([True, True, False, True, False])
    made = DataProto.from_dict({**columns, "is_scored": failed}, {"uid": list("aaabb")})

    for rows in (made, of_tokens(made)):
        result, _ = AdvantageStep(algorithm, max_response_length=2)(rows)
        advantages = result.columns["advantages"]
        found = advantages if isinstance(advantages, Tensor) else advantages.padded()
        assert torch.allclose(
            found, torch.tensor([[1.0], [-1.0], [0.0], [0.0], [0.0]]).expand(5, 2) * 0.5**0.5, atol=1e-4
        )


def test_samples_whose_greedy_baseline_failed_get_no_advantage() -> None:
    """Prompt a: 1 - 0.25. The greedy response of prompt b could not be scored, so its score of 0 is not a
    baseline."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.remax), kl=KLConfig(where=KLWhere.none)
    )
    columns = {
        "token_level_scores": torch.tensor([[1.0], [1.0]]),
        "response_mask": torch.ones(2, 1, dtype=torch.bool),
    }
    baselines = {
        "baseline_scores": torch.tensor([0.25, 0.0]),
        "is_baseline_scored": torch.tensor([True, False]),
    }
    result, _ = AdvantageStep(algorithm, max_response_length=1)(
        DataProto.from_dict({**columns, **baselines}, {"uid": ["a", "b"]})
    )
    assert result.tensors["advantages"].tolist() == [[0.75], [0.0]]


def of_tokens(made: DataProto) -> DataProto:
    """Return the same batch with rows of tokens, all of whose slots are valid."""
    rows = {
        name: RaggedTensor.of_rows(list(made.tensors[name].numpy()), made.tensors[name].dtype)
        for name in _OF_TOKENS
    }
    return DataProto.from_dict({**rows, "is_scored": made.tensors["is_scored"]}, made.non_tensor_batch)


def test_grpo_compares_the_samples_of_a_prompt() -> None:
    """Outcomes 1 and 0.5: mean 0.75, standard deviation 0.5 / sqrt 2."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    result, metrics = AdvantageStep(algorithm, max_response_length=2)(batch())
    scaled = 0.25 / (0.5 / 2**0.5)
    assert torch.allclose(
        result.tensors["advantages"], torch.tensor([[scaled, scaled], [-scaled, 0.0]]), atol=1e-5
    )
    assert metrics == {}


def test_gae_without_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs the critic's `values`"):
        AdvantageStep(gae_config(KLConfig()), max_response_length=2)(batch(**log_probs()))


def test_a_response_near_the_limit_is_penalised_in_the_reward() -> None:
    """The buffer covers one token of two: the first response fills it, the second is outside. The scores are
    unchanged."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
        kl=KLConfig(where=KLWhere.none),
        overlong=OverlongConfig(buffer_share=0.5, penalty=0.75),
    )
    result, metrics = AdvantageStep(algorithm, max_response_length=2)(batch())
    assert torch.equal(result.tensors["token_level_rewards"], torch.tensor([[0.0, 0.25], [0.5, 0.0]]))
    assert float(result.tensors["token_level_scores"][0, 1]) == 1.0
    assert metrics == pytest.approx({"reward/overlong_penalty": -0.375, "reward/overlong_fraction": 0.5})


def test_several_rewards_are_normalised_apart_and_weighted() -> None:
    """One function returns 0 and 10, the other 1 and 0: each is +-1 / sqrt 2 of its group. With weights 1 and
    3 the second wins."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.gdpo), kl=KLConfig(where=KLWhere.none)
    )
    parts = batch(score_parts=torch.tensor([[10.0, 0.0], [0.0, 1.0]]))
    other = AdvantageStep(algorithm, max_response_length=2, score_weights=[3.0, 1.0])(parts)[0].tensors[
        "advantages"
    ]
    assert float(other[0, 0]) > 0
    weighted = AdvantageStep(algorithm, max_response_length=2, score_weights=[1.0, 3.0])(parts)[0].tensors[
        "advantages"
    ]
    assert bool((weighted[0] < 0).all())
    assert float(weighted[1, 0]) > 0


def test_a_greedy_baseline_is_taken_off() -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.remax), kl=KLConfig(where=KLWhere.none)
    )
    result, _ = AdvantageStep(algorithm, max_response_length=2)(
        batch(baseline_scores=torch.tensor([0.25, 0.75]))
    )
    assert torch.equal(result.tensors["advantages"], torch.tensor([[0.75, 0.75], [-0.25, 0.0]]))


def log_ratios() -> DataProto:
    """x = old - rollout: ln 4, 0 | 0."""
    return batch(
        old_log_probs=torch.tensor([[-1.0, -1.0], [-1.0, NAN]]),
        rollout_log_probs=torch.tensor([[-1.0 - math.log(4), -1.0], [-1.0, NAN]]),
    )


def test_a_correction_that_is_off_only_shows_its_diagnostics() -> None:
    result, metrics = correct_rollout(log_ratios(), RolloutCorrectionConfig())
    assert result.tensors.keys() == log_ratios().tensors.keys()
    assert metrics["rollout_correction/ratio_max"] == pytest.approx(4)


def test_weights_and_rejections_are_for_the_update() -> None:
    """Truncated at 2. The first response has k1 = -ln 4 over its tokens, below the limit of -1, and is
    excluded from the loss only."""
    rejection = RejectionConfig(
        estimator=RejectionEstimator.k1, level=RejectionLevel.sequence, low=-1.0, high=1.0
    )
    config = RolloutCorrectionConfig(level=CorrectionLevel.token, high=2.0, rejection=rejection)
    tensors = correct_rollout(log_ratios(), config)[0].tensors
    assert torch.allclose(tensors["rollout_weights"], torch.tensor([[2.0, 1.0], [1.0, 0.0]]))
    assert tensors["loss_mask"].tolist() == [[False, False], [True, False]]
    assert torch.equal(tensors["response_mask"], MASK)


def test_in_bypass_the_rollout_engine_has_the_old_log_probs() -> None:
    tensors = correct_rollout(log_ratios(), RolloutCorrectionConfig(bypass=True))[0].tensors
    assert torch.equal(tensors["old_log_probs"][MASK], log_ratios().tensors["rollout_log_probs"][MASK])
    assert "loss_mask" not in tensors


def test_tokens_that_are_too_old_are_left_out_of_the_loss() -> None:
    """One of three tokens is of version 3, two versions older than 5; another is already rejected."""
    versions = torch.tensor([[3, 4], [5, -1]])
    given = batch(token_versions=versions)
    given.meta_info["weight_version"] = 5
    left, metrics = leave_out_late(given, max_age=1)
    assert left.tensors["loss_mask"].tolist() == [[False, True], [True, False]]
    assert metrics == pytest.approx({"rollout/late": 1 / 3})
    rejected = batch(token_versions=versions, loss_mask=torch.tensor([[True, False], [True, False]]))
    rejected.meta_info["weight_version"] = 5
    left, metrics = leave_out_late(rejected, max_age=1)
    assert left.tensors["loss_mask"].tolist() == [[False, False], [True, False]]
    assert metrics == {"rollout/late": 0.5}
