"""Generate the tables and pictures of docs/learning_curves.md from the records of benchmarks/learning_curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite

from benchmarks.learning.bands import Band, band
from benchmarks.learning.records import Run, before_file, nothing_to_learn, read_runs
from benchmarks.learning.tasks import COMPARISONS, TASKS
from docs.generate.svg import FILLS, INK, Drawing
from megarl.machine.errors import counted

_WIDTH, _HEIGHT = 460, 240
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 16, 16, 44
_LONGEST = 90  # characters of an answer in a table
_COLOR = FILLS["actor"]
_MISSING = "not yet recorded"


def learning_curves() -> str:
    """Return the generated part of the page."""
    parts = [_summary()]
    for task in TASKS:
        parts += [f"## {task}", *_task(task)]
    parts += ["## Variants of sums compared"]
    for name in COMPARISONS:
        parts += [f"### {name}", *_comparison(name)]
    return "\n\n".join(parts)


def pictures() -> dict[str, partial[str]]:
    """Return the functions that draw the recorded tasks, by the path of the picture."""
    return {f"docs/{_picture(task)}": partial(draw, task) for task in TASKS if read_runs(task)}


def _picture(task: str) -> str:
    return f"drawings/learning_{task}.svg"


# ---- tables


def _summary() -> str:
    rows = [
        "| task | held-out score before | after | gain, with its interval | seeds |",
        "|---|---|---|---|---|",
    ]
    for task in TASKS:
        runs = read_runs(task)
        count = f"{len(runs)} of {TASKS[task].num_seeds}"
        cells = ["" if runs else _unrecorded(task).partition(":")[0], "", ""]
        if runs:
            before, after = (band([list(run.curve.values())[end] for run in runs]) for end in (0, -1))
            cells = [f"{before.mean:.3f}", f"{after.mean:.3f}", _interval(band([run.gain for run in runs]))]
        rows.append(f"| [{task}](#{task}) | {' | '.join(cells)} | {count} |")
    return "\n".join(rows)


def _unrecorded(task: str) -> str:
    """Say why a task has no runs: its score before training left nothing to reinforce, or they are still to come."""
    refusal = nothing_to_learn(task) if before_file(task).exists() else None
    return refusal or _MISSING


def _interval(value: Band) -> str:
    if not isfinite(value.half_width):
        return f"{value.mean:+.3f}, one seed"
    return f"{value.mean:+.3f} ({value.low:+.3f} to {value.high:+.3f})"


def _task(task: str) -> list[str]:
    about = TASKS[task]
    parts = [f"{about.about} An example: `{about.example}`"]
    before = _before(task)
    if before:
        parts.append(before)
    parts.append(f"<!-- takes minutes -->\n\n```bash\npython -m benchmarks.learning --task {task}\n```")

    runs = read_runs(task)
    if not runs:
        return [*parts, f"Runs: {_unrecorded(task)}."]

    parts.append(claim(runs))
    parts.append(
        f"![Held-out score of {task} by step: each seed, and their mean with its band]({_picture(task)})"
        if len(runs) > 1
        else f"![Held-out score of {task} by step, of one seed]({_picture(task)})"
    )
    parts.append(_runs_table(task, runs))
    parts.append(_made_with(runs))
    parts.append(_answers(runs[0]))
    return parts


def claim(runs: Sequence[Run]) -> str:
    """Say what the runs of a task show, which is nothing if the interval of their gains has 0."""
    gains = band([run.gain for run in runs])
    if len(runs) == 1:
        return f"One seed is recorded, with a gain of {gains.mean:+.3f}: there is no band yet, and no conclusion."
    said = f"{_interval(gains)} over {len(runs)} seeds"
    if gains.low > 0:
        return f"**The held-out score rises**, and the interval of its gain is above 0: {said}."
    if gains.high < 0:
        return f"**The held-out score falls**, and the interval of its gain is below 0: {said}."
    return f"The interval of the gain has 0, so nothing is concluded: {said}."


def _before(task: str) -> str | None:
    file = before_file(task)
    if not file.exists():
        return None
    evaluated = json.loads(file.read_text(encoding="utf-8"))
    metrics = evaluated["results"][task]["metrics"]
    written = [
        f"{name} {metrics[key]['value']:.3f} ± {metrics[key]['standard_error']:.3f}"
        for key, name in (("score/mean", "score"), ("pass@8", "pass@8"))
    ]
    return (
        f"Before training, 8 samples per held-out prompt at temperature 0.7: {' and '.join(written)}, with their "
        f"standard errors over the {evaluated['results'][task]['num_prompts']} prompts ([raw data]({_raw(task, 'before.json')}))."
    )


def _raw(name: str, file: str) -> str:
    return f"../benchmarks/learning_curves/{name}/{file}"


def _runs_table(name: str, runs: Sequence[Run]) -> str:
    steps = list(runs[0].curve)
    titles = ["before", *(f"step {step}" for step in steps[1:])]
    head = f"| seed | {' | '.join(titles)} | minutes | processor minutes | commit |"
    rows = [head, "|---" * (len(titles) + 4) + "|"]
    for run in runs:
        seed = run.about["seed"]
        cells = [
            f"[{seed}]({_raw(name, f'seed{seed}.jsonl')})",
            *(f"{run.curve[step]:.3f}" for step in steps),
        ]
        cells += [f"{run.about[key] / 60:.0f}" for key in ("wall_s", "processor_s")]
        cells.append(", ".join(f"`{commit[:8]}`" for commit in run.about["commits"]))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _made_with(runs: Sequence[Run]) -> str:
    places = dict.fromkeys(f"{run.about['processor']}, {run.about['cores']} cores" for run in runs)
    versions = ", ".join(f"{name} {version}" for name, version in runs[0].about["versions"].items())
    return (
        f"Processor: {'; '.join(places)}, shared with other programs. Seed {runs[0].about['seed']} ran with {versions}; "
        f"the SHA-256 of its configuration begins with `{runs[0].about['config_sha256'][:12]}`."
    )


def _answers(run: Run) -> str:
    """Return the same held-out questions, answered before training and after it."""
    first = min(sample["step"] for sample in run.samples)
    last = max(sample["step"] for sample in run.samples)
    before = [sample for sample in run.samples if sample["step"] == first]
    after = {
        (sample["prompt"], sample["ground_truth"]): sample for sample in run.samples if sample["step"] == last
    }
    rows = [f"| prompt | before | after {last} steps, seed {run.about['seed']} |", "|---|---|---|"]
    for sample in before:
        later = after[sample["prompt"], sample["ground_truth"]]
        rows.append(f"| {_cell(sample['prompt'])} | {_answer(sample)} | {_answer(later)} |")
    return "\n".join(rows)


def _answer(sample: Mapping[str, object]) -> str:
    return f"{_cell(str(sample['response']))} ({'right' if sample['score'] == 1 else 'wrong'})"


def _cell(text: str) -> str:
    """Return text as code in one line of a table."""
    text = " ".join(text.replace("`", "'").replace("|", "/").split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return f"`{text}`" if text else "nothing"


def _comparison(name: str) -> list[str]:
    compared = COMPARISONS[name]
    base = {run.about["seed"]: run for run in read_runs(compared.base)}
    head = f"| variant | seeds | held-out score after | difference to {compared.base} of the same seeds | conclusion |"
    rows = [head, "|---|---|---|---|---|"]
    for variant in compared.variants:
        rows.append(
            f"| {variant} | {' | '.join(compare(read_runs(variant), base, variant == compared.base))} |"
        )
    return [
        compared.about,
        f"<!-- takes minutes -->\n\n```bash\npython -m benchmarks.learning --compare {name}\n```",
        "\n".join(rows),
    ]


def compare(runs: Sequence[Run], base: Mapping[int, Run], is_base: bool) -> list[str]:
    """Return the cells of a variant. A conclusion needs an interval of the difference without 0."""
    if not runs:
        return ["0", _MISSING, "", ""]
    after = {run.about["seed"]: list(run.curve.values())[-1] for run in runs}
    scores = band(list(after.values()))
    score = f"{scores.mean:.3f}" + (f" ± {scores.half_width:.3f}" if len(runs) > 1 else "")
    cells = [str(len(runs)), score]
    if is_base:
        return [*cells, "", "the others are compared with it"]

    both = sorted({*after} & {*base})
    if not both:
        return [*cells, _MISSING, ""]
    difference = band([after[seed] - list(base[seed].curve.values())[-1] for seed in both])
    conclusion = "none: the interval has 0"
    if len(both) == 1:
        conclusion = "none: one seed"
    elif difference.excludes_zero:
        conclusion = "higher" if difference.mean > 0 else "lower"
    return [*cells, _interval(difference), conclusion]


# ---- pictures


def draw(task: str) -> str:
    """Draw the held-out score by step: the mean as a thick line, each seed as a thin one, and the band."""
    runs = read_runs(task)
    steps = list(runs[0].curve)
    bands = {step: band([run.curve[step] for run in runs]) for step in steps}
    drawing = Drawing(_WIDTH, _HEIGHT, f"Held-out score of {task} by step")

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / steps[-1]

    def y(score: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(max(score, 0.0), 1.0)

    for tenths in range(0, 11, 2):
        height = y(tenths / 10)
        drawing.line([(_LEFT, height), (_WIDTH - _RIGHT, height)], INK, 0.4)
        drawing.words(_LEFT - 30, height + 4, f"{tenths / 10:.1f}")
    for step in steps:
        drawing.words(x(step), _HEIGHT - _BOTTOM + 18, str(step), centered=True)
    drawing.words(
        (_LEFT + _WIDTH) / 2, _HEIGHT - 8, f"step ({task}, {counted(len(runs), 'seed')})", centered=True
    )

    if len(runs) > 1:
        upper = [(x(step), y(bands[step].high)) for step in steps]
        lower = [(x(step), y(bands[step].low)) for step in reversed(steps)]
        drawing.area([*upper, *lower], _COLOR)
    for run in runs:
        drawing.line([(x(step), y(score)) for step, score in run.curve.items()], _COLOR, 0.8)
    drawing.line([(x(step), y(bands[step].mean)) for step in steps], _COLOR, 3)
    return str(drawing)
