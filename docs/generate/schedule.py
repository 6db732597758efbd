"""Draw simulated schedules of engines and trainer at `rollout.max_staleness` 0, 1 and 2 (docs/asynchronous.md)."""

from __future__ import annotations

from docs.generate.svg import FILLS, Drawing
from megarl.rehearse.simulation.run import Script, Simulation

_PROMPTS = 4
_SLOTS = 4
_STEPS = 5
_TRAINING_S = 7.0
# one sample per prompt
_LENGTHS = [[length] for length in (9, 4, 3, 5, 3, 10, 4, 2, 5, 3, 2, 9, 4, 6, 8, 3, 2, 3, 9, 4)]
_SECOND = 8
_ROW = 18
_LEFT = 116
_COLOURS = [FILLS[role] for role in ("rollout", "actor", "critic", "reference", "reward")]  # one per step


def schedules() -> str:
    runs = {max_staleness: _simulated(max_staleness) for max_staleness in (0, 1, 2)}
    longest = max(one.clock.now_s for one in runs.values())
    height = _ROW * (_SLOTS + 1) + 52
    drawing = Drawing(
        round(_LEFT + _SECOND * longest + 10),
        height * len(runs),
        "Engines and trainer at max_staleness 0, 1 and 2",
    )

    for number, (max_staleness, run) in enumerate(runs.items()):
        top = 24 + height * number
        drawing.words(
            4, top, f"max_staleness {max_staleness}: {run.clock.now_s / _STEPS:.1f} s a step", bold=True
        )
        drawing.words(4, top + 26, "engine, 4 slots")
        drawing.words(4, top + 26 + _ROW * _SLOTS, "trainer")
        _draw_samples(drawing, run, top + 12)
        for step in run.steps:
            _bar(drawing, step.start_s, _TRAINING_S, top + 12 + _ROW * _SLOTS, step.number)

    return str(drawing)


def _simulated(max_staleness: int) -> Simulation:
    script = Script(
        lengths=_LENGTHS,
        prompts_per_step=_PROMPTS,
        total_steps=_STEPS,
        max_staleness=max_staleness,
        slots=_SLOTS,
        training_s=_TRAINING_S,
    )
    (simulation := Simulation(script)).run()
    return simulation


def _draw_samples(drawing: Drawing, run: Simulation, top: float) -> None:
    """Draw the samples in the order in which the engine receives them, each in the first free slot."""
    free_s = [0.0] * _SLOTS
    begun = [at_s for at_s, requests in run.engines.groups[0].submitted for _ in requests]

    for number, (start_s, (length,)) in enumerate(zip(begun, _LENGTHS, strict=True)):
        slot = next(slot for slot in range(_SLOTS) if free_s[slot] <= start_s + 1e-6)
        free_s[slot] = start_s + length
        _bar(drawing, start_s, length, top + _ROW * slot, 1 + number // _PROMPTS)


def _bar(drawing: Drawing, start_s: float, seconds: float, top: float, step: int) -> None:
    drawing.box(
        _LEFT + _SECOND * start_s,
        top,
        _SECOND * seconds - 1,
        _ROW - 2,
        _COLOURS[(step - 1) % len(_COLOURS)],
        str(step),
    )
