"""Test the checks of the first batch and of the first update, with numbers set by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import DType
from megarl.machine.errors import RunError
from megarl.roles.checks import FirstRatioCheck, FirstRatioError, LogProbCheck, LogProbMismatchError

NAN = float("nan")


def batch(*differences: float, version: int = 4) -> DataProto:
    """Return two rows sampled by version 4. The last token of the second row is padding, with NaN on both
    sides."""
    old = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    rollout = old + torch.tensor([[differences[0], differences[1]], [differences[2], NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    versions = torch.where(mask, 4, -1)
    tensors = {
        "old_log_probs": old,
        "rollout_log_probs": rollout,
        "response_mask": mask,
        "token_versions": versions,
    }

    return DataProto.from_dict(tensors, meta_info={"weight_version": version})


def test_the_mean_over_response_tokens_counts() -> None:
    LogProbCheck(0.2)(batch(0.0, -0.3, 0.29))
    with pytest.raises(LogProbMismatchError) as caught:
        LogProbCheck(0.2)(batch(0.0, -0.5, 0.4))
    message = str(caught.value)
    assert "difference| 0.3 over 3 tokens" in message
    assert "resharding.max_log_prob_difference=0.2" in message
    assert "First tokens of the responses: 0.2; later ones: 0.5; largest 0.5 at sample 0, token 1" in message
    assert "resharding.verify=always" in message


def test_only_the_first_batch_is_looked_at() -> None:
    check = LogProbCheck(0.2)
    check(batch(0.1, 0.1, 0.1))
    check(batch(9.0, 9.0, 9.0))


def test_tokens_by_older_weights_are_not_compared() -> None:
    check = LogProbCheck(0.2)
    old = batch(9.0, 9.0, 9.0, version=5)
    assert not check.wants(old)
    check(old)
    assert not check.passed  # nothing was checked
    old.tensors["token_versions"][1, 0] = 5
    with pytest.raises(LogProbMismatchError, match=r"difference\| 9 over 1 token"):
        check(old)


def test_a_nan_does_not_pass() -> None:
    with pytest.raises(LogProbMismatchError, match="largest nan at sample 1, token 0"):
        LogProbCheck(0.2)(batch(0.0, 0.0, NAN))


def first_update(low: float = 1.0, high: float = 1.0, mean: float = 0.0) -> dict[str, float]:
    """Return the metrics of the first update."""
    return {"actor/ratio_min": low, "actor/ratio_max": high, "actor/approx_kl": mean}


@pytest.mark.parametrize(
    "wrong",
    [
        first_update(low=0.9),
        first_update(high=1.1),
        first_update(mean=-0.001),
        first_update(high=math.nan),
        first_update(mean=math.nan),
    ],
)
def test_a_first_ratio_that_is_not_one_ends_the_run(wrong: dict[str, float]) -> None:
    with pytest.raises(RunError, match="the policy has not changed since it was scored"):
        FirstRatioCheck(DType.float32)(wrong)


def test_the_check_looks_at_the_first_mini_batch_of_the_first_step_alone() -> None:
    """Later mini-batches are of a changed policy. One without a token has no ratios, and the check waits for
    the next."""
    check = FirstRatioCheck(DType.float32)
    check({"actor/pg_loss": 0.0})
    with pytest.raises(FirstRatioError):
        FirstRatioCheck(DType.float32)(first_update(high=1.5))
    check(first_update(low=1 - 1e-6, high=1 + 1e-6, mean=1e-7))
    check(first_update(low=0.5, high=2.0, mean=0.3))
