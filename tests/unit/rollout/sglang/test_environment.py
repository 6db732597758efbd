"""Test the environment that SGLang's processes find before they import anything, with real shared libraries
and the system's loader."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PREPARED = """
import os
from megarl.rollout.sglang import environment
environment.prepare_for({"device": "cuda", "tp_size": 1, "pp_size": 1, **ARGUMENTS})
print(os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH"))
"""


@pytest.mark.parametrize(("arguments", "value"), [({"enable_memory_saver": True}, "1"), ({}, "None")])
def test_cuda_graphs_are_released_by_engines_that_sleep(arguments: dict[str, bool], value: str) -> None:
    program = PREPARED.replace("ARGUMENTS", repr(arguments))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [value]


PROGRAM = """
import os, subprocess, sys
if sys.argv[2] == "prepared":
    from megarl.rollout.sglang import environment
    environment.prepare("cuda")
preloaded = {**os.environ, "LD_PRELOAD": sys.argv[1]}
print(os.environ.get("LD_LIBRARY_PATH"))
sys.exit(subprocess.run(["/bin/sh", "-c", "exit 0"], env=preloaded).returncode)
"""


def shared_library(path: Path, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "/dev/null",
        f"-Wl,-soname,{path.name}",
        "-Wl,--no-as-needed",
        "-o",
        str(path),
        "-x",
        "none",
    ]
    subprocess.run([*command, *options], check=True)

    return path


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Create a folder of packages with a CUDA runtime where pip puts it, and a library to preload that needs
    it, in a version that no system has."""
    runtime = shared_library(tmp_path / "packages" / "nvidia" / "cu13" / "lib" / "libcudart.so.99")
    info = tmp_path / "packages" / "nvidia_cuda_runtime-13.0.96.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-runtime\nVersion: 13.0.96\n")
    (info / "RECORD").write_text("nvidia/cu13/lib/libcudart.so.99,,\n")
    shared_library(tmp_path / "hook.so", str(runtime))

    return tmp_path / "packages"


@pytest.mark.parametrize("given", [None, "/opt/own"])
def test_a_preloaded_library_finds_the_cuda_runtime_that_pip_installed(
    packages: Path, given: str | None
) -> None:
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    variables.pop("LD_LIBRARY_PATH", None)
    variables |= {} if given is None else {"LD_LIBRARY_PATH": given}
    hook = str(packages.parent / "hook.so")

    def run(mode: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, hook, mode]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    # the loader ends a process whose preloaded library lacks a dependency
    assert run("as it is").returncode != 0
    ended = run("prepared")
    assert ended.returncode == 0, ended.stderr
    folder = packages / "nvidia" / "cu13" / "lib"

    # the user's folders come first
    assert ended.stdout.splitlines() == [str(folder) if given is None else f"{given}:{folder}"]
