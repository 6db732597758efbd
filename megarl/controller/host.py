"""One process that holds the workers of one rank, runs their methods, and can tell what it is doing. A Ray
actor.

Imports neither torch nor a worker class: the environment is set before either is loaded.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import ray

from megarl.controller.environment import fill_in
from megarl.controller.messages import (
    CONSTRUCTION,
    Activity,
    CallFailure,
    CallRecord,
    FailureKind,
    Location,
    RankActivity,
    RankIdentity,
    Rendezvous,
    WorkerContext,
    qualified_name,
)
from megarl.machine.errors import hint_of
from megarl.machine.ports import hold_port, own_address
from megarl.machine.processors import usable_cores
from megarl.machine.reaper import OWNER, start_reaper

# What gloo, NCCL and c10d say on the ranks whose peer has gone.
_COMMUNICATION_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL error",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "wait timeout after",
)


class WorkerHost:
    """Methods return (result, CallRecord) as two objects, and never raise: the driver reads the record before
    it asks for the result."""

    def __init__(self) -> None:
        self._activity = Activity()
        self._workers: dict[str, Any] = {}  # by role
        self._location = Location(_node_address(), os.getpid(), _stderr_path())
        self._held_port: socket.socket | None = None
        self._at_work: Mapping[str, Mapping[str, int]] = {}

    def rendezvous(self) -> Rendezvous:
        """An address of this process's node that no one else takes."""
        self._held_port = hold_port(own_address(self._location.node))
        return Rendezvous(self._location.node, self._held_port.getsockname()[1])

    def construct(
        self,
        workers: bytes,
        identity: RankIdentity,
        rendezvous: Rendezvous,
        environment: Mapping[str, str],
        use_gpu: bool,
        owner: str,
        at_work: Mapping[str, Mapping[str, int]],
    ) -> tuple[Any, CallRecord]:
        """`workers`: pickled {role: (class, arguments, named arguments)}, opened only after the environment
        is set. `at_work`: see RayWorkerGroup."""
        # Cores are divided by phase only on CPUs, and only where the user has not set the number of threads.
        if not use_gpu and "OMP_NUM_THREADS" not in environment:
            self._at_work = at_work
        # Complete the environment before a worker class, and torch with it, is loaded.
        launch = {
            "RANK": identity.rank,
            "WORLD_SIZE": identity.world_size,
            "LOCAL_RANK": identity.local_rank,
            "MASTER_ADDR": rendezvous.address,
            "MASTER_PORT": rendezvous.port,
        }
        os.environ.update(
            {OWNER: owner, **environment, **{name: str(value) for name, value in launch.items()}}
        )
        # Defaults come last, since they leave alone what is set already.
        fill_in(os.environ, self._location.node, use_gpu)

        return self._record(CONSTRUCTION, lambda: self._construct(workers, identity, owner))

    def _construct(self, workers: bytes, identity: RankIdentity, owner: str) -> None:
        # Start the reaper first: a constructor may start processes that have to end with this one.
        start_reaper(owner, whole_group=True)
        for role, (cls, arguments, named_arguments) in pickle.loads(workers).items():
            # The context must be there before __init__ runs, which may use it.
            worker = cls.__new__(cls)
            worker.context = WorkerContext(
                role,
                identity.rank,
                identity.world_size,
                identity.local_rank,
                self._location.node,
                self._activity,
            )
            worker.__init__(*arguments, **named_arguments)
            self._workers[role] = worker

    def execute(
        self, role: str, method: str, keep_result: bool, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, CallRecord]:
        """`keep_result` False: another rank's result is the one that counts, so this one's is not stored."""
        self._take_cores(self._at_work.get(role, {}).get(method))
        result, record = self._record(method, lambda: getattr(self._workers[role], method)(*args, **kwargs))
        return result if keep_result else None, record

    def _take_cores(self, processes: int | None) -> None:
        """An equal part of the node's for each of so many processes."""
        if processes is not None:
            import torch

            torch.set_num_threads(max(1, usable_cores() // processes))

    def execute_beside(self, role: str, method: str) -> None:
        """While `execute` works, from another thread; nothing where the workers are not there yet."""
        if role in self._workers:
            getattr(self._workers[role], method)()

    def _record(self, method: str, call: Callable[[], Any]) -> tuple[Any, CallRecord]:
        result = None
        failure = None

        try:
            with self._activity.call(method), _output_flushed():
                result = call()
        except BaseException as error:  # noqa: BLE001
            # The boundary of a process: the driver gets it, sys.exit included.
            failure = _failure_of(error)

        return result, CallRecord(self._location, self._activity.spans(), failure)

    def activity(self) -> RankActivity:
        """Answers while `execute` hangs, from another thread."""
        return self._activity.report(self._location)


@contextlib.contextmanager
def _output_flushed() -> Iterator[None]:
    """What a worker printed is in its log when the process is killed later."""
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _failure_of(error: BaseException) -> CallFailure:
    now = time.time()
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    # Cut off the host's own frames: the traceback should begin with the worker's code.
    text = "".join(traceback.format_exception(type(error), error, _after_host(error.__traceback__)))
    kind = FailureKind.communication if _is_about_a_peer(error) else FailureKind.exception
    return CallFailure(kind, summary, text, now, qualified_name(type(error)), tuple(hint_of(error)))


def _after_host(trace: TracebackType | None) -> TracebackType | None:
    """The part that begins with the worker's own code; all of it when the host itself failed."""
    own = trace
    step = trace

    # Keep what follows the last frame of this file.
    while step is not None:
        if step.tb_frame.f_code.co_filename == __file__:
            own = step.tb_next or own
        step = step.tb_next

    return own


def _is_about_a_peer(error: BaseException) -> bool:
    # A broken connection is a consequence: its cause is on the peer's side.
    if isinstance(error, (ConnectionError, EOFError)):
        return True
    if any(cls.__name__ in ("DistBackendError", "DistNetworkError") for cls in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _COMMUNICATION_WORDS)


def _node_address() -> str:
    """As the cluster knows this node (loopback for a local cluster), not as its network card is called."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)


def _stderr_path() -> str:
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
