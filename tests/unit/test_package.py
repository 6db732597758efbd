"""What setup.py puts into a wheel and into a source distribution, and that it is enough in a folder that has
nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megarl import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    setup(ROOT, "build_py", "--build-lib", str(folder))
    return folder


def setup(root: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "setup.py", "-q", *arguments], cwd=root, check=True, capture_output=True)


def test_a_wheel_has_every_file_of_the_package(built: Path) -> None:
    """Data files, what ships to be run, and the stubs of SGLang's processes too."""
    assert files(built / "megarl") == files_of_clone()


def test_a_wheel_from_the_source_distribution_has_the_same_files(tmp_path: Path) -> None:
    setup(ROOT, "egg_info", "--egg-base", str(tmp_path), "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("megarl-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert (source / "configs" / "quickstart.yaml").is_file()

    setup(source, "build_py", "--build-lib", str(tmp_path / "built"))
    assert files(tmp_path / "built" / "megarl") == files_of_clone()


def files_of_clone() -> set[Path]:
    """Return the files of the package, with those of the top-level `configs/` as a wheel has them."""
    configs = files(ROOT / "configs")
    assert len(configs) > 30
    return files(ROOT / "megarl") | {Path("configs") / name for name in configs}


def files(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_in_an_empty_folder_what_ships_is_found(built: Path, tmp_path: Path) -> None:
    """By the package as it is built, with nothing of the repository: a run that ships, by a preset that
    ships, with its own reward."""
    script = (
        "import sys, megarl, megarl.cli.main as cli; print(megarl.__file__); sys.exit(cli.main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(built), "COLUMNS": "200"}
    command = [sys.executable, "-c", script, "check", "--fast", "configs/quickstart.yaml", "algorithm=grpo"]
    checked = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith(str(built))
    assert f"1 x compute_score in {built.resolve() / 'megarl/recipes/quickstart/reward.py'}" in checked.stdout
    assert "OK, except for files that are not on this machine" in checked.stdout


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    released = re.findall(
        r"(?m)^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text()
    )
    assert released[0][0] == __version__
    assert released == sorted(
        released, key=lambda release: [int(part) for part in release[0].split(".")], reverse=True
    )
    assert [date for _, date in released] == sorted((date for _, date in released), reverse=True)
