"""The inert guard of CUDA devices (guard.cpp) for machines without a GPU.

It is compiled at first use, and loaded before torch. Imports no torch.
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
    """Load the guard into this process, which then has a CUDA device on which nothing happens.

    Must run before torch is imported.

    Raises:
        ValueError: There is no C++ compiler, or it rejects the source.
    """
    assert "torch" not in sys.modules, (
        "the guard must be loaded before torch, which may already have looked for its accelerator"
    )
    library = compiled_guard()
    libraries = _torch_dir() / "lib"

    # The guard links to the first two libraries. A CUDA build registers its own guard when the others are
    # loaded, so they have to come first.
    for name in ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"):
        if (libraries / name).exists():
            ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)

    ctypes.CDLL(str(library))


def compiled_guard() -> Path:
    """Return the library. It is compiled (about ten seconds) if the cache lacks it for this torch."""
    torch_dir = _torch_dir()
    torch_version = version("torch")
    identity = hashlib.sha256(_SOURCE.read_bytes() + torch_version.encode()).hexdigest()[:16]
    library = _cache_dir() / f"cuda_guard-{identity}.so"
    if library.exists():
        return library
    compiler = shutil.which("g++")

    if compiler is None:
        raise ValueError(
            "a dry run on fake devices compiles a guard for CUDA devices once, but there is no g++ on PATH; "
            "install it (apt install g++)"
        )

    library.parent.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}"]

    # Compile on the file system of the cache, so that the result can be renamed into place.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        linked = [f"-L{torch_dir / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = [compiler, *_FLAGS, *includes, str(_SOURCE), "-o", str(made), *linked]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(
                f"g++ cannot compile the guard of CUDA devices against torch {torch_version} (status "
                f"{run.returncode}):\n"
                f"{run.stderr[-2000:]}\nuse a g++ that supports C++20"
            )
        made.replace(library)  # atomic: others may be compiling it

    return library


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"


def _torch_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
