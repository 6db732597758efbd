"""Calls on single ranks: how they start and end, and the failure of a call that does not return."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from megarl.batch.data_proto import DataProto
from megarl.controller.actors import ActorSet
from megarl.controller.cluster import daemons_last_words, ended_daemon, ended_node, oom_kills
from megarl.controller.dispatch import Arguments, CallPlan
from megarl.controller.errors import (
    UNKNOWN_NODE,
    RankFailure,
    RayEndedError,
    WorkerError,
)
from megarl.controller.hints import NODE_LOST, PROCESS_EXITED
from megarl.controller.lost_process import LOST, node_lost, why_lost
from megarl.controller.messages import (
    CONSTRUCTION,
    CallFailure,
    CallRecord,
    FailureKind,
    OnRecord,
    Outcome,
)
from megarl.machine.errors import counted

_LOG_LINES = 30
_SHOWN_UIDS = 4
_SMALL = (type(None), bool, int, float, str)  # values of these types are sent within a call


@dataclass(eq=False)
class CallEnd:
    """When a call has ended, without its result.

    Attributes:
        reference: The object that becomes available when it ends.
        noticed_s: When this process noticed the end (monotonic seconds); None: not yet.
    """

    reference: ray.ObjectRef
    noticed_s: float | None = None

    def look(self) -> float | None:
        """Look whether the call has ended. Returns when that was noticed first, None if it has not."""
        if self.noticed_s is None and ray.wait([self.reference], timeout=0, fetch_local=False)[0]:
            self.noticed_s = time.monotonic()
        return self.noticed_s


@dataclass(eq=False)
class Call:
    """A call on one rank.

    The result stays in the object store until it is fetched. `uids` (B,) are those of the rows of the call's
    batch, if any. A call that goes through a relay (see `Relay`) ends with the answer of the relay. `end` is
    its end and `earlier` that of the call before it on the rank; None if it is not known.
    """

    processes: ActorSet
    role: str
    rank: int
    method: str
    result: ray.ObjectRef | None
    record_reference: ray.ObjectRef | None
    on_record: OnRecord
    uids: np.ndarray | None = None
    relayed: RelayedCalls | None = None
    end: CallEnd | None = None
    earlier: CallEnd | None = None
    answer: bytes | list[Any] | None = None
    submitted_s: float = field(default_factory=time.monotonic)
    record: CallRecord | None = None
    failure: RankFailure | None = None

    @property
    def ended(self) -> bool:
        return self.record is not None or self.failure is not None

    @property
    def reference(self) -> ray.ObjectRef:
        """The object that becomes available when the call ends, or another call of the same relay fails."""
        reference = self.relayed.reference if self.relayed is not None else self.record_reference
        assert reference is not None
        return reference

    @property
    def rows(self) -> str | None:
        """The rows of the call's batch in words, to help find the one that it failed on."""
        if self.uids is None:
            return None
        distinct = tuple(dict.fromkeys(str(uid) for uid in self.uids))
        more = f" and {len(distinct) - _SHOWN_UIDS} more" if len(distinct) > _SHOWN_UIDS else ""
        return f"uid {', '.join(distinct[:_SHOWN_UIDS])}{more} ({counted(len(self.uids), 'row')})"

    def fetch(self, record: CallRecord | None = None) -> None:
        """Read the record, which must be available, or determine why there will be none.

        Args:
            record: The record, if it has been read.
        """
        try:
            self.record = record or ray.get(self.reference)
        except RayError as error:
            self.fail_with(error)
            return

        if self.end is not None:
            self.end.noticed_s = time.monotonic()
        # Keep the location: it identifies the node and log of the process if it dies in a later call.
        self.processes.locations[self.rank] = self.record.location
        self.on_record(self.role, self.rank, self.record)
        for span in self.record.spans[:1]:  # the whole call
            self.processes.limits.learn(self.method, span.end_s - span.start_s)

        if self.record.failure is not None:
            self._fail(self.record.failure)

    def fetch_relayed(self, outcome: Outcome) -> None:
        """Read how the call ended from the answer of a relay."""
        if isinstance(outcome, list):
            # The rank's own answer has an error, which has to be read from its reference.
            try:
                outcome = ray.get(outcome[0])
            except RayError as error:
                self.fail_with(error)
                return
        record, self.answer = outcome
        self.fetch(record)

    def fetch_result(self) -> Any:
        """Return the result of the call.

        Raises:
            WorkerError: The result was lost with the node that stored it.
        """
        reference = self.result
        if self.answer is not None:
            # A small result comes with the answer of the relay.
            if isinstance(self.answer, bytes):
                return pickle.loads(self.answer)
            (reference,) = self.answer
        assert reference is not None
        try:
            return ray.get(reference)
        except RayError as error:
            raise WorkerError(self.fail_with(error)) from error

    def _fail(self, failure: CallFailure, rank: int | None = None) -> RankFailure:
        """Record how the call failed, on its own rank or because of another one of the group."""
        rank = self.rank if rank is None else rank
        location = self.processes.locations.get(rank)
        self.failure = RankFailure(
            self.role,
            rank,
            location.node if location else UNKNOWN_NODE,
            location.pid if location else None,
            self.method,
            failure,
            # The rows belong to this call, so they are unrelated to a failure on another rank.
            self.rows if rank == self.rank else None,
            location.stderr_path if location else "",
        )
        return self.failure

    def fail_with(self, error: RayError) -> RankFailure:
        """Record one of Ray's own errors: the process is gone, or a value could not be sent or received."""
        rank = self.rank
        if isinstance(error, RayActorError):  # may concern the process that should have produced an argument
            rank = self.processes.rank_of(error.actor_id, self.rank)
            if daemon := ended_daemon():
                raise RayEndedError(daemon, daemons_last_words()) from error

        # A broken connection alone does not show whether the process or its node is gone.
        if isinstance(error, ActorUnavailableError):
            error = self.processes.last_word(rank, error)
        location = self.processes.locations.get(rank)

        # The process is alive, but a value could not be sent or received.
        if not isinstance(error, LOST):
            text = str(error)
            summary = f"{type(error).__name__}: {text.strip().splitlines()[-1]}"
            return self._fail(CallFailure(FailureKind.exception, summary, text, time.time()), rank)

        # The process is gone: the end of its log and the node's OOM kills may explain why.
        log = _end_of_log(location.stderr_path) if location else ""
        node = location.node if location else None
        summary, hint = why_lost(error, node, log, oom_kills(node))
        if hint is NODE_LOST and (daemon := ended_node()):
            raise RayEndedError(daemon, daemons_last_words()) from error
        failure = CallFailure(FailureKind.death, summary, f"{error}\n{log}", time.time(), hint=hint)
        return self._fail(failure, rank)

    def fail_without_relay(self, kind: FailureKind, ranks: range) -> None:
        """Record that the process that relays calls to this rank and others, which are alive, is gone."""
        summary = f"the process that relays calls to ranks {ranks[0]} to {ranks[-1]} is gone"
        self._fail(CallFailure(kind, summary, summary, time.time(), hint=PROCESS_EXITED))

    def fail_without_node(self, node: str) -> RankFailure:
        """Record that the process will never start, as `node` left the cluster and cannot be replaced."""
        summary, hint = node_lost(node, f"{self.role} rank {self.rank} cannot start anywhere")
        failure = CallFailure(FailureKind.death, summary, summary, time.time(), hint=hint)
        self.failure = RankFailure(self.role, self.rank, node, None, self.method, failure, self.rows)
        return self.failure


@dataclass(eq=False)
class RelayedCalls:
    """The calls of one method that go through the same relay.

    Attributes:
        processes: The group's processes.
        relay: The handle of the relay.
        number: The number of the calls at the relay.
        reference: The next answer of the relay: all outcomes, or those that are known when a call fails.
        ranks: The ranks of the relay.
        running: The calls that have not ended, by rank.
    """

    processes: ActorSet
    relay: Any
    number: int
    reference: ray.ObjectRef
    ranks: range
    running: dict[int, Call] = field(default_factory=dict)

    def deliver(self, outcomes: Sequence[tuple[int, Outcome]] | None = None) -> None:
        """End the calls that the relay's answer, which must be available, reports. Ask for the rest.

        Args:
            outcomes: The answer, if it has been read.
        """
        try:
            for rank, outcome in outcomes or ray.get(self.reference):
                self.running.pop(rank).fetch_relayed(outcome)
        except RayActorError:
            self._end_without_relay()
        if self.running:
            self.reference = self.relay.rest.remote(self.number)

    def _end_without_relay(self) -> None:
        """End all calls. A relay is often lost with its node, and then a rank of it is the better cause."""
        errors = self.processes.errors_of(list(self.running))
        kind = FailureKind.communication if errors else FailureKind.death
        for rank, call in self.running.items():
            if rank in errors:
                call.fail_with(errors[rank])
            else:
                call.fail_without_relay(kind, self.ranks)
        self.running.clear()


def _end_of_log(path: str) -> str:
    """Return the end of a dead process's log, if it ran on this machine."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return f"The end of its log, {path}:\n" + "\n".join(lines[-_LOG_LINES:]) if lines else ""


# ---- start


def construction_calls(processes: ActorSet, on_record: OnRecord) -> tuple[Call, ...]:
    """Return the construction of the workers, which `processes` has started, as calls by rank."""
    return tuple(
        Call(processes, processes.title, rank, CONSTRUCTION, result, record, on_record)
        for rank, (result, record) in enumerate(processes.constructed)
    )


def start_calls(
    processes: ActorSet, role: str, method: str, plan: CallPlan, on_record: OnRecord
) -> dict[int, Call]:
    """Start a call on the ranks of the plan and return at once. Ranks run calls in submission order.

    Args:
        plan: Which rank receives what.
        on_record: What is called when a rank has ended.

    Returns:
        The calls by rank.

    Raises:
        PhaseTimeoutError: The group was ended by this error.
        RuntimeError: The group was ended for another reason.
    """
    if not processes.alive:
        raise processes.ended_by or RuntimeError(f"{role}.{method}: the group has been ended")
    # Store values that several ranks read, then submit to all ranks before waiting for any.
    shared = _share(plan.parts, plan.route.part_of_ranks, stores_all=bool(processes.relays))
    if processes.relays:
        return _start_relayed(processes, role, method, plan, shared, on_record)
    calls = {}

    for rank, part in zip(plan.route.ranks, plan.route.part_of_ranks, strict=True):
        execute = processes.handles[rank].execute.options(num_returns=2)
        positional, named = shared[part]
        result, record = execute.remote(role, method, rank in plan.route.results, *positional, **named)
        end = CallEnd(record)
        calls[rank] = Call(
            processes,
            role,
            rank,
            method,
            result,
            record,
            on_record,
            _uids_of(plan.parts[part]),
            end=end,
            earlier=processes.last.get(rank),
        )
        processes.last[rank] = end

    return calls


def _start_relayed(
    processes: ActorSet,
    role: str,
    method: str,
    plan: CallPlan,
    shared: Sequence[Arguments],
    on_record: OnRecord,
) -> dict[int, Call]:
    """Start a call by one message to each relay that has some of its ranks."""
    part_of: dict[int, dict[int, int]] = {}  # by relay and rank
    for rank, part in zip(plan.route.ranks, plan.route.part_of_ranks, strict=True):
        part_of.setdefault(rank // len(processes.ranks_of_relays[0]), {})[rank] = part

    calls = {}
    for index, own in part_of.items():
        relay = processes.relays[index]
        number = next(processes.relay_numbers[index])  # one step, so that two threads never get the same
        # Send only the parts that ranks of this relay receive.
        parts = list(dict.fromkeys(own.values()))
        tasks = [(rank, rank in plan.route.results, parts.index(part)) for rank, part in own.items()]
        answer = relay.run.remote(number, role, method, tasks, [shared[part] for part in parts])
        relayed = RelayedCalls(processes, relay, number, answer, processes.ranks_of_relays[index])
        for rank, part in own.items():
            uids = _uids_of(plan.parts[part])
            relayed.running[rank] = Call(processes, role, rank, method, None, None, on_record, uids, relayed)
        calls |= relayed.running

    return calls


def _uids_of(arguments: Arguments) -> np.ndarray | None:
    """Return the uids (B,) of the first batch among a call's arguments that has them."""
    positional, named = arguments
    batches = (value for value in (*positional, *named.values()) if isinstance(value, DataProto))
    return next((batch.non_tensor_batch["uid"] for batch in batches if "uid" in batch.non_tensor_batch), None)


def _share(parts: Sequence[Arguments], part_of_rank: Sequence[int], *, stores_all: bool) -> list[Arguments]:
    """Put values that several ranks receive into the object store once, and replace them by references.

    Args:
        part_of_rank: The index in `parts` of what each rank receives.
        stores_all: Whether values that a single rank receives are put there too, so that no relay loads them.
    """
    # Count by identity: the same object for several ranks is one value.
    values = [(*positional, *named.values()) for positional, named in parts]
    readers = Counter(id(value) for part in part_of_rank for value in values[part])
    stored: dict[int, Any] = {}

    def sent(value: Any) -> Any:
        # Small values, and values that only one rank reads, are sent within the call.
        is_sent = readers[id(value)] == 1 and not stores_all
        if isinstance(value, _SMALL) or is_sent:
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return [
        (tuple(map(sent, positional)), {name: sent(value) for name, value in named.items()})
        for positional, named in parts
    ]
