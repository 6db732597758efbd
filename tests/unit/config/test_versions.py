"""The table of versions against the files that pin them, and against setup.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megarl.config.kinds import Hub
from megarl.config.versions import COUPLED, CUDA, PYTHON, REQUIRED, SGLANG, SGLANG_CPU
from tests.requirement_files import listed, locked

ROOT = Path(__file__).parents[3]


def test_the_lock_is_within_the_ranges() -> None:
    lock = locked()
    ranges = {
        canonicalize_name(Requirement(name).name): versions
        for name, versions in (REQUIRED | SGLANG | SGLANG_CPU | CUDA).items()
    }
    assert set(ranges) <= set(lock)
    assert [
        (name, lock[name], versions)
        for name, versions in ranges.items()
        if lock[name] not in SpecifierSet(versions)
    ] == []


def test_each_table_of_ranges_has_its_file() -> None:
    assert names(REQUIRED) <= listed("run.txt")
    assert names(SGLANG) <= listed("run.txt", "cpu_no_deps.txt") & listed("run.txt", "gpu.txt")
    assert names(SGLANG_CPU) <= listed("cpu.txt", "cpu_no_deps.txt")
    assert names(CUDA) <= listed("gpu.txt")


def names(ranges: dict[str, str]) -> set[str]:
    return {canonicalize_name(Requirement(name).name) for name in ranges}


def test_coupled_packages_are_in_the_lock() -> None:
    assert set(COUPLED) <= {*REQUIRED, *SGLANG}
    assert {name for names in COUPLED.values() for name in names} <= set(locked())


def test_the_page_installs_sglang_by_the_table_and_names_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"pip install --no-deps 'sglang{SGLANG['sglang']}'" in page
    setup = (ROOT / "setup.py").read_text()
    extras = re.findall(r'^        "([\w-]+)": \[', setup.partition("extras_require")[2], re.MULTILINE)
    named = re.findall(
        r"`([\w-]+)`", " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    )
    assert {*extras} - {"dev"} == {name for name in named if not name.startswith("requirements")}


def test_the_extra_of_a_hub_installs_the_version_of_its_adapter() -> None:
    setup = (ROOT / "setup.py").read_text()
    for hub in Hub:
        assert f'"{hub.value}": ["{hub.needs.package}"],' in setup
    assert all(hub.needs.package in (ROOT / "docs" / "agents.md").read_text() for hub in Hub)


def test_setup_installs_by_the_table(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    metadata = (tmp_path / "megarl.egg-info" / "PKG-INFO").read_text().splitlines()
    lines = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata
        if line.startswith("Requires-Dist:") and ";" not in line
    ]
    required = [Requirement(line) for line in lines]
    expected = [Requirement(f"{name}{versions}") for name, versions in REQUIRED.items()]
    assert sorted(map(str, required)) == sorted(map(str, expected))
    assert f"Requires-Python: {PYTHON}" in metadata
    assert any("[Megatron-Core](https://" in line for line in metadata)

    # a package index has no files of ours
    assert [line for line in metadata if re.search(r"\]\((?!https?:)", line)] == []
