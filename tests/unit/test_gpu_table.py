"""The table of `make gpu`: what it says without a GPU, and of tests and benchmarks that end in every way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import table

ENDINGS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_good(number, record_property):
    record_property("GB/s", number)

def test_bad():
    assert False

@pytest.fixture
def broken():
    raise OSError

def test_error(broken): ...

@pytest.mark.parametrize("number", [1, 2])
def test_left_out(number):
    pytest.skip("the moon is not full")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu runs everything")
def test_without_a_gpu_everything_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert table.main([]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "torch sees no GPU: everything is left out"
    files = [line.split() for line in lines if line.startswith(("tests/", "benchmarks/"))]
    tests = [f"tests/gpu/test_{name}.py" for name in ("engine", "kernels", "sglang", "weights")]
    names = [*tests, "benchmarks/gpu/engine.py", "benchmarks/gpu/weights.py"]
    assert files == [[name, "0", "0", "0"] for name in names]
    assert lines.count("    left out: torch sees no GPU") == len(names)


def test_everything_for_a_gpu_has_a_rehearsal_and_needs_neither_ray_nor_sglang_to_begin_with() -> None:
    """Imported in a new process, in which neither can be imported."""
    assert all((table.ROOT / "tests" / "unit" / name).is_file() for name in table.REHEARSALS)
    modules = [
        ".".join(file.relative_to(table.ROOT).with_suffix("").parts)
        for file in table.test_files() + table.benchmarks()
    ]
    program = (
        f"import importlib, sys; sys.modules.update(ray=None, sglang=None); "
        f"[importlib.import_module(name) for name in {modules}]"
    )
    subprocess.run([sys.executable, "-c", program], cwd=table.ROOT, check=True)


def test_tests_that_end_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "test_endings.py"
    file.write_text(ENDINGS)
    row = table.run_tests(
        file,
        "-c",
        "/dev/null",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:hypothesispytest",
        f"--rootdir={tmp_path}",
    )
    assert row == table.Row("test_endings.py", 2, 2, 2, ["GB/s: 1", "GB/s: 2"], ["2 x the moon is not full"])
    assert table.row_of("absent", tmp_path / "results.xml", 4) == table.Row(
        "absent", failed=1, left_out=["all of it: pytest ended with 4"]
    )
    assert (
        "test_endings.py       2       2        2\n    GB/s: 1\n    GB/s: 2\n    left out: 2 x the moon"
        in table.show([row])
    )


def test_benchmarks_that_end_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    (tmp_path / "good.py").write_text("print('much\\n\\n12 GB/s\\n13 GB/s')")
    (tmp_path / "bad.py").write_text("print('3 GB/s')\nraise SystemExit(1)")
    (tmp_path / "mute.py").write_text("raise SystemExit(2)")
    assert table.run_benchmark(tmp_path / "good.py") == table.Row(
        "good.py", passed=1, numbers=["12 GB/s", "13 GB/s"]
    )
    assert table.run_benchmark(tmp_path / "bad.py") == table.Row(
        "bad.py", failed=1, numbers=["ended with 1", "3 GB/s"]
    )
    assert table.run_benchmark(tmp_path / "mute.py") == table.Row(
        "mute.py", failed=1, numbers=["ended with 2"]
    )
