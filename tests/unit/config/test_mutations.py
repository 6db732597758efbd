"""Damaged configurations get an answer: good, or what is wrong; never a traceback, and not after long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.config.mutations import ROOT, mishaps, mutation

NUM_CASES = 2000 if "MEGARL_SOAK" in os.environ else 120  # as tests/soak asks for


def test_each_gets_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert mishaps(range(NUM_CASES), tmp_path) == []


def test_a_seed_is_one_mutation(tmp_path: Path) -> None:
    one = mutation(7, tmp_path)
    file = (tmp_path / "run.yaml").read_bytes()
    assert (mutation(7, tmp_path), (tmp_path / "run.yaml").read_bytes()) == (one, file)
    assert mutation(8, tmp_path) != one or (tmp_path / "run.yaml").read_bytes() != file


def test_a_seed_does_not_depend_on_the_seeds_before_it(tmp_path: Path) -> None:
    def content(seed: int) -> bytes:
        mutation(seed, tmp_path)
        return (tmp_path / "run.yaml").read_bytes()

    # Seed 741821 inserts a value, and then changes a key inside it.
    seeds = (*range(50), 741821)
    assert [content(seed) for seed in seeds] == [content(seed) for seed in seeds]
