"""The processes of one worker group: started on a pool, called, asked what they do, ended."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.batch.data_proto import DataProto
from megarl.controller.calls import Call
from megarl.controller.cluster import worker_owner
from megarl.controller.dispatch import ArgumentLayout, Rule, plan_call
from megarl.controller.errors import RankReport
from megarl.controller.futures import WorkerFuture, forward, upstream_calls
from megarl.controller.host import WorkerHost
from megarl.controller.mesh import MeshCoordinate
from megarl.controller.messages import Location, OnRecord, RankIdentity
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker_class import RayClassWithInitArgs

_MONITOR = "monitor"  # a thread of its own, which answers while a call hangs
_ANSWER_S = 5.0  # how long a process may take to say what it is doing
_SMALL = (type(None), bool, int, float, str, ray.ObjectRef)
_group_numbers = itertools.count()


class ActorSet:
    """One actor per rank of the pool, in the order of its bundles."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        roles: Mapping[str, RayClassWithInitArgs],
        environment: Mapping[str, str],
        phase_time_limit_s: float,
        on_record: OnRecord,
    ) -> None:
        self.pool_name, self._use_gpu = resource_pool.name, resource_pool.use_gpu
        self.title = "+".join(roles)
        self.phase_time_limit_s = phase_time_limit_s
        self.locations: dict[int, Location] = {}
        self.alive = True
        self.construction: tuple[Call, ...] = ()
        bundles = resource_pool.bundles()
        actor_class = ray.remote(concurrency_groups={_MONITOR: 1})(WorkerHost)  # type: ignore[call-overload]
        self._handles = [
            actor_class.options(
                num_cpus=1,
                num_gpus=resource_pool.gpus_per_process / resource_pool.max_colocate_count if resource_pool.use_gpu else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.placement_group, placement_group_bundle_index=bundle.number),
                max_restarts=0,
            ).remote()
            for bundle in bundles
        ]
        self._rank_of = {handle._actor_id.hex(): rank for rank, handle in enumerate(self._handles)}
        workers = cloudpickle.dumps({role: (spec.cls, spec.args, spec.kwargs) for role, spec in roles.items()})
        self.construction = self._construct(ray.put(workers), [bundle.local_rank for bundle in bundles], environment, on_record)

    def _construct(
        self,
        workers: ray.ObjectRef,
        local_ranks: Sequence[int],
        environment: Mapping[str, str],
        on_record: OnRecord,
    ) -> tuple[Call, ...]:
        meeting = self._handles[0].rendezvous.remote()  # goes from rank 0 to the others; nobody waits here
        group = next(_group_numbers)
        calls = []
        for rank, handle in enumerate(self._handles):
            identity = RankIdentity(rank, len(self._handles), local_ranks[rank])
            owner = worker_owner(group, rank)
            result, record = handle.construct.options(num_returns=2).remote(
                workers, identity, meeting, dict(environment), self._use_gpu, owner
            )
            calls.append(Call(self, self.title, rank, "__init__", result, record, on_record))
        return tuple(calls)

    @property
    def world_size(self) -> int:
        return len(self._handles)

    def start(
        self,
        role: str,
        method: str,
        rule: Rule,
        mesh: Sequence[MeshCoordinate],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_record: OnRecord,
    ) -> WorkerFuture:
        """A call on the ranks that `rule` says; returns at once."""
        named = {name: forward(value) for name, value in kwargs.items()}
        plan = plan_call(rule, self.world_size, mesh, [forward(value) for value in args], named)
        upstream = upstream_calls([*args, *kwargs.values()])
        shared = _share(plan.values, plan.route.parts)
        calls = {
            rank: self.submit(
                role, rank, method, plan.layout, shared[part], rank in plan.route.results, upstream, on_record, _uids(plan.values[part])
            )
            for rank, part in zip(plan.route.ranks, plan.route.parts, strict=True)
        }
        return WorkerFuture(list(calls.values()), [calls[rank] for rank in plan.route.results], plan.collect)

    def submit(
        self,
        role: str,
        rank: int,
        method: str,
        layout: ArgumentLayout,
        values: Sequence[Any],
        keep_result: bool,
        upstream: tuple[Call, ...],
        on_record: OnRecord,
        uids: np.ndarray | None = None,
    ) -> Call:
        """Returns at once. A rank's calls run in the order of their submission. Raises RuntimeError when the group was ended."""
        if not self.alive:
            raise RuntimeError(f"{role}.{method}: the group has been ended (shutdown, or a call that outlived its limit)")
        result, record = self._handles[rank].execute.options(num_returns=2).remote(role, method, layout, keep_result, *values)
        return Call(self, role, rank, method, result, record, on_record, upstream, uids)

    def rank_of(self, actor_id: str | None, otherwise: int) -> int:
        return otherwise if actor_id is None else self._rank_of.get(actor_id, otherwise)

    def reports(self) -> list[RankReport]:
        """What every rank is doing; takes at most a few seconds, whatever they do."""
        references = [handle.activity.options(concurrency_group=_MONITOR).remote() for handle in self._handles]
        answered, _ = ray.wait(references, num_returns=len(references), timeout=_ANSWER_S)
        return [self._report(rank, reference if reference in answered else None) for rank, reference in enumerate(references)]

    def _report(self, rank: int, reference: ray.ObjectRef | None) -> RankReport:
        activity = None
        if reference is not None:
            with contextlib.suppress(RayError):  # it died: nothing to say
                activity = ray.get(reference)
        location = self.locations.get(rank)
        return RankReport(self.title, rank, location.node if location else "not known yet", activity)

    def kill(self) -> None:
        """At once, whatever they do; what they started ends with them (reaper.py)."""
        self.alive = False
        for handle in self._handles:
            ray.kill(handle, no_restart=True)


def _uids(values: Sequence[Any]) -> np.ndarray | None:
    """(B,) of the first batch among a call's arguments that has them."""
    batches = (value for value in values if isinstance(value, DataProto))
    return next((batch.non_tensor_batch["uid"] for batch in batches if "uid" in batch.non_tensor_batch), None)


def _share(values: Sequence[Sequence[Any]], parts: Sequence[int]) -> list[list[Any]]:
    """Values that more than one rank gets go to the object store once, and the ranks get the reference."""
    readers: dict[int, int] = {}
    for part in parts:
        for value in values[part]:
            readers[id(value)] = readers.get(id(value), 0) + 1
    stored: dict[int, Any] = {}

    def sent(value: Any) -> Any:
        if isinstance(value, _SMALL) or readers[id(value)] == 1:
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return [[sent(value) for value in part] for part in values]
