"""The gate of the first batch, with differences set by hand."""

from __future__ import annotations

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.trainers.log_prob_gate import LogProbGate, LogProbMismatchError

NAN = float("nan")


def batch(*differences: float) -> DataProto:
    """Two rows; the last token of the second one is padding, and holds NaN on both sides."""
    old = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    rollout = old + torch.tensor([[differences[0], differences[1]], [differences[2], NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    return DataProto.from_dict({"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask})


def test_the_mean_over_response_tokens_counts() -> None:
    LogProbGate(0.2)(batch(0.0, -0.3, 0.29))
    with pytest.raises(LogProbMismatchError) as caught:
        LogProbGate(0.2)(batch(0.0, -0.5, 0.4))
    message = str(caught.value)
    assert "difference| 0.3 over 3 tokens" in message
    assert "resharding.max_log_prob_difference=0.2" in message
    assert "First tokens of the responses: 0.2; later ones: 0.5; largest 0.5 at sample 0, token 1" in message
    assert "resharding.verify=always" in message


def test_only_the_first_batch_is_looked_at() -> None:
    gate = LogProbGate(0.2)
    gate(batch(0.1, 0.1, 0.1))
    gate(batch(9.0, 9.0, 9.0))


def test_a_nan_does_not_pass() -> None:
    with pytest.raises(LogProbMismatchError, match="largest nan at sample 1, token 0"):
        LogProbGate(0.2)(batch(0.0, 0.0, NAN))
