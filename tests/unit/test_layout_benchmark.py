"""The pure parts of benchmarks/tuning/layouts.py: which layouts it draws, and how it compares times."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from transformers import Qwen2Config

from benchmarks.tuning.layout_ranks import PassSeconds, plan
from benchmarks.tuning.layouts import (
    MODEL,
    NUM_ROWS,
    PROMPT,
    RESPONSE,
    Comparison,
    Layout,
    compare,
    configuration,
    layouts,
    predict,
    regret,
    spearman,
)
from megarl.config.batch_arithmetic import Row
from megarl.config.roles import model_roles
from megarl.config.validate import read_architectures
from megarl.plan.step_time.device import PhaseTime, load_device
from megarl.plan.step_time.lengths import measured_lengths
from megarl.plan.step_time.role_time import role_work


def compared(predicted: float, measured: float) -> Comparison:
    layout = Layout((1, 1, 2, 1), False, 256, "none")
    return Comparison(layout, PhaseTime.of(products=predicted), measured)


def test_the_correlation_is_that_of_ranks_and_the_regret_that_of_the_choice() -> None:
    found = [compared(1, 2.2), compared(2, 2.0), compared(30, 3.0), compared(400, 4.0)]
    # One pair of neighbors is swapped: 1 - 6 * (1 + 1) / (4 * 15).
    assert spearman(found) == pytest.approx(0.8)
    assert regret(found) == pytest.approx(0.1)


def test_layouts_use_all_ranks_and_have_a_predicted_time(tmp_path: Path) -> None:
    Qwen2Config(**MODEL, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    rows = [Row(PROMPT, RESPONSE, number) for number in range(NUM_ROWS)]
    device = load_device("cpu")
    chosen = list(islice(layouts(4, str(tmp_path)), 8))
    assert len({str(layout) for layout, _ in chosen}) == 8
    for layout, config in chosen:
        assert config.actor.parallel.world_size == 4
        assert predict(config, device).seconds > 0
        # Rows of 64 tokens fill the micro-batches of each replica.
        data, context = layout.sizes[2:]
        rows_of_replica = NUM_ROWS // data
        in_each = min(rows_of_replica, layout.max_tokens * context // (PROMPT + RESPONSE))
        assert plan(config, rows).num_micro_batches == -(-rows_of_replica // in_each)


@pytest.mark.parametrize(
    ("context", "recompute", "layers"),
    [
        # A forward pass and a backward pass of twice its work, of 8 layers
        (1, "none", 24),
        (1, "selective", 24),
        (1, "full", 32),
        # Attention launches a layer more, and again if only it is repeated.
        (2, "none", 48),
        (2, "selective", 56),
        (2, "full", 64),
    ],
)
def test_what_is_recomputed_or_exchanged_is_launched(
    tmp_path: Path, context: int, recompute: str, layers: int
) -> None:
    Qwen2Config(**MODEL, architectures=["Qwen2ForCausalLM"]).save_pretrained(tmp_path)
    config = configuration(Layout((1, 1, 1, context), False, 256, recompute), str(tmp_path))
    role = next(role for role in model_roles(config) if role.name == "actor")
    lengths = measured_lengths(PROMPT, [RESPONSE])
    phases = role_work(config, role, read_architectures(config)[0]["actor"], lengths)
    [(_, _, num_launches, _)] = phases["update_actor"].stages
    assert num_launches == layers


def test_processor_seconds_are_compared_without_the_bubble() -> None:
    layout = compared(0, 0).layout
    predicted = PhaseTime.of(products=2.0, bubble=1.0)
    times = [PassSeconds(9.0, 3.0), PassSeconds(5.0, 2.0), PassSeconds(4.0, 1.0)]
    assert compare(layout, predicted, times, cpu_time=False) == Comparison(layout, predicted, 5.0)
    busy = compare(layout, predicted, times, cpu_time=True)
    assert (busy.predicted.seconds, busy.measured) == (2.0, 2.0)
