"""The pieces of `make gpu` and their table: what it says without a GPU, of tests and benchmarks that end in every
way, and after a call that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu import table
from tests.gpu.pieces import PIECES, Piece, missing_for, piece_of
from tests.gpu.record import (
    BEGAN,
    FAILED,
    PASSED,
    SKIPPED,
    Record,
    forget,
    read_records,
    write_record,
)

ENDINGS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_good(number, record_property):
    record_property("GB/s", number)

def test_bad():
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    raise OSError("no disk")

def test_error(broken): ...

@pytest.fixture
def unclean():
    yield
    raise OSError("not clean")

def test_unclean(unclean): ...

@pytest.mark.parametrize("number", [1, 2])
def test_left_out(number):
    pytest.skip("the moon is not full")
"""
KILLED = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent

def note(name):
    with open(HERE / "ran", "a") as file:
        file.write(name + "\\n")

def test_first():
    note("first")

def test_second():
    note("second")
    while not (HERE / "go").exists():
        time.sleep(0.01)

def test_third():
    note("third")
"""
ALONE = ("-c", "/dev/null", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def piece(*arguments: str) -> Piece:
    return Piece("does it work", 1, arguments, "nothing")


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Piece]:
    """Replace the pieces. They run in a folder of their own."""
    made: dict[str, Piece] = {}
    monkeypatch.setattr(table, "PIECES", made)
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu runs everything")
def test_without_a_gpu_everything_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for _ in range(2):
        assert table.main(["--record", str(tmp_path / "table.jsonl")]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("0 x torch sees no GPU")
        lines = printed.splitlines()
        assert [line.split()[:4] for line in lines if line.split()[:1] and line.split()[0] in PIECES] == [
            [name, "0", "0", "0"] for name in PIECES
        ]
        assert lines.count("    left out: torch sees no GPU") == len(PIECES)


def test_everything_for_a_gpu_needs_neither_ray_nor_sglang_to_begin_with() -> None:
    """Imported in a new process, in which neither can be imported."""
    files = {name for each in PIECES.values() for name in each.files}
    assert files == {path.name for path in (table.ROOT / "tests" / "gpu").glob("test_*.py")}
    measured = {each.benchmark[0] for each in PIECES.values() if each.benchmark}
    assert measured == {
        f"benchmarks.gpu.{path.stem}" for path in (table.ROOT / "benchmarks/gpu").glob("*.py")
    }
    modules = [f"tests.gpu.{Path(name).stem}" for name in sorted(files)] + sorted(measured)
    program = (
        f"import importlib, sys; sys.modules.update(ray=None, sglang=None); "
        f"[importlib.import_module(name) for name in {modules}]"
    )
    subprocess.run([sys.executable, "-c", program], cwd=table.ROOT, check=True)


def test_each_piece_can_be_rehearsed_and_is_short() -> None:
    for name, each in PIECES.items():
        assert each.rehearsal, name
        for argument in each.rehearsal:
            if argument.endswith(".py"):
                assert (table.ROOT / argument).is_file(), name
        assert each.unrehearsed, name
        assert bool(each.files) != bool(each.benchmark), name
        assert 0 < each.minutes * 60 <= table.LIMIT_S, name


def test_the_page_lists_the_pieces() -> None:
    page = (table.ROOT / "docs" / "gpu_run.md").read_text()
    rows = [f"| `{name}` | {each.minutes:g} | {each.doubt} |" for name, each in PIECES.items()]
    assert "\n".join(rows) + "\n\n" in page


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("test_engine.py::test_in_bfloat16[qwen2-transformer_engine-True-none]", "fused"),
        ("test_engine.py::test_in_bfloat16[qwen2-local-True-none]", "engine"),
        ("test_engine.py::test_in_bfloat16[deepseek_v3-all-transformer_engine-True-none]", "latent"),
        ("test_engine.py::test_in_bfloat16[gpt_oss-all-local-True-none]", "sinks"),
        ("test_engine.py::test_in_fp8_they_are_as_near[full]", "fp8"),
        ("test_engine.py::test_in_bfloat16[qwen3_next-all-local-True-none]", "delta"),
        ("test_engine.py::test_bfloat16_training_lowers_the_loss[local]", "engine"),
        ("test_weights.py::test_a_group_carries_weights_to_another_device", "nccl_2"),
        ("test_weights.py::test_checksums_are_those_of_the_cpu[shape0]", "weights"),
        ("test_sglang_models.py::test_two_ranks_of_qwen3_next[fused_norms]", "norms_2"),
        ("test_ranks.py::test_ranks[TP2+SPxDP4xEP8-8-float32]", "experts_8"),
    ],
)
def test_each_test_belongs_to_one_piece(test: str, expected: str) -> None:
    assert piece_of(f"tests/gpu/{test}") == expected


def test_every_test_of_every_file_is_in_a_piece_and_every_piece_has_tests() -> None:
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "tests/gpu"]
    listed = subprocess.run(command, cwd=table.ROOT, capture_output=True, text=True, check=True).stdout
    tests = [line for line in listed.splitlines() if line.startswith("tests/gpu/")]
    assert len(tests) > 100
    assert {piece_of(test) for test in tests} == {name for name, each in PIECES.items() if each.files}


def test_a_test_of_no_piece_is_refused() -> None:
    with pytest.raises(ValueError, match=r"test_new.py::test_it: 0 pieces of tests/gpu/pieces.py"):
        piece_of("tests/gpu/test_new.py::test_it")


def test_what_a_piece_needs_is_named() -> None:
    one = piece()
    assert missing_for(one, 1) == ""
    assert missing_for(one._replace(num_gpus=2), 1) == "needs 2 GPUs, and torch sees 1"
    lacking = one._replace(packages=("pytest", "no_such_package", "nor_this"))
    assert missing_for(lacking, 1) == "needs no_such_package, nor_this: not installed"


def test_tests_that_end_in_every_way(
    pieces: dict[str, Piece], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_endings.py").write_text(ENDINGS)
    pieces["endings"] = piece("test_endings.py", *ALONE, f"--rootdir={tmp_path}")
    pieces["others"] = piece("absent.py")
    assert table.main(["endings", "--rehearse"]) == 1
    printed = capsys.readouterr().out
    assert " ".join(printed.split("endings ")[-1].split()[:3]) == "2 3 2"
    for line in (
        "1  GB/s: 1",
        "2  GB/s: 2",
        "FAILED test_endings.py::test_error: OSError: no disk",
        "FAILED test_endings.py::test_unclean: OSError: not clean",
        "left out: 2 x the moon is not full",
    ):
        assert f"    {line}\n" in printed
    assert "FAILED test_endings.py::test_bad: AssertionError: one is not two" in printed
    assert "\nothers   not run" in printed

    # Each call adds its pieces to the table, and replaces what they had.
    assert table.main(["--piece", "others", "--rehearse"]) == 1
    assert table.main(["endings", "--rehearse"]) == 1
    printed = capsys.readouterr().out
    assert "    pytest ended with 4\n" in printed
    records = read_records(tmp_path / "build" / "gpu" / "rehearsal.jsonl")
    assert [key for key in records if not key[1]] == [("others", ""), ("endings", "")]
    assert table.main(["--show", "--rehearse"]) == 1


def test_a_call_that_is_killed_is_shown_and_continued(pieces: dict[str, Piece], tmp_path: Path) -> None:
    (tmp_path / "test_killed.py").write_text(KILLED)
    arguments = ("test_killed.py", *ALONE, f"--rootdir={tmp_path}")
    pieces["killed"] = piece(*arguments)
    path = tmp_path / "table.jsonl"
    options = ["-p", "tests.gpu.record", f"--record-to={path}", "--record-piece=killed"]
    write_record(path, Record("killed", "", BEGAN))
    process = subprocess.Popen([sys.executable, "-m", "pytest", *options, *arguments], cwd=tmp_path)
    ran = tmp_path / "ran"
    while not ran.exists() or "second" not in ran.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with path.open("a") as file:
        file.write('{"piece": "kil')  # cut off

    outcomes = {test.partition("::")[2]: record.outcome for (_, test), record in read_records(path).items()}
    assert outcomes == {"": BEGAN, "test_first": PASSED, "test_second": BEGAN}
    shown = table.show(read_records(path), ["killed"])
    assert "DID NOT END test_killed.py::test_second" in shown
    assert "the piece did not end: --resume continues it" in shown

    # The test that did not end comes last.
    (tmp_path / "go").touch()
    assert table.main(["--rehearse", "--resume", "--record", str(path)]) == 0
    assert ran.read_text().split() == ["first", "second", "third", "second"]
    assert {record.outcome for record in read_records(path).values()} == {PASSED}
    # Nothing is left to do.
    assert table.main(["--rehearse", "--resume", "--record", str(path)]) == 0
    assert len(ran.read_text().split()) == 4


def test_benchmarks_that_end_in_every_way(
    pieces: dict[str, Piece], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "good": "print('much\\n\\n12 GB/s\\n13 GB/s')",
        "bad": "print('3 GB/s')\nraise SystemExit(1)",
        "slow": "import time\nprint('3 GB/s', flush=True)\ntime.sleep(1000)",
    }
    path = tmp_path / "table.jsonl"
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
        pieces[name] = piece()._replace(benchmark=(name,))
        monkeypatch.setattr(table, "LIMIT_S", 1 if name == "slow" else 100)
        table.run_piece(name, path, "a machine", resumes=False, rehearses=False)
    found = {
        test: (record.outcome, record.said, record.numbers)
        for (_, test), record in read_records(path).items()
        if test
    }
    assert found == {
        "good": (PASSED, "", ["12 GB/s", "13 GB/s"]),
        "bad": (FAILED, "ended with 1", ["3 GB/s"]),
        "slow": (FAILED, "ended with no exit code: it was ended after 1 s", ["3 GB/s"]),
    }


def test_records_of_other_pieces_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "records" / "table.jsonl"
    assert read_records(path) == {}
    records = [
        Record("one", "a", PASSED, "", ["1"]),
        Record("two", "b", SKIPPED, "no", []),
        Record("one", "c", BEGAN),
    ]
    for record in records:
        write_record(path, record)
    forget(path, ["one"])
    assert list(read_records(path).values()) == [records[1]]
    assert os.listdir(path.parent) == ["table.jsonl"]


@pytest.mark.parametrize("options", [["latnet"], ["--piece", "latnet"]])
def test_an_unknown_piece_is_refused_with_those_that_exist(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        table.main(options)
    said = capsys.readouterr().err
    assert "no piece is named 'latnet'; the pieces are fused, fp8, latent" in said


def test_the_list_says_what_each_piece_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(PIECES)
    (norms,) = [line for line in lines if line.startswith("norms_2 ")]
    assert norms.endswith("needs 2 GPUs, sglang, sgl_kernel, torch_memory_saver")
