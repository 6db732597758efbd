"""Calls on single ranks: how they end, and the failure of a call that does not return."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from megarl.controller.call_limits import GroupLimits
from megarl.controller.cluster import daemons_last_words, ended_daemon, ended_node, oom_kills
from megarl.controller.errors import (
    UNKNOWN_NODE,
    PhaseTimeoutError,
    RankFailure,
    RankReport,
    RayEndedError,
    WorkerError,
)
from megarl.controller.hints import NODE_LOST
from megarl.controller.lost_process import LOST, node_lost, relay_lost, why_lost
from megarl.controller.messages import (
    CallFailure,
    CallRecord,
    FailureKind,
    Location,
    OnRecord,
    Outcome,
)
from megarl.machine.wording import counted

_LOG_LINES = 30
_SHOWN_UIDS = 4


class Processes(Protocol):
    """The interface of a group's processes that calls use. Its class, in actors.py, imports this module."""

    limits: GroupLimits
    locations: dict[int, Location]
    construction: tuple[Call, ...]

    def rank_of(self, actor_id: str | None, otherwise: int) -> int: ...

    def errors_of(self, ranks: Sequence[int]) -> dict[int, RayError]: ...

    def last_word(self, rank: int, error: ActorUnavailableError) -> RayError: ...

    def lost_nodes(self) -> dict[int, str]: ...

    def reports(self) -> list[RankReport]: ...

    def silent_s(self, rank: int) -> float: ...

    def end(self, why: PhaseTimeoutError) -> None: ...


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

    processes: Processes
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
        """Record that the process that relays calls to this rank and others is gone."""
        summary, hint = relay_lost(ranks)
        self._fail(CallFailure(kind, summary, summary, time.time(), hint=hint))

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

    processes: Processes
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
