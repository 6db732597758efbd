"""Each rank in a process of its own, a few at a time, forked from one that has imported torch and Megatron. Imports no torch itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait

from megarl.rehearsal.guard import load_guard
from megarl.rehearsal.record import RankRecord, RankRequest, RehearsalError

Answer = RankRecord | Exception | None  # None: there is no more


def rehearse_ranks(requests: Iterable[RankRequest], num_processes: int, prepare: Callable[[], None] | None = None) -> Iterator[RankRecord]:
    """Records as they come. prepare: called in the process from which ranks are forked; it is to make what it needs ready, and by
    itself makes the guard and the engine ready.

    Raises ValueError where the guard cannot be compiled, RehearsalError where a rank's process died.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, list(requests), num_processes, prepare or make_ready))
    process.start()
    theirs.close()
    try:
        while (answer := _received(mine)) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        process.terminate()
        process.join()


def _received(connection: Connection) -> Answer:
    try:
        return connection.recv()
    except EOFError:
        return RehearsalError("the process that rehearses ended without a word; its standard error, above, says why")


def make_ready() -> None:
    """Of a process that imports torch only now."""
    os.environ["OMP_NUM_THREADS"] = "1"
    load_guard()
    from megarl.rehearsal import rank

    rank.prepare()


def _serve(connection: Connection, requests: list[RankRequest], num_processes: int, prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command says that it was interrupted; here is nothing to say
    try:
        prepare()
    except ValueError as error:
        connection.send(error)
        return
    context = multiprocessing.get_context("fork")
    running: dict[Connection, RankRequest] = {}
    waiting = list(reversed(requests))
    while waiting or running:
        while waiting and len(running) < num_processes:
            request = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            context.Process(target=_rehearse, args=(theirs, request), daemon=True).start()
            theirs.close()
            running[mine] = request
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            request = running.pop(ready)
            try:
                connection.send(ready.recv())
            except EOFError:
                connection.send(RehearsalError(f"the process of rank {request.rank} ended without a word, perhaps for want of memory"))
                return
    connection.send(None)


def _rehearse(connection: Connection, request: RankRequest) -> None:
    from megarl.rehearsal.rank import rehearse

    connection.send(rehearse(request))
