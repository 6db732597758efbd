"""Tables in a pipe and on a terminal.

In a pipe, every row is one line without trailing blanks, which grep finds. On a terminal, tables are as wide
as the terminal.
"""

from __future__ import annotations

import pytest

from megarl.cli.inspect.rehearse import collectives_table
from megarl.cli.main import main
from megarl.cli.tables.console import output_console, table
from megarl.cli.tables.placement import number_spans
from megarl.machine.errors import counted
from megarl.rehearse.dry_run.record import Collective, PhaseRecord, RankRecord

GROUP = "TENSOR_MODEL_PARALLEL_GROUP_OF_A_LONG_NAME_THAT_NEEDS_MORE_THAN_A_TERMINAL_HAS"


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("piped")
def test_collectives_in_a_pipe_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    calls = tuple(Collective("all_gather", GROUP, (0, 1), "bfloat16", 8, 16, "layers.py:1") for _ in range(3))
    phase = PhaseRecord(name="train again", held=0, peak=0, flops=0, collectives=calls, host_syncs=())
    record = RankRecord(
        rank=0, tensor_rank=0, pipeline_rank=0, context_rank=0, data_rank=0, num_parameters=1, phases=(phase,)
    )
    output_console().print(collectives_table(record))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if GROUP in line] == [
        ["train", "again", "all_gather", GROUP, "2", "bfloat16", "3", "0.0"]
    ]
    assert lines == [line.rstrip() for line in lines]


@pytest.mark.usefixtures("piped")
def test_long_cells_are_whole_in_a_pipe_and_folded_within_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = table("Findings", ("check", "message"), [("disk", "word " * 60)])
    output_console().print(drawn)
    assert ("word " * 60).strip() in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "70")
    output_console().print(drawn)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


@pytest.mark.usefixtures("piped")
def test_equal_placement_rows_are_folded(capsys: pytest.CaptureFixture[str]) -> None:
    """96 devices on 12 nodes: a row for each group, not one for each process."""
    assert main(["check", "--fast", "--all", "configs/llama3_70b_ppo.yaml"]) == 0
    out = capsys.readouterr().out
    begin = out.index("Placement: ")
    rows = [" ".join(line.split()) for line in out[begin : out.index("concurrent:", begin)].splitlines()]
    assert len(rows) < 12, rows
    (actor,) = (row for row in rows if row.startswith("actor actor "))
    assert actor.endswith("0-7 on each"), actor


def test_spans_join_consecutive_numbers_only() -> None:
    assert [number_spans([0]), number_spans([0, 1]), number_spans([0, 2, 3, 4, 7])] == [
        "0",
        "0-1",
        "0, 2-4, 7",
    ]


def test_one_of_a_thing_has_no_plural() -> None:
    words = [counted(number, name) for number in (1, 2) for name in ("rank", "process", "micro-batch")]
    assert words == ["1 rank", "1 process", "1 micro-batch", "2 ranks", "2 processes", "2 micro-batches"]
