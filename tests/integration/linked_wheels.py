"""Build wheels that link to the packages installed here: pip resolves and installs them like the real ones,
in seconds and without copies.

A wheel has the name, version, requirements and entry points of an installed distribution. Instead of its
files it contains a `.pth` that points to a folder of links. An environment that pip creates from such wheels
contains exactly what its requirements name. Programs that are no entry points, such as uv's, become scripts
that execute the installed ones.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import Distribution, PackagePath, distributions
from pathlib import Path, PurePath

from megarl.config.layers import DRY_RUN_MODULES

WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def make_wheels(folder: Path, without: str) -> Path:
    """Build wheels of all distributions of this environment except `without`. Returns the folder of the
    wheels; they and the links are in `folder`."""
    installed = [*distributions(), *distributions(path=[str(DRY_RUN_MODULES)])]
    found = {name_of(each): each for each in installed if each.metadata["Name"] != without}
    owners: defaultdict[PurePath, set[str]] = defaultdict(set)

    for name, distribution in found.items():
        for file in _files(distribution):
            for path in (file, *file.parents):
                owners[path].add(name)

    (wheels := folder / "wheels").mkdir()
    for name, distribution in found.items():
        links = folder / "links" / name
        for path in sorted({_top(file, owners) for file in _files(distribution)}):
            (links / path).parent.mkdir(parents=True, exist_ok=True)
            (links / path).symlink_to(Path(str(distribution.locate_file(path))).resolve())
        _write(wheels, name, distribution, links)

    return wheels


def lock_of(wheels: Path) -> str:
    """Return the content of a lock for these wheels: versions and hashes."""
    lines = []
    for wheel in sorted(wheels.glob("*.whl")):
        name, version, *_ = wheel.name.split("-")
        lines.append(
            f"{name.replace('_', '-').lower()}=={version} \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
        )
    return "\n".join(lines) + "\n"


def name_of(distribution: Distribution) -> str:
    """Return the name as it appears in the file name of a wheel."""
    return re.sub(r"[-_.]+", "_", distribution.metadata["Name"])


@cache
def _recorded(distribution: Distribution) -> list[PackagePath]:
    """Return the files of a distribution, which importlib looks up one by one."""
    return distribution.files or []


def _files(distribution: Distribution) -> Iterator[PurePath]:
    """Yield the importable files and their data, without scripts and metadata."""
    for file in _recorded(distribution):
        if file.parts[0] not in ("..", "__pycache__") and not file.parts[0].endswith((".dist-info", ".pth")):
            yield PurePath(file)


def _programs(distribution: Distribution) -> Iterator[Path]:
    """Yield the executables, without those that pip writes for entry points."""
    written = {each.name for each in distribution.entry_points}
    folder = Path(sys.prefix) / "bin"
    for file in _recorded(distribution):
        if file.parts[0] == ".." and file.name not in written:
            path = Path(str(distribution.locate_file(file))).resolve()
            if path.parent == folder:
                yield path


def _top(file: PurePath, owners: dict[PurePath, set[str]]) -> PurePath:
    """Return the highest folder above the file to which no other distribution contributes; otherwise the
    file."""
    alone = [path for path in file.parents if path.parts and len(owners[path]) == 1]
    return alone[-1] if alone else file


def _write(wheels: Path, name: str, distribution: Distribution, links: Path) -> None:
    info = f"{name}-{distribution.version}.dist-info"
    content = {
        f"{info}/METADATA": distribution.read_text("METADATA") or "",
        f"{info}/WHEEL": WHEEL,
        f"{info}/entry_points.txt": distribution.read_text("entry_points.txt") or "",
        f"{name}.pth": f"{links}\n",
    }
    scripts = {
        f"{name}-{distribution.version}.data/scripts/{program.name}": f'#!/bin/sh\nexec {program} "$@"\n'
        for program in _programs(distribution)
    }
    content |= scripts
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))

    with zipfile.ZipFile(wheels / f"{name}-{distribution.version}-py3-none-any.whl", "w") as wheel:
        for path, text in content.items():
            file = zipfile.ZipInfo(path)
            file.external_attr = (0o100755 if path in scripts else 0o100644) << 16
            wheel.writestr(file, text)
