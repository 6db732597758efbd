"""Each adaptation of Megatron-Core to fake devices is still needed."""

from __future__ import annotations

import pytest

from megarl.engine.cpu_adaptations import MegatronEvidence
from megarl.engine.fake_cuda import EVIDENCE
from tests.unit.engine.test_cpu_adaptations import megatron_source


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.attribute)
def test_megatron_still_does_what_is_adapted(evidence: MegatronEvidence) -> None:
    assert evidence.source in megatron_source(evidence.module, evidence.attribute), (
        f"megatron.core.{evidence.module}.{evidence.attribute} no longer holds {evidence.source!r} "
        f"({evidence.reason}): "
        "see whether its adaptation in fake_cuda.py is still needed"
    )
