"""Test that a frozen policy that is only a row in the role table scores samples in a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config import roles as table
from megarl.roles.models import ABSENT
from megarl.roles.start import PPORoles
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config
from tests.unit.roles.test_role_table import EXAMINER

pytestmark = pytest.mark.usefixtures("ray_cluster")


def test_a_row_in_the_table_is_a_role_that_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROLES", (*table.ROLES, EXAMINER))
    save_inputs(tmp_path, num_layers=2)
    rows = DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows([[2, 5, 14], [2, 7, 8, 14]], torch.int32, on_left=True),
            "responses": RaggedTensor.of_rows([[6, 7, 1], [9, 4]], torch.int32),
            "response_mask": RaggedTensor.of_rows([[True] * 3, [True] * 2], torch.bool),
        }
    )
    scored: list[DataProto] = []

    def look(step: int, roles: PPORoles) -> None:
        assert roles.scorer("nobody") is ABSENT
        scored.extend(scorer.log_probs(rows).get() for scorer in (roles.scorer("examiner"), roles.reference))

    run = run_ppo(
        tiny_config(tmp_path, tmp_path / "out", trainer={"total_steps": 1, "validate_before": False}), look
    )
    (examiner, reference) = scored
    assert set(examiner.ragged) == {"examiner_log_prob"}
    assert torch.equal(examiner.ragged["examiner_log_prob"].flat(), reference.ragged["ref_log_prob"].flat())
    assert "timing_s/ref" in run.metrics[0]
