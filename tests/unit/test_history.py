"""The history of figures: rows are judged by bands and targets, and a fault names the commits that may cause it."""

from __future__ import annotations

import json
import subprocess

import matplotlib.image
import pytest

from benchmarks.history.__main__ import main
from benchmarks.history.rows import (
    BANDS,
    FOLDER,
    QUICKSTART,
    SCORE,
    Row,
    at_least,
    at_most,
    faults,
    read_rows,
    record,
    row_of_quickstart,
    verdicts,
)

# The middle of each band.
CURVE = {step: (low + high) / 2 for step, (low, high) in BANDS[QUICKSTART][SCORE].items()}


def _row(commit="a" * 40, *, curve=CURVE, ratios=None, has_changes=False, command=QUICKSTART):
    return Row(
        command, commit, has_changes, "2026-11-30 12:00", "an-x86 x 2", {SCORE: curve}, ratios or {}, {}
    )


def _git(folder, *arguments):
    settings = ("-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", folder, *settings, *arguments], check=True, capture_output=True)


def _run_in(folder, curve):
    run = folder / "outputs"
    run.mkdir()
    lines = [{"step": step, "val/score/mean": value} for step, value in curve.items()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_every_committed_row_is_good():
    rows = read_rows()
    assert len(rows[QUICKSTART]) >= 3
    assert len({row.commit for row in rows[QUICKSTART]}) == len(rows[QUICKSTART])
    assert not [fault for of_command in rows.values() for row in of_command for fault in faults(row)]


@pytest.mark.parametrize("step", BANDS[QUICKSTART][SCORE])
def test_each_step_of_the_curve_is_judged_at_both_ends(step):
    low, high = BANDS[QUICKSTART][SCORE][step]
    assert not faults(_row(curve=CURVE | {step: low}))
    assert not faults(_row(curve=CURVE | {step: high}))
    for value in (low - 0.001, high + 0.001, float("nan")):
        (fault,) = faults(_row(curve=CURVE | {step: value}))
        assert fault.startswith(
            f"{SCORE} at step {step} is {value:.3f}, outside its band of {low:g} to {high:g}"
        )


def test_a_curve_that_ends_early_or_is_missing_is_a_fault():
    assert faults(_row(curve={0: 0.5, 20: 0.8})) == [
        f"{SCORE} has no value at step {step}" for step in (40, 60, 70)
    ]
    assert len(faults(_row(curve={}))) == len(CURVE)


def test_ratios_are_judged_by_their_own_targets():
    ratios = {
        "met": at_least(1.5, 1.5),
        "slow": at_least(1.4, 1.5),
        "within": at_most(5, 5),
        "over": at_most(5.1, 5),
        "no number": at_least(float("nan"), 1),
    }
    assert faults(_row(command="benchmarks.x", curve={}, ratios=ratios)) == [
        "slow is 1.4, below its target of 1.5",
        "over is 5.1, above its limit of 5",
        "no number is nan, below its target of 1",
    ]


def test_the_commits_between_the_last_good_row_and_the_first_bad_one_are_named():
    flat = dict.fromkeys(CURVE, 0.5)
    rows = [_row(letter * 40) for letter in "abc"]
    assert not verdicts({QUICKSTART: rows})
    bad = [_row(letter * 40, curve=flat) for letter in "de"]
    (verdict,) = verdicts({QUICKSTART: [*rows, *bad]})
    assert verdict.startswith("make quickstart, eeeeeeee: held-out score at step 20 is 0.500, outside")
    assert "`git log cccccccc..dddddddd`" in verdict
    # A row that is good again ends it.
    assert not verdicts({QUICKSTART: [*rows, *bad, _row("f" * 40)]})
    (first,) = verdicts({QUICKSTART: bad})
    assert first.endswith("no earlier row is good")


def test_changes_and_missing_commits_are_said():
    flat = dict.fromkeys(CURVE, 0.5)
    (changed,) = verdicts({QUICKSTART: [_row(), _row(curve=flat, has_changes=True)]})
    assert "make quickstart, aaaaaaaa with changes" in changed
    assert "`git diff aaaaaaaa`" in changed
    (later,) = verdicts({QUICKSTART: [_row(), _row("b" * 40, curve=flat, has_changes=True)]})
    assert later.endswith("`git log aaaaaaaa..bbbbbbbb`, and the changes of bbbbbbbb with changes")
    (unknown,) = verdicts({QUICKSTART: [_row(), _row(None, curve=flat)]})
    assert "make quickstart, code without git" in unknown
    assert "2026-11-30 12:00" in unknown


def test_a_run_says_which_code_made_it(tmp_path):
    run = _run_in(tmp_path, CURVE)
    assert row_of_quickstart(run, tmp_path)[1:3] == (None, False)

    _git(tmp_path, "init", "--initial-branch", "main")
    (tmp_path / "code.py").write_text("a = 1\n")
    _git(tmp_path, "add", "code.py")
    _git(tmp_path, "commit", "--message", "Add code")
    clean = row_of_quickstart(run, tmp_path)
    assert len(clean.commit) == 40
    assert not clean.has_changes
    assert clean.curves == {SCORE: CURVE}
    # A folder in another repository is not that repository's code.
    assert row_of_quickstart(run, run)[1:3] == (None, False)

    (tmp_path / "code.py").write_text("a = 2\n")
    assert row_of_quickstart(run, tmp_path).has_changes


def test_the_gate_judges_a_run_and_writes_only_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("MEGARL_HISTORY", raising=False)
    before = {file: file.read_bytes() for file in FOLDER.glob("*.jsonl")}
    run = _run_in(tmp_path, CURVE)
    assert main(["check", "--run", str(run), "--tree", str(tmp_path)]) == 0
    assert "make quickstart" in capsys.readouterr().out

    written = tmp_path / "rows"
    monkeypatch.setenv("MEGARL_HISTORY", str(written))
    (run / "metrics.jsonl").write_text('{"step": 0, "val/score/mean": 0.5}\n')
    assert main(["check", "--run", str(run), "--tree", str(tmp_path)]) == 1
    assert "held-out score has no value at step 70" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in FOLDER.glob("*.jsonl")} == before

    record("benchmarks.tuning.published", ratios={"median error": at_most(0.16, 0.25)}, seconds=1.5)
    rows = read_rows(written)
    assert rows[QUICKSTART][0].curves == {SCORE: {0: 0.5}}
    (row,) = rows["benchmarks.tuning.published"]
    assert row.ratios == {"median error": {"value": 0.16, "at_most": 0.25}}
    assert row.figures == {"seconds": 1.5}
    assert sorted(file.name for file in written.iterdir()) == ["published.jsonl", "quickstart.jsonl"]


def test_rows_are_listed_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGARL_HISTORY", str(tmp_path))
    record("benchmarks.step", ratios={"TRL over megarl": at_least(1.7, 1.5)})
    record("benchmarks.step", ratios={"TRL over megarl": at_least(1.6, 1.5)})
    assert main(["show", "--folder", str(tmp_path)]) == 0
    assert "benchmarks.step" in capsys.readouterr().out
    for folder in (FOLDER, tmp_path):
        image = tmp_path / "drawn" / "history.png"
        assert main(["plot", "--folder", str(folder), "--output", str(image)]) == 0
        assert matplotlib.image.imread(image).std() > 0


@pytest.mark.parametrize("line", ["{broken", '{"command": "make quickstart"}', "[1]"])
def test_a_damaged_line_is_named(tmp_path, line, capsys):
    (tmp_path / "quickstart.jsonl").write_text(line + "\n")
    assert main(["check", "--folder", str(tmp_path)]) == 2
    assert "quickstart.jsonl, line 1: not a row of the history" in capsys.readouterr().err
