"""The processes of one worker group: start them on a pool, call them, inspect them, end them."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.batch.data_proto import DataProto
from megarl.controller.call_limits import GroupLimits, LearnedLimits
from megarl.controller.calls import Call, CallEnd, Processes, RelayedCalls
from megarl.controller.cluster import worker_owner
from megarl.controller.dispatch import Arguments, CallPlan
from megarl.controller.errors import UNKNOWN_NODE, PhaseTimeoutError, RankReport
from megarl.controller.futures import NODE_LOOK_S, WorkerFuture
from megarl.controller.host import Relay, WorkerHost
from megarl.controller.messages import (
    CONSTRUCTION,
    Location,
    OnRecord,
    RankActivity,
)
from megarl.controller.resource_pool import PoolBundle, RayResourcePool
from megarl.controller.silence import ProcessSilence
from megarl.controller.worker import RayClassWithInitArgs

_VERDICT_LIMIT_S = 60.0
VERDICT_LOOK_S = 0.5
_MONITOR = "monitor"  # a separate thread, which answers while a call hangs
_SMALL = (type(None), bool, int, float, str)  # values of these types are sent within a call
ANSWER_S = 5.0  # how long a process may take to report what it is doing
_group_numbers = itertools.count()


class ActorSet:
    """One actor per rank of the pool, in the order of its bundles."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        roles: Mapping[str, RayClassWithInitArgs],
        environments: Sequence[Mapping[str, str]],
        phase_time_limit_s: float,
        on_record: OnRecord,
        at_work: Mapping[str, Mapping[str, int]],
        ranks_per_relay: int,
        learned_limits: LearnedLimits,
    ) -> None:
        self.pool_name = resource_pool.name
        self._use_gpu = resource_pool.use_gpu
        self._pool = resource_pool
        self.title = "+".join(roles)
        self.limits = GroupLimits(phase_time_limit_s, learned_limits)
        self.locations: dict[int, Location] = {}
        self._last: dict[int, CallEnd] = {}  # by rank, of the call that was submitted last
        self.alive = True
        self._ended_by: PhaseTimeoutError | None = None
        self.construction: tuple[Call, ...] = ()
        self._looked_s = time.monotonic()
        self._lost_nodes = dict[int, str]()
        self._silence = ProcessSilence[int]()  # by rank
        # Start one process per bundle, each with a monitor thread in addition to the working one.
        bundles = resource_pool.bundles()
        # pyrefly: ignore[unexpected-keyword]
        actor_class = ray.remote(concurrency_groups={_MONITOR: 1})(WorkerHost)

        # Ray's annotations do not have the options of an actor's methods.
        self._handles: list[Any] = [
            actor_class.options(
                num_cpus=1,
                num_gpus=resource_pool.gpus_per_process / resource_pool.max_colocate_count
                if resource_pool.use_gpu
                else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    bundle.placement_group, placement_group_bundle_index=bundle.number
                ),
                max_restarts=0,
            ).remote()
            for bundle in bundles
        ]

        # Ray's errors name an actor by its id.
        self._rank_of = {handle._actor_id.hex(): rank for rank, handle in enumerate(self._handles)}

        # The classes are sent pickled, so that they are loaded only after the environment is set.
        workers = cloudpickle.dumps(
            {role: (spec.cls, spec.args, spec.kwargs) for role, spec in roles.items()}
        )
        self.construction = self._construct(
            ray.put(workers), [bundle.local_rank for bundle in bundles], environments, on_record, at_work
        )

        self._relays = (
            Relays(self._handles, self.construction, bundles, ranks_per_relay)
            if len(bundles) > ranks_per_relay
            else None
        )

    def _construct(
        self,
        workers: ray.ObjectRef,
        local_ranks: Sequence[int],
        environments: Sequence[Mapping[str, str]],
        on_record: OnRecord,
        at_work: Mapping[str, Mapping[str, int]],
    ) -> tuple[Call, ...]:
        meeting = self._handles[0].rendezvous.remote()  # sent from rank 0 to the others without waiting
        group = next(_group_numbers)
        calls = []

        for rank, handle in enumerate(self._handles):
            launch = {"RANK": rank, "WORLD_SIZE": len(self._handles), "LOCAL_RANK": local_ranks[rank]}
            owner = worker_owner(group, rank)
            result, record = handle.construct.options(num_returns=2).remote(
                workers, launch, meeting, dict(environments[rank]), self._use_gpu, owner, at_work
            )
            calls.append(Call(self, self.title, rank, CONSTRUCTION, result, record, on_record))

        return tuple(calls)

    @property
    def world_size(self) -> int:
        return len(self._handles)

    def start(self, role: str, method: str, plan: CallPlan, on_record: OnRecord) -> WorkerFuture[Any]:
        """Start a call on the ranks of the plan and return at once. Ranks run calls in submission order.

        Raises:
            PhaseTimeoutError: The group was ended by this error.
            RuntimeError: The group was ended for another reason.
        """
        if not self.alive:
            raise self._ended_by or RuntimeError(f"{role}.{method}: the group has been ended")
        # Store values that several ranks read, then submit to all ranks before waiting for any.
        shared = _share(plan.parts, plan.part_of_ranks, stores_all=self._relays is not None)
        if self._relays is not None:
            calls = self._relays.start(self, role, method, plan, shared, on_record)
            return WorkerFuture(list(calls.values()), [calls[rank] for rank in plan.results], plan.collect)
        calls = {}

        for rank, part in zip(plan.ranks, plan.part_of_ranks, strict=True):
            execute = self._handles[rank].execute.options(num_returns=2)
            positional, named = shared[part]
            result, record = execute.remote(role, method, rank in plan.results, *positional, **named)
            end = CallEnd(record)
            calls[rank] = Call(
                self,
                role,
                rank,
                method,
                result,
                record,
                on_record,
                _uids_of(plan.parts[part]),
                end=end,
                earlier=self._last.get(rank),
            )
            self._last[rank] = end

        return WorkerFuture(list(calls.values()), [calls[rank] for rank in plan.results], plan.collect)

    def start_beside(self, role: str, method: str) -> None:
        """Run a method without arguments on all ranks, concurrently with their calls. Ignores the outcome."""
        for handle in self._handles:
            handle.execute_beside.options(concurrency_group=_MONITOR).remote(role, method)

    def rank_of(self, actor_id: str | None, otherwise: int) -> int:
        return otherwise if actor_id is None else self._rank_of.get(actor_id, otherwise)

    def errors_of(self, ranks: Sequence[int]) -> dict[int, RayError]:
        """Return Ray's errors of those ranks whose process is gone. Takes at most a few seconds."""
        asked = {self._ask(rank): rank for rank in ranks}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        errors = {}
        for reference in answered:
            try:
                ray.get(reference)
            except RayError as error:
                errors[asked[reference]] = error
        return errors

    def last_word(self, rank: int, error: ActorUnavailableError) -> RayError:
        """Query an unreachable process until Ray reports what happened to it, and return that error.

        Returns `error` if the process can be reached again. A connection to a node that goes away breaks at
        once, but Ray's health checks take about 20 s to detect that the node is gone.
        """
        end_s = time.monotonic() + _VERDICT_LIMIT_S
        # Only a later error shows whether the process is gone, so ask until one comes.
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                ray.get(self._ask(rank), timeout=left_s)
            except ActorUnavailableError:
                time.sleep(VERDICT_LOOK_S)
            except GetTimeoutError:
                break
            except RayActorError as verdict:
                return verdict
            else:
                break

        return error

    def lost_nodes(self) -> dict[int, str]:
        """Return the ranks that have not started and never will, with the address of their node.

        Asks Ray at most once per NODE_LOOK_S.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= NODE_LOOK_S:
            self._looked_s, self._lost_nodes = now_s, self._pool.lost_nodes()
        return {rank: node for rank, node in self._lost_nodes.items() if rank not in self.locations}

    def reports(self) -> list[RankReport]:
        """Report what every rank is doing. Takes at most a few seconds, even if ranks hang."""
        asked = {rank: self._ask(rank) for rank in range(self.world_size)}
        # A process that does not answer in time is reported as silent.
        answers = self._silence.wait(asked, ANSWER_S)
        return [self._report(rank, answers.get(rank)) for rank in asked]

    def lost_ranks(self) -> list[RankReport]:
        """Return the reports of ranks that died, or have not answered for `limits.lost_s`.

        Waits until all others have answered, except those that are still starting.
        """
        started = [rank for rank in range(self.world_size) if rank in self.locations]
        starting = [rank for rank in range(self.world_size) if rank not in self.locations]
        _, lost = self._silence.ask(started, self._ask, limit_s=ANSWER_S, lost_s=self.limits.lost_s)
        _, died = self._silence.ask(starting, self._ask, limit_s=ANSWER_S, lost_s=math.inf, waits=False)
        return [self._report(rank, None) for rank in sorted(lost | died)]

    def _ask(self, rank: int) -> ray.ObjectRef:
        return self._handles[rank].activity.options(concurrency_group=_MONITOR).remote()

    def silent_s(self, rank: int) -> float:
        """Return how long a process has not answered `reports`. 0 before its first call has ended."""
        return self._silence.seconds(rank) if rank in self.locations else 0.0

    def _report(self, rank: int, answer: RankActivity | RayError | None) -> RankReport:
        activity = None if isinstance(answer, RayError) else answer  # an error: the process died
        location = activity.location if activity is not None else self.locations.get(rank)
        return RankReport(self.title, rank, location.node if location else UNKNOWN_NODE, activity)

    def end(self, why: PhaseTimeoutError | None = None) -> None:
        """End all processes at once, with everything that they started (machine/reaper.py).

        Later calls raise `why`.
        """
        self.alive = False
        self._ended_by = self._ended_by or why
        for handle in self._handles:
            ray.kill(handle, no_restart=True)
        if self._relays is not None:
            self._relays.end()


class Relays:
    """The relays of a large group (see `Relay`). Each has some consecutive ranks.

    A call of an actor takes the driver half a millisecond of processor time, so the driver calls one relay
    for many ranks.

    Args:
        handles: The processes by rank.
        construction: The construction of each of them.
        bundles: The places of the processes, by rank.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        construction: Sequence[Call],
        bundles: Sequence[PoolBundle],
        ranks_per_relay: int,
    ) -> None:
        self._ranks_per_relay = ranks_per_relay
        self._ranks = [
            range(first, min(first + ranks_per_relay, len(bundles)))
            for first in range(0, len(bundles), ranks_per_relay)
        ]
        self._actors = [
            _start_relay(handles, construction, ranks, bundles[ranks[0]]) for ranks in self._ranks
        ]
        self._numbers = [itertools.count() for _ in self._actors]

    def start(
        self,
        processes: Processes,
        role: str,
        method: str,
        plan: CallPlan,
        shared: Sequence[Arguments],
        on_record: OnRecord,
    ) -> dict[int, Call]:
        """Start a call by one message to each relay that has some of its ranks, and return it by rank.

        Args:
            plan: Which rank receives what.
            shared: The arguments of each part, with references of all that is not small.
            on_record: What is called when a rank has ended.
        """
        part_of: dict[int, dict[int, int]] = {}  # by relay and rank
        for rank, part in zip(plan.ranks, plan.part_of_ranks, strict=True):
            part_of.setdefault(rank // self._ranks_per_relay, {})[rank] = part

        calls = {}
        for index, own in part_of.items():
            actor = self._actors[index]
            number = next(self._numbers[index])  # one step, so that two threads never get the same
            # Send only the parts that ranks of this relay receive.
            parts = list(dict.fromkeys(own.values()))
            tasks = [(rank, rank in plan.results, parts.index(part)) for rank, part in own.items()]
            answer = actor.run.remote(number, role, method, tasks, [shared[part] for part in parts])
            relayed = RelayedCalls(processes, actor, number, answer, self._ranks[index])
            for rank, part in own.items():
                uids = _uids_of(plan.parts[part])
                relayed.running[rank] = Call(
                    processes, role, rank, method, None, None, on_record, uids, relayed
                )
            calls |= relayed.running

        return calls

    def end(self) -> None:
        for actor in self._actors:
            ray.kill(actor, no_restart=True)


def _start_relay(
    handles: Sequence[Any], construction: Sequence[Call], ranks: range, bundle: PoolBundle
) -> Any:
    """Start a relay on the node of its first rank."""
    records = [construction[rank].reference for rank in ranks]
    actor_class = ray.remote(Relay)
    return actor_class.options(
        # The CPU of the bundle is that of its rank.
        num_cpus=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            bundle.placement_group, placement_group_bundle_index=bundle.number
        ),
        max_restarts=0,
    ).remote({rank: handles[rank] for rank in ranks}, records)


# ---- arguments


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
