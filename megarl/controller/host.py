"""The Ray actors of a group: one for each rank, and those that pass calls on to the ranks of a large group.

The actor of a rank holds its workers, runs their methods, and reports what it is doing. Imports neither torch
nor a worker class: the environment is set before either is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from megarl.controller.environment import fill_in
from megarl.controller.messages import (
    CONSTRUCTION,
    Activity,
    CallFailure,
    CallRecord,
    Ended,
    FailureKind,
    Location,
    Outcome,
    RankActivity,
    qualified_name,
)
from megarl.machine.errors import hint_of
from megarl.machine.garbage import long_lived
from megarl.machine.ports import hold_port, own_address
from megarl.machine.processors import usable_cores
from megarl.machine.reaper import OWNER, start_reaper

# Messages of gloo, NCCL and c10d on ranks whose peer is gone.
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

# What begins the text of an error of the GPU: torch's, cuBLAS's, cuDNN's, Triton's and Transformer Engine's.
_DEVICE_ERROR = re.compile(
    r"(?i:CUDA error|CUDA driver error|Triton Error \[CUDA\])|CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+"
)
# Errors of a call, after which the process can use its GPU, and of the program, which would repeat them.
_NOT_LOST = re.compile(
    r"out of memory|_ALLOC_FAILED|NOT_SUPPORTED|BAD_PARAM|INVALID_VALUE|device-side assert|invalid argument|"
    r"invalid (configuration|device (ordinal|function)|resource handle)|no kernel image|not supported|"
    r"too many resources requested|operation not permitted|driver version is insufficient"
)

# The largest result that passes a relay, in bytes; Ray sends values of this size within its own messages.
_MOST_RELAYED = 64 * 1024
# The wait of a relay after a failure for others on their way, in seconds.
_GATHER_S = 0.05

type _Answer = asyncio.Task[tuple[int, Outcome]]


class WorkerHost:
    """The actor of one rank.

    Methods return (result, CallRecord) as two objects and never raise: the driver reads the record before it
    fetches the result.
    """

    def __init__(self) -> None:
        self._activity = Activity()
        self._workers: dict[str, Any] = {}  # by role
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # by Ray
        self._location = Location(_node_address(), os.getpid(), _stderr_path(), gpus)
        self._held_port: socket.socket | None = None
        self._at_work: Mapping[str, Mapping[str, int]] = {}

    def rendezvous(self) -> tuple[str, int]:
        """Reserve a port and return torch.distributed's MASTER_ADDR and MASTER_PORT, on this node."""
        self._held_port = hold_port(own_address(self._location.node))
        return self._location.node, self._held_port.getsockname()[1]

    def construct(
        self,
        workers: bytes,
        launch: Mapping[str, int],
        rendezvous: tuple[str, int],
        environment: Mapping[str, str],
        use_gpu: bool,
        owner: str,
        at_work: Mapping[str, Mapping[str, int]],
    ) -> tuple[Any, CallRecord]:
        """Construct the workers of this rank.

        Args:
            workers: Pickled {role: (class, arguments, named arguments)}. It is loaded only after the
                environment is set.
            launch: RANK, WORLD_SIZE and LOCAL_RANK of torch.distributed.
            rendezvous: The address and port where the ranks of the group meet.
            environment: Variables to set.
            use_gpu: Whether the process has GPUs.
            owner: The mark of this process's descendants.
            at_work: See `RayWorkerGroup`.
        """
        # Cores are divided by phase only on CPUs, and only if the user has not set the number of threads.
        if not use_gpu and "OMP_NUM_THREADS" not in environment:
            self._at_work = at_work
        # Complete the environment before a worker class, and torch with it, is loaded.
        address, port = rendezvous
        variables = {name: str(value) for name, value in launch.items()}
        variables |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        os.environ.update({OWNER: owner, **environment, **variables})
        # Defaults come last, since they do not override existing values.
        fill_in(os.environ, self._location.node, use_gpu)

        with long_lived():
            return self._record(CONSTRUCTION, lambda: self._construct(workers, launch, owner))

    def _construct(self, workers: bytes, launch: Mapping[str, int], owner: str) -> None:
        # Start the reaper first: a constructor may start processes that have to end with this one.
        start_reaper(owner, whole_group=True)
        for role, (cls, arguments, named_arguments) in pickle.loads(workers).items():
            # Set the attributes before __init__ runs, which may use them.
            worker = cls.__new__(cls)
            worker.role = role
            worker.rank = launch["RANK"]
            worker.world_size = launch["WORLD_SIZE"]
            worker.local_rank = launch["LOCAL_RANK"]
            worker.node = self._location.node
            worker.activity = self._activity
            worker.__init__(*arguments, **named_arguments)
            self._workers[role] = worker

    def execute(
        self, role: str, method: str, keep_result: bool, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, CallRecord]:
        """Run a method. The result is not stored if `keep_result` is False, because another rank's counts."""
        self._take_cores(self._at_work.get(role, {}).get(method))
        result, record = self._record(method, lambda: getattr(self._workers[role], method)(*args, **kwargs))
        return result if keep_result else None, record

    def execute_relayed(
        self, role: str, method: str, keep_result: bool, /, *args: Any, **kwargs: Any
    ) -> Ended:
        """Run a method for a relay. A large result stays in the object store, and does not pass the relay."""
        result, record = self.execute(role, method, keep_result, *args, **kwargs)
        if _num_bytes(result) <= _MOST_RELAYED:
            return record, cloudpickle.dumps(result)
        return record, [ray.put(result)]

    def _take_cores(self, processes: int | None) -> None:
        """Limit this process to its share of the node's cores, divided among `processes` processes."""
        if processes is not None:
            import torch

            torch.set_num_threads(max(1, usable_cores() // processes))

    def execute_beside(self, role: str, method: str) -> None:
        """Run a method from another thread while `execute` works. Does nothing before the workers exist."""
        if role in self._workers:
            getattr(self._workers[role], method)()

    def _record(self, method: str, call: Callable[[], Any]) -> tuple[Any, CallRecord]:
        result = None
        failure = None

        try:
            with self._activity.call(method), _output_flushed():
                result = call()
        except BaseException as error:  # noqa: BLE001
            # This is a process boundary: the driver gets every exception, sys.exit included.
            failure = _failure_of(error)

        return result, CallRecord(self._location, self._activity.spans(), failure)

    def activity(self) -> RankActivity:
        """Report what this process is doing, from another thread, even if `execute` hangs."""
        return self._activity.report(self._location)


def _num_bytes(value: Any) -> int:
    """Return the size of a value as it is sent, without copying its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(pickled) + sum(buffer.raw().nbytes for buffer in buffers)


@contextlib.contextmanager
def _output_flushed() -> Generator[None]:
    """Flush the output of a worker, so that it is in the log if the process is killed later."""
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _failure_of(error: BaseException) -> CallFailure:
    now = time.time()
    summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    # Remove the host's own frames: the traceback should begin with the worker's code.
    text = "".join(traceback.format_exception(type(error), error, _after_host(error.__traceback__)))
    kind = FailureKind.communication if _is_about_a_peer(error) else FailureKind.exception
    # NCCL's errors name CUDA too, but their cause may be the peer's.
    if kind is FailureKind.exception and _is_of_device(error):
        kind = FailureKind.device
    return CallFailure(kind, summary, text, now, qualified_name(type(error)), tuple(hint_of(error)))


def _after_host(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins with the worker's own code.

    Returns all of it if the host itself failed.
    """
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


def _is_of_device(error: BaseException | None) -> bool:
    """Return whether the GPU of this process has failed: an ECC error, an Xid, an illegal access.

    Such an error is sticky: every later call on the GPU raises it again. The first one may have been caught
    and raised as another error.
    """
    while error is not None:
        text = str(error)
        if isinstance(error, RuntimeError) and _DEVICE_ERROR.search(text) and not _NOT_LOST.search(text):
            return True
        error = error.__cause__ or error.__context__
    return False


def _node_address() -> str:
    """Return the node's address in the cluster, which is loopback for a local cluster."""
    node_id = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)


def _stderr_path() -> str:
    try:
        return os.readlink("/proc/self/fd/2")
    except OSError:
        return ""


class Relay:
    """An actor that passes calls on to a part of a large group's ranks, and tells how they ended.

    The driver then sends one call for all of these ranks. Arguments and large results pass as references, and
    are read only by the ranks and the driver.

    Args:
        handles: The processes by rank.
        construction: What becomes available when each of them is constructed.
    """

    def __init__(self, handles: Mapping[int, Any], construction: Sequence[ray.ObjectRef]) -> None:
        self._handles = handles
        self._construction = list(construction)
        self._running: dict[int, set[_Answer]] = {}
        self._turn = asyncio.Condition()
        self._next = 0

    async def run(
        self,
        number: int,
        role: str,
        method: str,
        tasks: Sequence[tuple[int, bool, int]],
        parts: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    ) -> list[tuple[int, Outcome]]:
        """Start a call on its ranks, after all calls with smaller numbers, and return how it ended.

        Returns early if a rank fails. `rest` then tells about the others.

        Args:
            tasks: The ranks, each with whether its result counts, and the number of its arguments in `parts`.
            parts: Positional and named arguments. References in them are resolved by the ranks.
        """
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == number)
            # Ray keeps the order of one caller only, and the driver constructs the ranks itself.
            await asyncio.gather(*(_outcome(0, reference) for reference in self._construction))
            self._construction.clear()
            self._running[number] = {
                self._start(rank, role, method, keep_result, parts[part]) for rank, keep_result, part in tasks
            }
            self._next += 1
            self._turn.notify_all()
        return await self.rest(number)

    def _start(
        self,
        rank: int,
        role: str,
        method: str,
        keep_result: bool,
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> _Answer:
        positional, named = arguments
        execute = self._handles[rank].execute_relayed
        reference = execute.remote(role, method, keep_result, *positional, **named)
        return asyncio.ensure_future(_outcome(rank, reference))

    async def rest(self, number: int) -> list[tuple[int, Outcome]]:
        """Return the outcomes that were not returned before, once all ranks have ended or one has failed."""
        running = self._running.pop(number)
        outcomes: list[tuple[int, Outcome]] = []
        timeout = None

        while running:
            ended, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [answer.result() for answer in ended]
            if not ended:
                self._running[number] = running
                break
            if any(_has_failed(outcome) for _, outcome in outcomes):
                timeout = _GATHER_S

        return outcomes


async def _outcome(rank: int, reference: ray.ObjectRef) -> tuple[int, Outcome]:
    try:
        return rank, await reference
    except RayError:
        # The driver reads the error itself, since errors of Ray cannot always be sent again.
        return rank, [reference]


def _has_failed(outcome: Outcome) -> bool:
    return isinstance(outcome, list) or outcome[0].failure is not None
