"""Run each rank in a process forked from one that has imported torch and Megatron.

A few ranks run at a time. Before torch, that process loads an inert guard of CUDA devices (guard.cpp),
which is compiled at first use. Imports no torch itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

from megarl.machine.garbage import long_lived
from megarl.machine.spawn import run_calls
from megarl.rehearse.dry_run.record import RankRecord, RankRequest, RehearsalError

# A rank and the phase that it has finished, its record, an error, or None: all ranks are done.
Answer = tuple[int, str] | RankRecord | Exception | None
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = cache / "megarl" / f"cuda_guard-{identity}.so"
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


def _torch_dir() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def rehearse_ranks(
    requests: Iterable[RankRequest],
    num_processes: int,
    prepare: Callable[[], None] | None = None,
    report: Callable[[int, str], None] = lambda rank, phase: None,
) -> Iterator[RankRecord]:
    """Simulate each requested rank in a process of its own and yield the records as they arrive.

    Args:
        num_processes: How many ranks run at the same time.
        prepare: Called in the process from which the ranks are forked. The default loads the guard and the
            engine.
        report: Called with a rank and the name of each phase that it has finished.

    Raises:
        ValueError: The guard cannot be compiled.
        RehearsalError: The process of a rank died.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_serve, args=(theirs, list(requests), num_processes, prepare or make_ready)
    )
    process.start()
    # If this end stayed open here too, the death of the process would never appear as an end of file.
    theirs.close()

    try:
        while (answer := _received(mine)) is not None:
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, tuple):
                report(*answer)
            else:
                yield answer
    finally:
        # If the caller stops early, this also ends the ranks, which are daemons of the process.
        process.terminate()
        process.join()


def _received(connection: Connection) -> Answer:
    try:
        return connection.recv()
    except EOFError:
        return RehearsalError(
            "the process of the dry run ended without a message; its standard error, above, may show why"
        )


def make_ready() -> None:
    """Load the guard and the engine in a process that has not imported torch."""
    os.environ["OMP_NUM_THREADS"] = "1"
    load_guard()
    with long_lived():
        from megarl.rehearse.dry_run import rank

        rank.prepare()


def _serve(
    connection: Connection, requests: list[RankRequest], num_processes: int, prepare: Callable[[], None]
) -> None:
    # The command reports the interruption, so nothing is printed here.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        prepare()
    except ValueError as error:
        connection.send(error)
        return

    # Each rank is forked from this process, which has already imported torch and the guard.
    context = multiprocessing.get_context("fork")
    calls = [(request,) for request in requests]
    try:
        for number, message in run_calls(context, _rehearse, calls, num_processes, daemon=True):
            connection.send((requests[number].rank, message) if isinstance(message, str) else message)
    except EOFError as error:
        rank = requests[error.args[0]].rank
        connection.send(
            RehearsalError(f"the process of rank {rank} ended without a message, possibly out of memory")
        )
        return

    connection.send(None)


def _rehearse(connection: Connection, request: RankRequest) -> None:
    from megarl.rehearse.dry_run.rank import rehearse

    connection.send(rehearse(request, connection.send))
