"""The processes that torchrun has started, as the ranks of one worker group, without Ray: rank 0 drives and works, the others serve it.

Calls are planned as for Ray (dispatch.py) and are run by the same host; what travels goes over gloo. A call of rank 0's own runs when
someone waits for it, so that whatever it meets in a collective has been called by then.

The ranks of a torchrun trust each other, as in torch's own collectives of objects: what they send is pickled.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.controller.calls import Call
from megarl.controller.dispatch import ArgumentLayout, CallPlan, Rule, collect, plan_call
from megarl.controller.environment import fill_in
from megarl.controller.errors import RankFailure, RankReport, first_failure
from megarl.controller.futures import WorkerFuture
from megarl.controller.group import RoleGroup
from megarl.controller.host import WorkerHost
from megarl.controller.mesh import MeshCoordinate
from megarl.controller.messages import CallRecord, Location, OnRecord, RankIdentity, Rendezvous
from megarl.controller.worker_class import RayClassWithInitArgs

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Work

_WAIT_LIMIT = timedelta(days=365)  # for the next call: as long as rank 0 lives; torchrun ends all when it does not


def launched() -> bool:
    """This process is one of several that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank() -> int:
    return int(os.environ["RANK"])


class Construct(NamedTuple):
    """`workers`: as WorkerHost.construct takes them."""

    workers: bytes


class Execute(NamedTuple):
    role: str
    method: str
    layout: ArgumentLayout
    keep_result: bool
    values: tuple[Any, ...]


class Channel:
    """Objects from rank to rank, in order. What is sent is kept until it has arrived."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._sent: list[tuple[Work, torch.Tensor]] = []

    def send(self, value: Any, to: int) -> None:
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for tensor in (torch.tensor([len(data)]), data):
            self._sent.append((dist.isend(tensor, to, group=self._group), tensor))  # type: ignore[arg-type]

    def receive(self, source: int) -> Any:
        import torch
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source, group=self._group)
        return pickle.loads(data.numpy().tobytes())

    def flush(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent = []


class RankFuture(WorkerFuture):
    """As `WorkerFuture`, of torchrun's ranks. It cannot be given to another group: there is none."""

    def __init__(self, ranks: Ranks, role: str, method: str, plan: CallPlan, on_record: OnRecord) -> None:
        super().__init__((), (), plan.collect)
        self._ranks, self.plan = ranks, plan
        self.role, self.method, self.on_record = role, method, on_record
        self.results: list[Any] | None = None

    def get(self, timeout: float | None = None) -> Any:
        """Raises WorkerError with the first failure of any rank."""
        self._ranks.run_until(self)
        assert self.results is not None
        return collect(self.results, self.plan.collect)


class Ranks:
    """All ranks, as rank 0 sees them: the processes of a RoleGroup."""

    pool_name = "torchrun"
    construction: tuple[Call, ...] = ()

    def __init__(self, channel: Channel, node: str, use_gpu: bool, given: Mapping[str, str]) -> None:
        """given: the environment as it was before megarl added to it."""
        self.given = given
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.alive = True
        self.use_gpu = use_gpu
        self.locations: dict[int, Location] = {}
        self._channel = channel
        self._host = WorkerHost(node)
        self._waiting: deque[RankFuture] = deque()

    def spawn(self, role: str, worker: RayClassWithInitArgs) -> RoleGroup:
        """The worker of a role, on every rank. Raises WorkerError where one cannot be made."""
        order = Construct(pickle.dumps({role: (worker.cls, worker.args, worker.kwargs)}))
        for other in range(1, self.world_size):
            self._channel.send(order, other)
        self._check({0: _construct(self._host, order, self.use_gpu)}, role, "__init__")
        self._check({other: self._channel.receive(other) for other in range(1, self.world_size)}, role, "__init__")
        return RoleGroup(self, role, worker.cls)

    def start(
        self,
        role: str,
        method: str,
        rule: Rule,
        mesh: Sequence[MeshCoordinate],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_record: OnRecord,
    ) -> RankFuture:
        """The other ranks begin at once."""
        plan = plan_call(rule, self.world_size, mesh, args, kwargs)
        future = RankFuture(self, role, method, plan, on_record)
        for other in plan.route.ranks:
            if other != 0:
                self._channel.send(_order(future, other), other)
        self._waiting.append(future)
        return future

    def run_until(self, future: RankFuture) -> None:
        """Calls are done in the order in which they were made, on every rank."""
        while future.results is None:
            self._run(self._waiting.popleft())

    def _run(self, future: RankFuture) -> None:
        route = future.plan.route
        answers: dict[int, tuple[Any, CallRecord]] = {}
        if 0 in route.ranks:
            answers[0] = _execute(self._host, _order(future, 0))
            self._check(answers, future.role, future.method)  # now: the others may wait for what this rank did not do
        answers |= {other: self._channel.receive(other) for other in route.ranks if other != 0}
        self._check(answers, future.role, future.method)
        for other, (_, record) in answers.items():
            future.on_record(future.role, other, record)
        future.results = [answers[other][0] for other in route.results]

    def _check(self, answers: Mapping[int, tuple[Any, CallRecord]], role: str, method: str) -> None:
        failures = []
        for other, (_, record) in answers.items():
            self.locations[other] = record.location
            if record.failure is not None:
                failures.append(RankFailure(role, other, record.location.node, record.location.pid, method, record.failure))
        if failures:
            raise first_failure(failures)

    def reports(self) -> list[RankReport]:
        activity = self._host.activity()
        return [RankReport("rank", 0, activity.location.node, activity)]

    def kill(self) -> None:
        """They end when this process leaves `join`."""
        self.alive = False

    def release(self) -> None:
        """The others have done all that they were asked, and end."""
        for other in range(1, self.world_size):
            self._channel.send(None, other)
        self._channel.flush()


@contextmanager
def join(num_ranks: int) -> Iterator[Ranks]:
    """On rank 0, which must come to it, or fail: the others wait for it. Where the block fails, torchrun ends them.

    Raises ValueError where torchrun has started another number of processes.
    """
    if int(os.environ["WORLD_SIZE"]) != num_ranks:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, but actor.parallel has {num_ranks} ranks "
            "(tensor x pipeline x data): make --nnodes x --nproc-per-node that number, or change actor.parallel"
        )
    given = dict(os.environ)
    channel, node, use_gpu = _meet()
    ranks = Ranks(channel, node, use_gpu, given)
    yield ranks
    ranks.release()


def serve() -> int:
    """On every other rank: does what rank 0 asks for, until it needs nothing more; the exit status."""
    channel, node, use_gpu = _meet()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets it as well: it saves, with us, and ends; where it fails, so do we
    host = WorkerHost(node)
    while (order := _next_order(channel)) is not None:
        answer = _construct(host, order, use_gpu) if isinstance(order, Construct) else _execute(host, order)
        failure = answer[1].failure
        if failure is not None:
            method = "__init__" if isinstance(order, Construct) else order.method
            print(f"rank {rank()} (node {node}, pid {os.getpid()}) in {method}: {failure.summary}\n{failure.traceback}", file=sys.stderr)
            return 1  # at once: rank 0 may hang in a collective; torchrun ends all
        channel.send(answer, 0)
    channel.flush()
    return 0


def _next_order(channel: Channel) -> Any:
    try:
        return channel.receive(0)
    except RuntimeError as error:  # of gloo
        raise SystemExit(f"rank {rank()}: rank 0 has gone ({str(error).splitlines()[0]})") from error


def _order(future: RankFuture, other: int) -> Execute:
    route = future.plan.route
    values = future.plan.values[route.parts[route.ranks.index(other)]]
    return Execute(future.role, future.method, future.plan.layout, other in route.results, values)


def _execute(host: WorkerHost, order: Execute) -> tuple[Any, CallRecord]:
    return host.execute(order.role, order.method, order.layout, order.keep_result, *order.values)


def _construct(host: WorkerHost, order: Construct, use_gpu: bool) -> tuple[Any, CallRecord]:
    identity = RankIdentity(rank(), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    meeting = Rendezvous(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return host.construct(order.workers, identity, meeting, {}, use_gpu, uuid.uuid4().hex)


def _meet() -> tuple[Channel, str, bool]:
    """Joins torchrun's process group; this node's address, and whether there are GPUs."""
    node = _node_address()
    import torch

    use_gpu = torch.cuda.is_available()
    fill_in(os.environ, node, use_gpu)
    import torch.distributed as dist

    # Of the ranks' model, on whichever device; and one for calls, over which a rank may wait for long.
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpu else "gloo")
    return Channel(dist.new_group(backend="gloo", timeout=_WAIT_LIMIT)), node, use_gpu


def _node_address() -> str:
    """Of the interface that leads to node 0."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, _, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # of datagrams: nothing is sent
        return probe.getsockname()[0]
