"""The inert guard of CUDA devices (guard.cpp) for a build of torch that has none: compiled at first use, loaded before torch.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_SOURCE = Path(__file__).with_name("guard.cpp")
_FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O0")


def load_guard() -> None:
    """Nothing for a build of torch for CUDA, which has its own. Must run before torch is imported.

    Raises ValueError where there is no C++ compiler, and where it refuses the source.
    """
    torch_dir = _torch_dir()
    if any((torch_dir / "lib").glob("libtorch_cuda*")):
        return
    assert "torch" not in sys.modules, "the guard comes too late: torch has been imported, and may have looked for its accelerator"
    library = compiled_guard()
    for name in ("libc10.so", "libtorch_cpu.so"):  # what the guard is linked with, for all to see
        ctypes.CDLL(str(torch_dir / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def compiled_guard() -> Path:
    """The library, compiled where the cache has none for this torch and this source: some ten seconds."""
    torch_dir, torch_version = _torch_dir(), version("torch")
    identity = hashlib.sha256(_SOURCE.read_bytes() + torch_version.encode()).hexdigest()[:16]
    library = _cache_dir() / f"cuda_guard-{identity}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")
    if compiler is None:
        raise ValueError(
            "a rehearsal on a CPU build of torch compiles a guard for CUDA devices once, and there is no g++ on PATH: install it "
            "(apt install g++), or use a CUDA build of torch, which needs none"
        )
    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        linked = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [compiler, *_FLAGS, *includes, str(_SOURCE), "-o", str(made), *linked]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(
                f"g++ cannot compile the guard of CUDA devices against torch {torch_version} (status {run.returncode}):\n"
                f"{run.stderr[-2000:]}\nuse a g++ that knows C++20, or a CUDA build of torch, which needs no guard"
            )
        made.replace(library)  # at once: others may be compiling it
    return library


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"


def _torch_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
