"""Run each rank in a process forked from one that has imported torch and Megatron.

A few ranks run at a time. Imports no torch itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait

from megarl.machine.garbage import long_lived
from megarl.rehearsal.guard import load_guard
from megarl.rehearsal.record import RankProgress, RankRecord, RankRequest, RehearsalError

Answer = RankProgress | RankRecord | Exception | None  # None: all ranks are done


def rehearse_ranks(
    requests: Iterable[RankRequest],
    num_processes: int,
    prepare: Callable[[], None] | None = None,
    report: Callable[[RankProgress], None] = lambda progress: None,
) -> Iterator[RankRecord]:
    """Simulate each requested rank in a process of its own and yield the records as they arrive.

    Args:
        num_processes: How many ranks run at the same time.
        prepare: Called in the process from which the ranks are forked. The default loads the guard and the
            engine.
        report: Called for each phase that a rank has finished.

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
            if isinstance(answer, RankProgress):
                report(answer)
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
        from megarl.rehearsal import rank

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

    context = multiprocessing.get_context("fork")
    running: dict[Connection, RankRequest] = {}
    waiting = list(reversed(requests))

    while waiting or running:
        # Each rank is forked from this process, which has already imported torch and the guard.
        while waiting and len(running) < num_processes:
            request = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            context.Process(target=_rehearse, args=(theirs, request), daemon=True).start()
            theirs.close()
            running[mine] = request
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            try:
                message = ready.recv()
            except EOFError:
                rank = running[ready].rank
                connection.send(
                    RehearsalError(
                        f"the process of rank {rank} ended without a message, possibly out of memory"
                    )
                )
                return
            connection.send(message)
            if not isinstance(message, RankProgress):
                del running[ready]

    connection.send(None)


def _rehearse(connection: Connection, request: RankRequest) -> None:
    from megarl.rehearsal.rank import rehearse

    connection.send(rehearse(request, lambda phase: connection.send(RankProgress(request.rank, phase))))
