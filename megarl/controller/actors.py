"""The processes of one worker group: start them on a pool, call them, inspect them, end them."""

from __future__ import annotations

import contextlib
import itertools
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
from megarl.controller.cluster import worker_owner
from megarl.controller.dispatch import Arguments, CallPlan
from megarl.controller.errors import PhaseTimeoutError, RankReport
from megarl.controller.futures import NODE_LOOK_S, Call, WorkerFuture
from megarl.controller.host import WorkerHost
from megarl.controller.messages import CONSTRUCTION, Location, OnRecord, RankIdentity
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs

_VERDICT_LIMIT_S = 60.0
VERDICT_LOOK_S = 0.5
_MONITOR = "monitor"  # a separate thread, which answers while a call hangs
_ANSWER_S = 5.0  # how long a process may take to report what it is doing
_SMALL = (type(None), bool, int, float, str)
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
    ) -> None:
        self.pool_name = resource_pool.name
        self._use_gpu = resource_pool.use_gpu
        self._pool = resource_pool
        self.title = "+".join(roles)
        self.phase_time_limit_s = phase_time_limit_s
        self.locations: dict[int, Location] = {}
        self.alive = True
        self._ended_by: PhaseTimeoutError | None = None
        self.construction: tuple[Call, ...] = ()
        self._looked_s = time.monotonic()
        self._lost_nodes = dict[int, str]()
        # Start one process per bundle, each with a monitor thread in addition to the working one.
        bundles = resource_pool.bundles()
        actor_class = ray.remote(concurrency_groups={_MONITOR: 1})(WorkerHost)  # pyrefly: ignore[unexpected-keyword]
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
            identity = RankIdentity(rank, len(self._handles), local_ranks[rank])
            owner = worker_owner(group, rank)
            result, record = handle.construct.options(num_returns=2).remote(
                workers, identity, meeting, dict(environments[rank]), self._use_gpu, owner, at_work
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
        route = plan.route
        # Store values that several ranks read, then submit to all ranks before waiting for any.
        shared = _share(plan.parts, plan.route.parts)
        calls = {}

        for rank, part in zip(route.ranks, route.parts, strict=True):
            execute = self._handles[rank].execute.options(num_returns=2)
            result, record = execute.remote(
                role, method, rank in route.results, *shared[part].positional, **shared[part].named
            )
            calls[rank] = Call(self, role, rank, method, result, record, on_record, _uids(plan.parts[part]))

        return WorkerFuture(list(calls.values()), [calls[rank] for rank in route.results], plan.collect)

    def start_beside(self, role: str, method: str) -> None:
        """Run a method without arguments on all ranks, concurrently with their calls. Ignores the outcome."""
        for handle in self._handles:
            handle.execute_beside.options(concurrency_group=_MONITOR).remote(role, method)

    def rank_of(self, actor_id: str | None, otherwise: int) -> int:
        return otherwise if actor_id is None else self._rank_of.get(actor_id, otherwise)

    def last_word(self, rank: int, error: ActorUnavailableError) -> RayError:
        """Query an unreachable process until Ray reports what happened to it, and return that error.

        Returns `error` if the process can be reached again. A connection to a node that goes away breaks at
        once, but Ray's health checks take about 20 s to detect that the node is gone.
        """
        end_s = time.monotonic() + _VERDICT_LIMIT_S
        # Only a later error shows whether the process is gone, so ask until one comes.
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                ray.get(
                    self._handles[rank].activity.options(concurrency_group=_MONITOR).remote(), timeout=left_s
                )
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
        references = [
            handle.activity.options(concurrency_group=_MONITOR).remote() for handle in self._handles
        ]
        # A process that does not answer in time is reported as silent.
        answered, _ = ray.wait(references, num_returns=len(references), timeout=_ANSWER_S)
        return [
            self._report(rank, reference if reference in answered else None)
            for rank, reference in enumerate(references)
        ]

    def _report(self, rank: int, reference: ray.ObjectRef | None) -> RankReport:
        activity = None
        if reference is not None:
            with contextlib.suppress(RayError):  # the process died
                activity = ray.get(reference)
        location = activity.location if activity is not None else self.locations.get(rank)
        return RankReport(self.title, rank, location.node if location else "not known yet", activity)

    def end(self, why: PhaseTimeoutError | None = None) -> None:
        """End all processes at once, with everything that they started (machine/reaper.py).

        Later calls raise `why`.
        """
        self.alive = False
        self._ended_by = self._ended_by or why
        for handle in self._handles:
            ray.kill(handle, no_restart=True)


def _uids(arguments: Arguments) -> np.ndarray | None:
    """Return the uids (B,) of the first batch among a call's arguments that has them."""
    batches = (value for value in arguments.values if isinstance(value, DataProto))
    return next((batch.non_tensor_batch["uid"] for batch in batches if "uid" in batch.non_tensor_batch), None)


def _share(parts: Sequence[Arguments], part_of_rank: Sequence[int]) -> list[Arguments]:
    """Put values that several ranks receive into the object store once, and replace them by references."""
    # Count by identity: the same object for several ranks is one value.
    readers = Counter(id(value) for part in part_of_rank for value in parts[part].values)
    stored: dict[int, Any] = {}

    def sent(value: Any) -> Any:
        # Small values, and values that only one rank reads, are sent within the call.
        if isinstance(value, _SMALL) or readers[id(value)] == 1:
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return [
        Arguments(
            tuple(map(sent, part.positional)), {name: sent(value) for name, value in part.named.items()}
        )
        for part in parts
    ]
