"""Test that each adaptation of expert biases is still needed. `test_parity` compares the numbers."""

from __future__ import annotations

import pytest

from megarl.engine.cpu_adaptations import MegatronEvidence
from megarl.engine.expert_biases import EVIDENCE
from tests.unit.engine.test_cpu_adaptations import megatron_source


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.reason)
def test_megatron_still_does_what_is_adapted(evidence: MegatronEvidence) -> None:
    assert evidence.source in megatron_source(evidence.module, evidence.attribute), (
        f"megatron.core.{evidence.module}.{evidence.attribute} no longer holds {evidence.source!r} "
        f"({evidence.reason}): see whether its adaptation in expert_biases.py is still needed"
    )


def test_biases_of_row_parallel_layers_are_not_marked_as_sharded() -> None:
    source = megatron_source("tensor_parallel.layers", "RowParallelLinear")
    assert "set_tensor_model_parallel_attributes(self.bias" not in source
