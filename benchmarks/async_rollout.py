"""Measure in virtual time how many more steps asynchronous rollout makes, for several `rollout.max_staleness`.

    python -m benchmarks.async_rollout

The schedule is that of a run (megarl/rehearse/simulation). Engines generate one token per tick in each slot,
regardless of load. A weight sync stops all of them for some ticks, and tokens of unfinished samples are not
recomputed after it. The result shows what the schedule gains, not how fast an engine or a trainer is.
"""

from __future__ import annotations

import random
from math import exp
from statistics import fmean

from megarl.config.schema import OnUpdate
from megarl.rehearse.simulation.run import Script, SimulatedRun, Simulation

STEPS = 60
PROMPTS = 32
SAMPLES = 8
PUSH_TICKS = 20
TICK_S = 0.01
# in all engines
ENGINES = 2
SLOTS = 64
# tokens of a sample
MEDIAN = 200
LONGEST = 4096
SIGMA = 1.0  # standard deviation of the logarithm of lengths
WITHIN_PROMPT = 0.7  # correlation of the logarithms of lengths among the samples of a prompt

SCHEDULES = (
    (0, OnUpdate.continue_),
    (1, OnUpdate.drain),
    (1, OnUpdate.continue_),
    (2, OnUpdate.continue_),
    (4, OnUpdate.continue_),
)


def lengths(steps: int, seed: int = 0) -> list[list[int]]:
    """Return the lengths of the samples of each prompt."""
    chance = random.Random(seed)
    drawn = []

    for _ in range(steps * PROMPTS):
        prompt = chance.gauss(0, 1) * WITHIN_PROMPT**0.5
        own = [chance.gauss(0, 1) * (1 - WITHIN_PROMPT) ** 0.5 for _ in range(SAMPLES)]
        drawn.append([max(1, min(LONGEST, round(MEDIAN * exp(SIGMA * (prompt + one))))) for one in own])

    return drawn


def simulate(
    training_ticks: int, max_staleness: int, on_update: OnUpdate = OnUpdate.continue_, *, steps: int = STEPS
) -> SimulatedRun:
    script = Script(
        lengths=lengths(steps),
        prompts_per_step=PROMPTS,
        total_steps=steps,
        max_staleness=max_staleness,
        on_update=on_update,
        num_engines=ENGINES,
        slots=SLOTS // ENGINES,
        token_s=TICK_S,
        training_s=training_ticks * TICK_S,
        push_s=PUSH_TICKS * TICK_S,
    )
    return Simulation(script).run()


def cases(steps: int = STEPS) -> dict[str, int]:
    """Return the duration of a step's training in ticks, by the name of what it is as long as."""
    generation = simulate(0, 0, steps=steps)
    return {
        "all slots, always in use": round(sum(map(sum, lengths(steps))) / steps / SLOTS),
        "a step's generation at 0": round(generation.step_s / TICK_S) - PUSH_TICKS,
    }


def main() -> None:
    for name, training_ticks in cases().items():
        print(f"\ntraining takes as long as {name}: {training_ticks:,} ticks")
        print("max_staleness  on_update   steps per time   trainer waits   slots in use   mean age   oldest")
        synchronous = simulate(training_ticks, 0)
        for max_staleness, on_update in SCHEDULES:
            outcome = simulate(training_ticks, max_staleness, on_update)
            gain = synchronous.step_s / outcome.step_s
            shares = f"{outcome.waiting:14.0%}  {outcome.busy:13.0%}"
            update = on_update.value if max_staleness else "-"
            ages = f"{fmean(outcome.ages):9.2f}  {max(outcome.ages):7}"
            print(f"{max_staleness:13}  {update:9}  {gain:14.2f}x  {shares}  {ages}")


if __name__ == "__main__":
    main()
