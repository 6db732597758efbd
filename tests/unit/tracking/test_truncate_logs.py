"""Test that everything logged after a step is removed, including a partial line left by a kill, and that
earlier logs are unchanged."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.tracking.loggers import Tracker, clear, cut_after
from megarl.tracking.tracked_run import TrackedRun


def log(folder: Path, steps: range, resumed_after: int | None = None) -> None:
    """Log in a separate process: TensorBoard names files by the second in which they were created."""
    for number, path in enumerate(sorted((folder / "tensorboard").glob("*"))):
        os.rename(path, path.with_name(f"events.out.tfevents.{number:010d}.host"))
    tracker = Tracker(["jsonl", "tensorboard"], TrackedRun(output_dir=folder, resumed_after=resumed_after))

    for step in steps:
        tracker.log({"a": step / 3}, step)
        tracker.log_generations(step, [{"response": "é\u2028x"}, {"response": ""}])

    tracker.close()


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return the curve that TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, round(3 * event.value)) for event in events.Scalars("a")]


def test_all_files_end_with_the_step_and_go_on_after_it(tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    resumed = tmp_path / "resumed"
    log(straight, range(9))

    # killed three times
    for steps, resumed_after in ((range(6), None), (range(4, 8), 3), (range(2, 4), 1), (range(4, 9), 3)):
        if resumed_after is not None:
            cut_after(resumed, resumed_after)
        log(resumed, steps, resumed_after)

    for name in ("metrics.jsonl", "generations.jsonl"):
        assert (resumed / name).read_bytes() == (straight / name).read_bytes()
    assert curve(resumed) == curve(straight) == [(step, step) for step in range(9)]
    assert not list(resumed.rglob("*partial*"))


def test_torn_ends_are_cut(tmp_path: Path) -> None:
    log(tmp_path, range(3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "a": 1')
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.write_bytes(events.read_bytes()[:-5])
    cut_after(tmp_path, 3)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
    ]
    assert curve(tmp_path) == [(0, 0), (1, 1)]
    cut_after(tmp_path, 1)
    log(tmp_path, range(2, 4), resumed_after=1)
    assert curve(tmp_path) == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("name", ["metrics.jsonl", "generations.jsonl"])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"step": 1, "a"', "not JSON"),
        ("[" * 20_000, "not JSON (it is nested too deep)"),
        ("[1]", "expected an object with an integer 'step', found '[1]'"),
        ('{"step": "2"}', "expected an object with an integer 'step'"),
        ('{"a": 1}', "expected an object with an integer 'step'"),
    ],
)
def test_a_damaged_line_is_named_and_the_files_stay(tmp_path: Path, name: str, line: str, said: str) -> None:
    content = f'{{"step": 0}}\n{line}\n{{"step": 2}}\n'
    (tmp_path / name).write_text(content)
    where = re.escape(f"{tmp_path / name}, line 2: {said}")
    with pytest.raises(ValueError, match=f"^{where}.*; fix or delete that line$"):
        cut_after(tmp_path, 1)
    assert (tmp_path / name).read_text() == content


def test_a_run_that_logged_nothing_has_nothing_to_cut(tmp_path: Path) -> None:
    cut_after(tmp_path, 3)
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_clearing_removes_what_was_logged_and_nothing_else(tmp_path: Path) -> None:
    log(tmp_path, range(3))
    (tmp_path / "notes.txt").touch()
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "tensorboard"]
