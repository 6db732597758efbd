"""Setup of a forked process for its client: it takes over the client's state, runs the program, and ends."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tests.fork_server import aside, behind_path, forked_ray_processes, launcher
from tests.fork_server.client import DAEMON, SGLANG, TRAINING, end_as

_PR_SET_PDEATHSIG = 1
# Programs that start runs or Ray nodes by sys.executable; their child processes are forked as well.
_STARTERS = (
    "-m examples.resume",
    "-m torch.distributed.run",
    "-m megarl.cli.launch.job",
    "-m megarl.cli.launch.ray_node",
    "-m megarl launch",
)


@dataclass(frozen=True)
class Request:
    program: list[str]
    environment: dict[str, str]
    folder: str
    files: list[int]  # their numbers in the client
    ignored: list[int]  # signals
    client: int  # its process id
    parent: int  # that of the client's parent, which is the raylet of a Ray worker
    unbuffered: bool  # its output
    node: str  # of a Ray worker: the possible address of its node's server; otherwise empty


def become(request: Request, files: list[int], kind: str) -> None:
    """Take over the client's state.

    Args:
        files: Files of the request, as open in this process.
        kind: Kind of this process, and of those that it spawns.
    """
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    # Every process leads a group, like Ray workers. One that multiprocessing has spawned may make itself the leader
    # of a group later, which the leader of a session cannot.
    if _is_spawned(request.program):
        os.setpgid(0, 0)
    else:
        os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the server
    _take_files(files, request.files)
    os.environ.clear()
    os.environ.update(request.environment)
    _show_environment(request.environment)
    behind_path(request.client).write_text(str(os.getpid()))
    os.chdir(request.folder)

    # The objects are the server's, and write to the client's files.
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=request.unbuffered)
    if kind == DAEMON:
        return
    forked_ray_processes()

    if kind == SGLANG:
        multiprocessing.set_executable(launcher(kind))
    else:
        if " ".join(request.program[:3]).startswith(_STARTERS):
            sys.executable = launcher(TRAINING)
        # Processes that it spawns, such as scoring processes, import little, and are identified by process
        # id.
        sys.meta_path.insert(0, _SGLangComes())


def _is_spawned(program: list[str]) -> bool:
    return program[0] == "-c" and program[-1] == "--multiprocessing-fork"


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Open the files under `numbers`, replacing any that are open."""
    above = max([*files, *numbers]) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file in {0, 1, 2} - set(numbers):
        os.close(file)

    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _show_environment(environment: dict[str, str]) -> None:
    """Show the environment in /proc, by which processes are found."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[47:49])  # env_start and env_end
    block = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    assert len(block) <= end - start, "the environment is larger than what the server has room for"
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, block, len(block))


class _SGLangComes(MetaPathFinder):
    """Prepare for SGLang before it is imported. Processes that SGLang spawns are of its kind."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "megarl.rollout.sglang.environment":
            sys.meta_path.remove(self)
            aside.take()
            multiprocessing.set_executable(launcher(SGLANG))


def stay_a_test_process() -> None:
    """Make imports of a forked test process work as in a fresh one."""
    # SGLang, if at all, beside transformers.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SGLangComes)]
    # megarl hides the package from Megatron, which has been imported by now.
    if sys.modules.get("transformer_engine", ...) is None:
        del sys.modules["transformer_engine"]


def run(program: list[str]) -> NoReturn:
    """Run the program, and end as Python does, without freeing the objects one by one: a forked process would
    first have to copy them."""
    code = 0
    try:
        _run(program)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:  # noqa: BLE001  (the boundary of a process)
        traceback.print_exception(error)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    end_as(code)


def _run(program: list[str]) -> None:
    kind, *rest = program
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(kind).parent.resolve())
        runpy.run_path(kind, run_name="__main__")


def _exit_code(error: SystemExit) -> int:
    if isinstance(error.code, int) or error.code is None:
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
