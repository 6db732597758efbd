"""Test plotting, and reading metrics back with errors that name the line."""

from __future__ import annotations

import json

import matplotlib.image
import numpy as np
import pytest

from megarl.cli.inspect import plot as command
from megarl.cli.inspect.plot import moving_average, panels_with_data, plot_run
from megarl.cli.main import main
from megarl.tracking.metrics_file import MetricsFileError, Points, read_metrics


def _write(folder, *lines):
    (folder / "metrics.jsonl").write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    )
    return folder / "metrics.jsonl"


def test_points_are_sorted_by_step_and_finite(tmp_path):
    path = _write(
        tmp_path,
        {"step": 2, "a": 0.5, "b": 7},
        {"step": 1, "a": float("nan"), "b": float("inf")},
        {"step": 3, "a": 0.25},
    )
    assert read_metrics(path) == {"a": Points([2, 3], [0.5, 0.25]), "b": Points([2], [7.0])}


def test_the_later_line_of_a_step_counts(tmp_path):
    path = _write(tmp_path, {"step": 1, "a": 1.0, "b": 1.0}, {"step": 2, "a": 2.0}, {"step": 1, "a": 9.0})
    assert read_metrics(path) == {"a": Points([1, 2], [9.0, 2.0]), "b": Points([1], [1.0])}


def test_a_line_that_a_killed_run_left_unfinished_is_skipped(tmp_path):
    path = _write(tmp_path, {"step": 1, "a": 1.0}, '{"step": 2, "a')
    assert read_metrics(path) == {"a": Points([1], [1.0])}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ({"step": 1, "a": 1.0}, "{broken\n", {"step": 3, "a": 1.0}),
            r"metrics.jsonl, line 2: not JSON .*fix or delete",
        ),
        (("[1, 2]\n",), r"line 1: expected an object with an integer 'step', found '\[1, 2\]'"),
        (({"a": 1.0},), r"line 1: expected an object with an integer 'step'"),
        (("",), r"no complete step yet"),
    ],
)
def test_damaged_files_are_errors_that_name_the_line(tmp_path, lines, message):
    with pytest.raises(MetricsFileError, match=message):
        read_metrics(_write(tmp_path, *lines))


def test_a_binary_file_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(MetricsFileError, match="cannot be read as text"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_moving_average_at_the_ends_takes_what_there_is():
    # 4 values: half a window is 1; means of (1, 2), (1, 2, 6), (2, 6, 7), (6, 7)
    assert moving_average([1.0, 2.0, 6.0, 7.0]) == [1.5, 3.0, 5.0, 6.5]


def test_one_data_source_has_one_held_out_curve_and_several_have_their_mean_too():
    points = Points([0], [0.5])
    one = panels_with_data({"val/sums/score/mean": points, "val/score/mean": points})
    assert [list(panel.curves.values()) for panel in one] == [["training samples", "held out: sums"]]
    two = panels_with_data(
        {"val/sums/score/mean": points, "val/gcd/score/mean": points, "val/score/mean": points}
    )
    assert set(two[0].curves.values()) == {
        "training samples",
        "held out: sums",
        "held out: gcd",
        "held out: all",
    }


def _ppo_line(step):
    return {
        "step": step,
        "critic/score/mean": step / 100,
        "actor/entropy": 1.0 / step,
        "actor/grad_norm": 0.0,  # not positive, so a logarithmic axis would omit it
        "timing_s/step": 2.0,
        "timing_s/gen": 1.5,
    }


def test_the_png_holds_curves(tmp_path):
    _write(tmp_path, {"step": 0, "val/score/mean": 0.1}, *(_ppo_line(step) for step in range(1, 41)))
    written = plot_run(tmp_path)
    assert written == tmp_path / "curves.png"
    pixels = matplotlib.image.imread(written)[..., :3]
    blue = np.abs(pixels - np.array([0x1F, 0x6F, 0xB4]) / 255).max(axis=-1) < 0.02

    # 5 panels in 3 columns: each third of the upper half has a curve, and so do two thirds of the lower half
    height, width = blue.shape
    tiles = [
        [
            blue[row * height // 2 : (row + 1) * height // 2, column * width // 3 : (column + 1) * width // 3]
            for column in range(3)
        ]
        for row in (0, 1)
    ]
    assert [[bool(tile.sum() > 50) for tile in row] for row in tiles] == [
        [True, True, True],
        [True, False, False],
    ]


def test_command_draws_and_says_where(tmp_path, capsys):
    _write(tmp_path, {"step": 1, "sft/loss": 2.0})
    command.run([str(tmp_path)])
    assert capsys.readouterr().out == f"curves drawn to {tmp_path}/curves.png\n"


def test_command_answers_a_mistake_with_one_line(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--png"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"megarl report: {tmp_path}: no run has written here (no config.yaml, no metrics.jsonl); "
    )
    assert error.count("\n") == 1
    _write(tmp_path, {"step": 1, "nothing/known": 2.0})
    assert main(["report", str(tmp_path), "--png"]) == 2
    assert "only ['nothing/known']" in capsys.readouterr().err
