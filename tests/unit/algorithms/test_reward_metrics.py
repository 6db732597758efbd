import pytest
import torch

from megarl.algorithms.metrics import reward_model_metrics


def test_by_hand():
    batch = {
        "reward_model_scores": torch.tensor([1.0, -2.0, 4.0]),
        "reward_function_scores": torch.tensor([0.5, 0.25, 0.0]),
        "reward_model_truncated": torch.tensor([True, False, False]),
        "reward_model_spells_special": torch.tensor([False, False, False]),
    }
    expected = {"reward/model/mean": 1, "reward/model/max": 4, "reward/model/min": -2}
    expected |= {"reward/functions/mean": 0.25, "reward/functions/max": 0.5, "reward/functions/min": 0}
    expected |= {"reward/model/truncated": 1 / 3, "reward/model/spells_special": 0}
    assert reward_model_metrics(batch) == pytest.approx(expected)


def test_without_a_model_there_is_nothing_to_say():
    assert reward_model_metrics({"token_level_scores": torch.ones(2, 3)}) == {}
