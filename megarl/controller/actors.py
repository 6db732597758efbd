"""The processes of one worker group: start them on a pool, inspect them, end them, and limit their calls.

A call has a fixed limit. That of some methods is also learned from their earlier calls. Calls of other
methods, such as saving a checkpoint, may take much longer than before, but only while their processes answer
when they are asked what they are doing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.controller.cluster import worker_owner
from megarl.controller.errors import UNKNOWN_NODE, PhaseTimeoutError, RankReport
from megarl.controller.host import Relay, WorkerHost
from megarl.controller.lost_process import ProcessSilence
from megarl.controller.messages import Location, RankActivity
from megarl.controller.resource_pool import RayResourcePool

_VERDICT_LIMIT_S = 60.0
VERDICT_LOOK_S = 0.5
NODE_LOOK_S = 5.0  # interval for checking the nodes of processes that have not started
_MONITOR = "monitor"  # a separate thread, which answers while a call hangs
ANSWER_S = 5.0  # how long a process may take to report what it is doing
_group_numbers = itertools.count()


class ActorSet:
    """One actor per rank of the pool, in the order of its bundles.

    Args:
        title: The names of the roles, for messages.
        workers: See `WorkerHost.construct`.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        title: str,
        workers: bytes,
        environments: Sequence[Mapping[str, str]],
        phase_time_limit_s: float,
        at_work: Mapping[str, Mapping[str, int]],
        ranks_per_relay: int,
        learned_limits: LearnedLimits,
    ) -> None:
        self.pool_name = resource_pool.name
        self._use_gpu = resource_pool.use_gpu
        self._pool = resource_pool
        self.title = title
        self.limits = GroupLimits(phase_time_limit_s, learned_limits)
        self.locations: dict[int, Location] = {}
        self.last: dict[int, Any] = {}  # by rank, the end of the call that was submitted last (`CallEnd`)
        self.alive = True
        self.ended_by: PhaseTimeoutError | None = None
        self._looked_s = time.monotonic()
        self._lost_nodes = dict[int, str]()
        self._silence = ProcessSilence[int]()  # by rank
        # Start one process per bundle, each with a monitor thread in addition to the working one.
        bundles = resource_pool.bundles()
        # pyrefly: ignore[unexpected-keyword]
        actor_class = ray.remote(concurrency_groups={_MONITOR: 1})(WorkerHost)

        # Ray's annotations do not have the options of an actor's methods.
        self.handles: list[Any] = [
            actor_class.options(
                num_cpus=1,
                num_gpus=resource_pool.gpus_per_process / resource_pool.max_colocate_count
                if resource_pool.use_gpu
                else 0,
                scheduling_strategy=bundle,
                max_restarts=0,
            ).remote()
            for bundle in bundles
        ]

        # Ray's errors name an actor by its id.
        self._rank_of = {handle._actor_id.hex(): rank for rank, handle in enumerate(self.handles)}

        self.constructed = self._construct(ray.put(workers), resource_pool.local_ranks, environments, at_work)
        self.construction: Sequence[Any] = ()  # the same as calls, see `construction_calls`

        # A large group is called by relays (see `Relay`), each of which has some consecutive ranks: a call of
        # an actor takes the driver half a millisecond of processor time.
        is_large = len(bundles) > ranks_per_relay
        self.ranks_of_relays = [
            range(first, min(first + ranks_per_relay, len(bundles)))
            for first in (range(0, len(bundles), ranks_per_relay) if is_large else ())
        ]
        self.relays = [self._start_relay(ranks, bundles[ranks[0]]) for ranks in self.ranks_of_relays]
        self.relay_numbers = [itertools.count() for _ in self.relays]

    def _construct(
        self,
        workers: ray.ObjectRef,
        local_ranks: Sequence[int],
        environments: Sequence[Mapping[str, str]],
        at_work: Mapping[str, Mapping[str, int]],
    ) -> list[tuple[ray.ObjectRef, ray.ObjectRef]]:
        """Construct the workers. Returns the result and the record of each rank."""
        meeting = self.handles[0].rendezvous.remote()  # sent from rank 0 to the others without waiting
        group = next(_group_numbers)
        constructed = []

        for rank, handle in enumerate(self.handles):
            launch = {"RANK": rank, "WORLD_SIZE": len(self.handles), "LOCAL_RANK": local_ranks[rank]}
            owner = worker_owner(group, rank)
            result, record = handle.construct.options(num_returns=2).remote(
                workers, launch, meeting, dict(environments[rank]), self._use_gpu, owner, at_work
            )
            constructed.append((result, record))

        return constructed

    def _start_relay(self, ranks: range, bundle: PlacementGroupSchedulingStrategy) -> Any:
        """Start a relay on the node of its first rank."""
        actor_class = ray.remote(Relay)
        return actor_class.options(
            # The CPU of the bundle is that of its rank.
            num_cpus=0,
            scheduling_strategy=bundle,
            max_restarts=0,
        ).remote({rank: self.handles[rank] for rank in ranks}, [self.constructed[rank][1] for rank in ranks])

    @property
    def world_size(self) -> int:
        return len(self.handles)

    def start_beside(self, role: str, method: str) -> None:
        """Run a method without arguments on all ranks, concurrently with their calls. Ignores the outcome."""
        for handle in self.handles:
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
        return self.handles[rank].activity.options(concurrency_group=_MONITOR).remote()

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
        self.ended_by = self.ended_by or why
        for handle in [*self.handles, *self.relays]:
            ray.kill(handle, no_restart=True)


# ---- time limits of calls

_NUM_KEPT = 64  # the last durations of a method
_NUM_NEEDED = 4  # earlier calls before a limit is learned: the first ones compile and allocate


class LearnedLimits(NamedTuple):
    """The rule by which limits are learned.

    Attributes:
        methods: The methods whose calls take about equally long.
        factor: The multiple of the median duration after which a call counts as hung; 0: no limit is learned.
        floor_s: The smallest limit, and how long a process may not answer, in seconds.
    """

    methods: Collection[str] = ()
    factor: float = 0.0
    floor_s: float = 10.0


NOTHING_LEARNED = LearnedLimits()


class GroupLimits:
    """The limits of a group's calls.

    Attributes:
        fixed_s: The limit of any call, in seconds.
    """

    def __init__(self, fixed_s: float, learned: LearnedLimits) -> None:
        self.fixed_s = fixed_s
        self._learned = learned
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_KEPT))

    def learn(self, method: str, seconds: float) -> None:
        """Take the duration of a call of one rank into account."""
        if self._learned.factor:
            self._seconds[method].append(seconds)

    @property
    def silence_s(self) -> float:
        """How long a process may not answer while a call takes unusually long."""
        return self.lost_s if self._learned.factor else math.inf

    @property
    def lost_s(self) -> float:
        """How long a process may not answer after another process has failed."""
        return self._learned.floor_s

    def limit_s(self, method: str | None) -> float:
        """Return how long a call of this method may run; None: any method."""
        usual_s = self._usual_s(method)
        if method not in self._learned.methods or usual_s is None:
            return self.fixed_s
        return min(self.fixed_s, usual_s)

    def look_s(self, method: str) -> float:
        """Return how long a call may run before its processes are asked whether they answer."""
        if not self._learned.factor:
            return self.fixed_s
        return min(self.fixed_s, self._usual_s(method) or self._learned.floor_s)

    def _usual_s(self, method: str | None) -> float | None:
        """Return how long a call takes at most, judged by earlier ones; None if there are too few."""
        seconds = self._seconds.get(method or "", ())
        if len(seconds) < _NUM_NEEDED:
            return None
        return max(self._learned.floor_s, self._learned.factor * median(seconds))
