"""Fork server for tests: processes are forked from one that has imported torch, Megatron and transformers,
instead of importing them again.

    with fork_server.server():  # once in a session
        ray.init()  # Ray's workers are forked, here and in programs that were forked
        subprocess.run([*fork_server.PYTHON, "-m", "megarl", "train", ...])

Such a process is new for its test: it has no state of another test. It differs from a fresh process in its
imports, so imports and the environment before them are tested in fresh processes. Without the server, every
process is fresh.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fork_server.client import ADDRESS, DAEMON, REHEARSAL, SGLANG, TRAINING

CLIENT = Path(__file__).with_name("stub.py")
SITE = Path(__file__).with_name("site")
# used like `python`: with a module, a script or a program text, and its arguments
PYTHON = [sys.executable, "-I", "-S", str(CLIENT)]
ROOM = "WARM_ROOM"  # environment variable of the server
WITHOUT_SGLANG = "WARM_WITHOUT_SGLANG"  # environment variable: no test will use it
# /proc shows at most the number of environment bytes with which a program was started
_ENVIRONMENT_BYTES = 2**16


@contextlib.contextmanager
def server() -> Iterator[None]:
    """Use the server of the process that started this one, if it has one; otherwise start one that ends with
    the block."""
    with contextlib.nullcontext() if ADDRESS in os.environ else own_server():
        # fails immediately if that does not work, instead of in many waiting tests
        subprocess.run([*PYTHON, "-c", ""], check=True)
        forked_ray_processes()
        yield


@contextlib.contextmanager
def own_server() -> Iterator[None]:
    """Start a server. It ends with the block, or with this process however that ends, and so do the processes
    that it has started."""
    with tempfile.TemporaryDirectory() as folder:
        write_launchers(Path(folder))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server.server", folder],
            cwd=Path(__file__).parents[2],
            env={**os.environ, ROOM: "." * _ENVIRONMENT_BYTES},
            stdin=subprocess.PIPE,  # closes when this process ends
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n", "the fork server did not start"
            os.environ[ADDRESS] = folder
            os.environ["PYTHONPATH"] = os.pathsep.join(
                [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            yield
        finally:
            os.environ.pop(ADDRESS, None)
            process.stdin.close()
            process.wait()
            process.stdout.close()


def write_launchers(folder: Path) -> None:
    """Write executables that replace Python to the folder of a server's sockets."""
    (folder / "bin").mkdir()
    kinds = (TRAINING, REHEARSAL, SGLANG)

    for kind, path in (
        (TRAINING, folder / "bin" / "python"),
        *((kind, folder / f"python-{kind}") for kind in kinds),
    ):
        path.write_text(
            f'#!/bin/sh\nexec {shlex.join(PYTHON)} {"" if kind == TRAINING else f"--{kind}"} "$@"\n'
        )
        path.chmod(0o755)


def search_path() -> str:
    """Return a PATH in which `python` is forked if the server exists; otherwise it is the tests' own. All
    other programs are the usual ones."""
    own = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.pathsep.join([f"{os.environ[ADDRESS]}/bin", *own] if ADDRESS in os.environ else own)


def launcher(kind: str) -> str:
    """Return an executable that replaces Python, for programs that start one without arguments of their
    own."""
    return f"{os.environ[ADDRESS]}/python-{kind}"


def behind(pid: int) -> int:
    """Return the process that does the work if `pid` is its stub; otherwise `pid` itself."""
    return int(path.read_text()) if ADDRESS in os.environ and (path := behind_path(pid)).exists() else pid


def behind_path(client: int) -> Path:
    return Path(os.environ[ADDRESS], f"behind-{client}")


def forked_ray_processes() -> None:
    """Make the Ray nodes that this process starts fork their workers and daemons. Ray has no setting for
    that."""
    for name in _CHANGES.keys() & sys.modules.keys():
        _change(sys.modules[name])
    sys.meta_path.insert(0, _WhenImported(_CHANGES.keys() - sys.modules.keys()))


# Patched names in Ray's modules: the script in which workers start, and the first words of a daemon's
# command.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "ray._private.ray_constants": {"SETUP_WORKER_FILENAME": str(CLIENT)},
    "ray._private.services": {
        "_build_python_executable_command_memory_profileable": lambda component, session_dir, unbuffered=True: [
            *PYTHON,
            f"--{DAEMON}",
        ]
    },
}


def _change(module: ModuleType) -> None:
    for name, value in _CHANGES[module.__name__].items():
        assert hasattr(module, name)
        setattr(module, name, value)


@contextlib.contextmanager
def spawned(kind: str = TRAINING) -> Iterator[None]:
    """Fork the processes that multiprocessing spawns in the block, if the server exists."""
    if ADDRESS not in os.environ:
        yield
        return

    executable = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(launcher(kind))

    try:
        yield
    finally:
        multiprocessing.set_executable(executable)


class _WhenImported(MetaPathFinder):
    """Finds the Ray modules that are patched, each once."""

    def __init__(self, names: Set[str]) -> None:
        self._names = set(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.remove(name)
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        spec.loader = _ThenChanged(spec.loader)

        return spec


class _ThenChanged(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _change(module)
