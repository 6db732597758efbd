"""Test that the wheel works in the environments that users get: `make test-wheel`.

With the newest and the oldest versions that megarl/config/versions.py allows, this installs
the wheel alone, does what a new user does (journey.py), and prints one table.

    python -m tests.wheel                                           # newest and oldest
    python -m tests.wheel --resolution newest
    python -m tests.wheel --record                                  # and writes the versions to megarl/config/tested_versions.json

An environment is about 8 GB, and is removed after its test. Each takes about ten minutes, and downloads some
GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from megarl.config.versions import REQUIRED, SGLANG, SGLANG_CPU
from megarl.doctor.software import RECORD
from megarl.machine.files import write_whole
from tests.requirement_files import lock_environment
from tests.wheel.environments import (
    ROOT,
    Environment,
    Resolution,
    build_wheel,
    install,
    installed_versions,
    variables,
)
from tests.wheel.journey import COMMANDS, Step, walk

LOGS = ROOT / "build" / "wheel"
_SHOWN = ("python", "torch", "megatron-core", "transformers", "sglang", "ray", "numpy")


def main(options: Sequence[str] | None = None) -> int:
    """Return 1 if a command failed or an environment could not be created."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.wheel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", nargs="+", default=["python3.12"], metavar="PROGRAM")
    parser.add_argument(
        "--resolution",
        nargs="+",
        type=Resolution,
        choices=list(Resolution),
        default=list(Resolution),
        metavar="NAME",
    )
    parser.add_argument(
        "--record", action="store_true", help="write the versions of all environments, if nothing failed"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the environments there, and use those that are there"
    )
    chosen = parser.parse_args(options)

    if absent := [python for python in chosen.python if shutil.which(python) is None]:
        parser.error(
            f"--python: {', '.join(absent)} is not on the path; give the interpreter's file, or leave it out"
        )

    shutil.rmtree(LOGS, ignore_errors=True)
    versions: dict[Environment, Mapping[str, str]] = {}
    steps: dict[Environment, list[Step]] = {}

    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder))
        for environment in (
            Environment(python, resolution) for python in chosen.python for resolution in chosen.resolution
        ):
            place = (chosen.keep or Path(folder)) / environment.name
            steps[environment] = []
            versions[environment] = {}
            print(f"{environment.name}: installing", flush=True)
            try:
                install(environment, wheel, place)
            except subprocess.CalledProcessError as error:
                print(f"{environment.name}: cannot be installed: {error}", flush=True)
                continue
            versions[environment] = installed_versions(place)
            steps[environment] = list(_told(environment, place))
            if not chosen.keep:
                shutil.rmtree(place)

    _show(versions, steps)
    is_good = all(
        len(taken) == len(COMMANDS) and all(step.status == 0 for step in taken) for taken in steps.values()
    )

    if is_good and chosen.record:
        ours = sorted(Requirement(each).name for each in (REQUIRED | SGLANG | SGLANG_CPU))
        minor = {each: {"python": found["python"].rpartition(".")[0]} for each, found in versions.items()}
        environments = {"lock": lock_environment(ours)} | {
            each.name: minor[each] | {name: found[name] for name in ours} for each, found in versions.items()
        }
        write_whole(RECORD, json.dumps(environments, indent=2) + "\n")

    return 0 if is_good else 1


def _told(environment: Environment, place: Path) -> list[Step]:
    """Return the steps of a journey, printing each when it is done, with the end of its output if it
    failed."""
    (logs := LOGS / environment.name).mkdir(parents=True)
    taken = []

    with tempfile.TemporaryDirectory() as folder:
        (home := Path(folder) / "home").mkdir()
        (work := Path(folder) / "work").mkdir()
        for step in walk(work, logs, variables(place, home)):
            print(f"{environment.name}: {step.name}: status {step.status}, {step.seconds:.0f} s", flush=True)
            taken.append(step)
            if step.status != 0:
                print("\n".join(step.log.read_text(errors="replace").splitlines()[-30:]), flush=True)
                break  # later commands need its results

    return taken


def _show(
    versions: Mapping[Environment, Mapping[str, str]], steps: Mapping[Environment, Sequence[Step]]
) -> None:
    table = Table(
        "", *(environment.name for environment in versions), title="The wheel in fresh environments"
    )
    for name in _SHOWN:
        table.add_row(name, *(found.get(name, "-") for found in versions.values()))
    table.add_section()

    for name in COMMANDS:
        cells = []
        for taken in steps.values():
            (step,) = [each for each in taken if each.name == name] or [None]
            cells.append(
                "not run"
                if step is None
                else f"{'ok' if step.status == 0 else f'FAILED ({step.status})'} {step.seconds:.0f} s"
            )
        table.add_row(name, *cells)

    Console(width=max(100, 24 * (1 + len(versions)))).print(table)
    print(f"output of every command: {LOGS.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
