"""Rank processes that a test may lose: they hang, die or are stopped, and none is left when the block ends.

    with mortal_ranks(tmp_path, [trainer, engine]) as (trainer_rank, engine_rank):
        trainer_rank.tell("push")
        assert trainer_rank.hear() == "sent"

Each runs a function of a module, `function(place)`, which communicates with the test by `place.say` and
`place.listen`. They are forked: the test needs the fixture `forked_processes`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests import fork_server

ANSWER_LIMIT_S = 60


class _Failure(NamedTuple):
    traceback: str


@dataclass(frozen=True)
class Place:
    """The rank's side. `store_path` is that of a dist.FileStore that all ranks share."""

    rank: int
    size: int
    store_path: str
    test: Connection

    def say(self, value: Any) -> None:
        self.test.send(value)

    def listen(self) -> Any:
        return self.test.recv()

    def die(self, number: signal.Signals) -> NoReturn:
        """End by SIGKILL, or stop by SIGSTOP."""
        os.kill(os.getpid(), number)
        raise AssertionError("unreachable")


@dataclass(frozen=True)
class MortalRank:
    """The test's side of a rank."""

    rank: int
    connection: Connection
    process: multiprocessing.process.BaseProcess

    def ended_by(self) -> int | None:
        """Wait until the process has ended; return its exit code, or minus the number of the signal that
        ended it."""
        self.process.join(ANSWER_LIMIT_S)
        return self.process.exitcode

    def tell(self, value: Any) -> None:
        self.connection.send(value)

    def hear(self) -> Any:
        """Return the rank's next message. Raises AssertionError if there is none for a long time, or the rank
        failed."""
        assert self.connection.poll(ANSWER_LIMIT_S), (
            f"rank {self.rank} has said nothing for {ANSWER_LIMIT_S} s"
        )
        value = self.connection.recv()
        assert not isinstance(value, _Failure), f"rank {self.rank}:\n{value.traceback}"

        return value

    def is_silent(self, seconds: float) -> bool:
        """Return whether there is no message for that long; False as soon as there is one."""
        return not self.connection.poll(seconds)


def _run(function: Callable[[Place], None], place: Place, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)

    try:
        function(place)
    except BaseException:  # noqa: BLE001  (the boundary of a process: the traceback goes to the test)
        place.say(_Failure(traceback.format_exc()))


@contextlib.contextmanager
def mortal_ranks(
    folder: Path, functions: Sequence[Callable[[Place], None]], environments: Sequence[Mapping[str, str]] = ()
) -> Iterator[list[MortalRank]]:
    """Start the ranks.

    Args:
        folder: Empty folder for the store.
        environments: Variables of each rank, in addition to the test's own.
    """
    context = multiprocessing.get_context("spawn")
    ranks = []
    processes = []

    try:
        for rank, function in enumerate(functions):
            ours, theirs = context.Pipe()
            place = Place(rank, len(functions), str(folder / "store"), theirs)
            environment = environments[rank] if environments else {}
            process = context.Process(target=_run, args=(function, place, environment), daemon=True)
            with fork_server.spawned():
                process.start()
            theirs.close()
            ranks.append(MortalRank(rank, ours, process))
            processes.append(process)
        yield ranks
    finally:
        for process in processes:
            process.kill()
            process.join()
