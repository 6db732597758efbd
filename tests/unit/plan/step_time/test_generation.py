"""Test the predicted schedule of generation against the simulator, which runs a run's own scheduler."""

from __future__ import annotations

import random

import pytest

from megarl.config.schema import OnUpdate
from megarl.plan.step_time.generation import DecodeModel, decode_s
from megarl.plan.step_time.lengths import assumed_lengths
from megarl.rehearse.simulation.run import Script, Simulation

LENGTHS = assumed_lengths(10, 200, 1000)
# Every decode step takes a second, as every token of the simulator does.
CONSTANT = DecodeModel(
    dense_s=0.0, experts_s=0.0, selected=0.0, token_s=0.0, context_s=0.0, layers_s=1.0, message_s=0.0
)
PROMPTS, SAMPLES, ENGINES, STEPS = 16, 4, 4, 16


def simulated_s(slots: int, max_staleness: int) -> float:
    """Return the seconds of a step in which training takes no time."""
    responses = list(LENGTHS.spread(PROMPTS * SAMPLES * STEPS))
    random.Random(0).shuffle(responses)
    script = Script(
        lengths=[responses[start : start + SAMPLES] for start in range(0, len(responses), SAMPLES)],
        prompts_per_step=PROMPTS,
        total_steps=STEPS,
        max_staleness=max_staleness,
        on_update=OnUpdate.continue_,
        num_engines=ENGINES,
        slots=slots,
        token_s=1.0,
        training_s=0.001,
        push_s=0.0,
    )
    return Simulation(script).run().step_s


@pytest.mark.parametrize("slots", [8, 16, 64])
@pytest.mark.parametrize("max_staleness", [0, 2, 4])
def test_a_step_takes_about_as_long_as_in_the_simulator(slots: int, max_staleness: int) -> None:
    rounds = max_staleness + 1
    of_engine = rounds * PROMPTS * SAMPLES // ENGINES
    responses = LENGTHS.spread(of_engine, ENGINES if max_staleness == 0 else 1)
    predicted_s = sum(decode_s(CONSTANT, responses, LENGTHS.prompt, slots)) / rounds
    assert predicted_s == pytest.approx(simulated_s(slots, max_staleness), rel=0.25)


def test_a_step_of_an_engine_with_stages_is_a_round_of_micro_batches() -> None:
    """Two stages decode ten sequences as two micro-batches of five, and one sequence alone at full latency."""
    costs = {"dense_s": 6.0, "experts_s": 0.0, "selected": 0.0, "token_s": 2.0, "context_s": 0.5}
    model = DecodeModel(**costs, layers_s=3.0, message_s=0.25, num_stages=2)
    assert model.parts(10, 40) == (10.0, 10.0, 3.0, 1.25)
    assert model.parts(1, 40) == (6.0, 20.0, 3.0, 0.25)
