"""tools/gpu_bundle.sh and what it puts into the bundle, without a package index: pip's downloads are a
stub's."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.requirement_files import listed, locked

ROOT = Path(__file__).parents[2]
SCRIPTS = ("gpu_bundle.sh", "gpu_bundle_run.sh")
SHOW = "import sys, lacked; print(lacked.__file__, sys.argv[1:])\n"


def wheel(folder: Path, name: str, version: str = "1") -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        about = f"{name}-{version}.dist-info"
        file.writestr(f"{name}.py", "")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_scripts_have_no_fault(name: str) -> None:
    shellcheck = [Path(sys.executable).with_name("shellcheck"), "--severity=style", ROOT / "tools" / name]
    found = subprocess.run(shellcheck, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert os.access(ROOT / "tools" / name, os.X_OK)


def test_the_carried_packages_have_hashes_and_leave_out_what_the_machine_has() -> None:
    carried = listed("bundle.txt")
    assert (
        {"megatron-core", "pytest", "pytest-xdist", "hypothesis", "psutil", "xxhash"}
        <= carried
        <= set(locked())
    )
    assert not carried & {"torch", "ray", "sglang"}


def make(tmp_path: Path, downloads: str) -> subprocess.CompletedProcess[str]:
    """downloads: what the stub of Python does in the folder of wheels."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nmkdir "$2" && cd "$2" && {downloads}\n'
    )
    python.chmod(0o755)
    command = [ROOT / "tools" / "gpu_bundle.sh", tmp_path / "made" / "bundle.tar.gz"]

    return subprocess.run(
        command, env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, check=False
    )


def test_a_bundle_has_the_tree_the_wheels_and_a_command(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no checkout, and the bundle is made of a commit")
    ended = make(tmp_path, "touch one.whl")
    assert ended.returncode == 0, ended.stderr

    with tarfile.open(tmp_path / "made" / "bundle.tar.gz") as archive:
        names = set(archive.getnames())
        assert archive.getmember("gpu-bundle/run.sh").mode & 0o111

    assert {
        "gpu-bundle/wheels/one.whl",
        "gpu-bundle/megarl/tests/gpu/table.py",
        "gpu-bundle/megarl/megarl/engine/engine.py",
    } <= names
    assert "gpu-bundle/megarl/configs/quickstart.yaml" in names


def test_a_bundle_that_is_too_large_is_refused_with_its_largest_files(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no checkout, and the bundle is made of a commit")
    ended = make(tmp_path, "head --bytes 64000000 /dev/urandom > large.whl")
    assert ended.returncode == 1
    assert "62914560 are allowed" in ended.stderr
    assert "64000000 wheels/large.whl" in ended.stderr
    assert not (tmp_path / "made" / "bundle.tar.gz").exists()


def test_the_command_installs_what_python_lacks_and_nothing_else(tmp_path: Path) -> None:
    for folder in ("wheels", "megarl/tests/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    wheel(tmp_path / "wheels", "lacked")
    wheel(tmp_path / "wheels", "pytest")  # which this Python has
    (tmp_path / "megarl/tests/gpu/table.py").write_text(SHOW)
    (tmp_path / "run.sh").write_bytes((ROOT / "tools" / "gpu_bundle_run.sh").read_bytes())
    environment = {**os.environ, "PYTHON": sys.executable}

    for _ in range(2):  # again over what the first left
        ended = subprocess.run(
            ["bash", tmp_path / "run.sh", "--rehearse"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.strip() == f"{tmp_path / 'packages' / 'lacked.py'} ['--rehearse']"

    assert not (tmp_path / "packages" / "pytest.py").exists()
