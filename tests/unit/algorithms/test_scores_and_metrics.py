import math

import pytest
import torch

from megarl.algorithms.groups import place_scores
from megarl.algorithms.metrics import age_metrics, data_metrics
from megarl.batch.ragged import RaggedTensor

NAN = float("nan")


def test_scores_stand_on_the_last_token_that_the_model_wrote():
    # the second row has tool output in the middle
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    scores = place_scores([0.5, -1.0, 2.0], mask)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[0, 0.5, 0, 0], [0, 0, -1.0, 0], [0, 0, 0, 2.0]]


def test_a_row_without_tokens_is_refused_by_number():
    with pytest.raises(ValueError, match=r"rows \[1\] of 2 have no response token"):
        place_scores([1.0, 2.0], torch.tensor([[True, False], [False, False]]))


def test_data_metrics_by_hand():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    batch = {
        "response_mask": mask,
        "prompts": RaggedTensor.of_rows([[5, 6], [7, 8, 9]], torch.int32, on_left=True),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [-0.5, NAN, NAN]]),
        "token_level_rewards": torch.tensor([[0.1, 0.0, 1.0], [-0.5, NAN, NAN]]),
        "advantages": torch.tensor([[1.0, 2.0, 3.0], [-2.0, NAN, NAN]]),
        "returns": torch.tensor([[1.0, 1.0, 3.0], [3.0, NAN, NAN]]),
        "values": torch.tensor([[1.0, 1.0, 2.0], [2.0, NAN, NAN]]),
        "rollout_log_probs": torch.tensor([[math.log(0.5), math.log(0.2), 0.0], [0.0, NAN, NAN]]),
        "old_log_probs": torch.tensor([[math.log(0.6), math.log(0.5), 0.0], [0.0, NAN, NAN]]),
    }
    expected = {
        "response_length/mean": 2.0,
        "response_length/max": 3.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.5,
        "prompt_length/mean": 2.5,
        "prompt_length/max": 3.0,
        "prompt_length/min": 2.0,
        "critic/score/mean": 0.25,
        "reward/mean": 0.25,
        "critic/score/max": 1.0,
        "critic/score/min": -0.5,
        "critic/rewards/mean": 0.3,
        "critic/rewards/max": 1.1,
        "critic/rewards/min": -0.5,
        "critic/advantages/mean": 1.0,
        "critic/advantages/max": 3.0,
        "critic/advantages/min": -2.0,
        "critic/advantages/std": 3.5**0.5,  # deviations 0, 1, 2, -3
        "critic/returns/std": 1.0,
        "critic/values/std": 0.5,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 3.0,
        "critic/returns/min": 1.0,
        "critic/values/mean": 1.5,
        "critic/values/max": 2.0,
        "critic/values/min": 1.0,
        "critic/vf_explained_var": 1 - 0.25 / 1.0,  # returns - values = 0, 0, 1, 1
        "training/rollout_probs_diff_mean": 0.1,
        "training/rollout_probs_diff_max": 0.3,
        "training/rollout_log_probs_diff_mean": (math.log(1.2) + math.log(2.5)) / 4,
        "training/rollout_log_probs_diff_max": math.log(2.5),
    }
    assert data_metrics(batch, max_response_length=3) == pytest.approx(expected, rel=1e-5)
    assert data_metrics(batch, max_response_length=4)["response_length/clip_ratio"] == 0.0


def test_ages_by_hand():
    batch = {
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(),
        "token_versions": torch.tensor([[3, 4, 5], [5, -1, -1]], dtype=torch.int32),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, NAN, NAN]]),
        "old_log_probs": torch.tensor([[-1.5, -2.25, -3.125], [-4.0, NAN, NAN]]),
    }
    ages = {"rollout/age/mean": 0.75, "rollout/age/max": 2.0}
    gaps = {"current": (0.125 + 0) / 2, "older": (0.5 + 0.25) / 2}
    assert age_metrics(batch, 5) == ages | {
        f"training/rollout_log_probs_diff_mean/{name}": gap for name, gap in gaps.items()
    }
    del batch["old_log_probs"]
    assert age_metrics(batch, 5) == ages
    assert set(age_metrics(batch | {"token_versions": torch.full((2, 3), 5)}, 5).values()) == {0.0}


def test_only_what_the_batch_has_is_reported():
    assert set(data_metrics({"response_mask": torch.ones(1, 2).bool()}, 2)) == {
        f"response_length/{k}" for k in ("mean", "max", "min", "clip_ratio")
    }
