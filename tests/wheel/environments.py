"""Virtual environments with nothing but the wheel and the versions that a resolver chooses for it today."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from email.parser import BytesParser
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from zipfile import ZipFile

from packaging.requirements import Requirement

from megarl.config.versions import SGLANG

ROOT = Path(__file__).parents[2]
EXTRAS = ("quickstart", "sglang-cpu")
# Without its dependencies, most of which are for CUDA (docs/install.md).
_SGLANG = f"sglang{SGLANG['sglang']}"


class Resolution(Enum):
    newest = "newest"  # as `pip install` resolves
    # The oldest version of each requirement of the wheel, and the newest of their dependencies.
    lowest = "lowest"


class Environment(NamedTuple):
    """An environment. `python` is an interpreter, such as python3.12."""

    python: str
    resolution: Resolution

    @property
    def name(self) -> str:
        return f"{Path(self.python).name}-{self.resolution.value}"


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this repository in `folder`.

    setuptools keeps what it built before in `build/` of the repository, and would put files that have moved
    since into the wheel.
    """
    config = folder / "build.cfg"
    config.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")

    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--wheel-dir", str(folder), str(ROOT)], DIST_EXTRA_CONFIG=str(config))
    (wheel,) = folder.glob("megarl-*.whl")
    return wheel


def install(environment: Environment, wheel: Path, folder: Path) -> None:
    """Create a virtual environment in `folder`, and install the wheel with `EXTRAS` and SGLang. Raises
    CalledProcessError."""
    _run([environment.python, "-m", "venv", str(folder)])
    if environment.resolution is Resolution.newest:
        pip = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        ]
        _run([*pip, f"{wheel}[{','.join(EXTRAS)}]"])
        _run([*pip, "--no-deps", _SGLANG])
    else:
        # pip has no such resolution. Given the wheel itself, uv would take the newest of all its
        # requirements.
        uv = [
            str(Path(sys.executable).with_name("uv")),
            "pip",
            "install",
            "--quiet",
            "--python",
            str(folder / "bin" / "python"),
        ]
        _run([*uv, "--resolution", "lowest-direct", *requirements_of(wheel)])
        _run([*uv, "--resolution", "lowest-direct", "--no-deps", _SGLANG])
        _run([*uv, "--no-deps", str(wheel)])


def requirements_of(wheel: Path) -> list[str]:
    """Return the requirements of the wheel, with `EXTRAS`."""
    with ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = BytesParser().parsebytes(files.read(name))

    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    wanted = [
        each
        for each in required
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in EXTRAS)
    ]
    for each in wanted:
        each.marker = None

    return [str(each) for each in wanted]


def installed_versions(folder: Path) -> dict[str, str]:
    """Return the version of each distribution in the virtual environment, and of "python"."""
    program = """
import importlib.metadata, json, platform
found = {each.metadata["Name"].lower().replace("_", "-"): each.version for each in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), **found}))
"""
    return json.loads(_run([str(folder / "bin" / "python"), "-c", program]))


def variables(folder: Path, home: Path) -> dict[str, str]:
    """Return the environment variables of a user who has activated the virtual environment and set nothing
    else."""
    return {
        "PATH": f"{folder / 'bin'}:/usr/local/bin:/usr/bin:/bin",
        "VIRTUAL_ENV": str(folder),
        "HOME": str(home),
        "LANG": "C.UTF-8",
    }


def _run(command: Sequence[str], **variables: str) -> str:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment = {**inherited, **variables}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
