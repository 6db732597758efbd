"""The guard of CUDA devices is compiled once. Without a working compiler, the error contains a remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megarl.rehearse.dry_run.processes import compiled_guard


def compiler(folder: Path, script: str) -> str:
    """Return a folder in which `g++` is that shell script."""
    folder.mkdir()
    (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "g++").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", script))
    library = compiled_guard()
    assert library.parent == tmp_path / "cache" / "megarl"
    assert library.read_text() == "made\n"
    assert os.listdir(library.parent) == [library.name]
    monkeypatch.setenv("PATH", "")
    assert compiled_guard() == library


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"there is no g\+\+ on PATH"):
        compiled_guard()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", compiler(tmp_path / "bin", "echo unrecognized option -std=c++20 >&2; exit 3"))
    with pytest.raises(ValueError, match=r"status 3\):\nunrecognized option -std=c\+\+20"):
        compiled_guard()
    assert list((tmp_path / "cache" / "megarl").iterdir()) == []
