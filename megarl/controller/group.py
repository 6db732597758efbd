"""RayWorkerGroup: the driver's handle on all ranks of a role. A worker's registered methods are the group's own, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megarl.controller.actors import ActorSet
from megarl.controller.dispatch import RULES, Collect, CollectKind, Dispatch, Mesh, Rule, plan_call, rule_for_rank
from megarl.controller.environment import users_settings
from megarl.controller.errors import RankReport
from megarl.controller.futures import WorkerFuture
from megarl.controller.messages import CallRecord
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import CallP, CallR, ColocatedWorkerClass, P, R, RayClassWithInitArgs, RemoteMethod, registered_methods
from megarl.tracking.timeline import Span

NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class RoleGroup:
    """All ranks of one role. Several may share the same processes (`RayWorkerGroup.spawn`)."""

    def __init__(self, actors: ActorSet, role: str, worker: RayClassWithInitArgs) -> None:
        self._attach(actors, role, worker)

    def _attach(self, actors: ActorSet, role: str, worker: RayClassWithInitArgs) -> None:
        self._actors, self.role, self._worker_class = actors, role, worker.cls
        self.mesh: Mesh = worker.mesh(actors.world_size)
        self._spans: list[Span] = []
        for name, method in registered_methods(worker.cls).items():
            setattr(self, name, partial(self.call, method))

    if not TYPE_CHECKING:  # a type checker shall refuse the names that are only bound

        def __getattr__(self, name: str) -> Any:
            """Reached only for what is not there."""
            if name.startswith("_"):
                raise AttributeError(name)
            worker = f"{self._worker_class.__name__} has no registered method {name!r}" if "_worker_class" in vars(self) else name
            raise AttributeError(
                f"{worker}; several roles in one process are reached through spawn()" if not vars(self).get("role") else worker
            )

    @property
    def world_size(self) -> int:
        return self._actors.world_size

    @property
    def has_ended(self) -> bool:
        """It was shut down, or a call that outlived its limit ended it: it takes no more calls."""
        return not self._actors.alive

    @property
    def ready(self) -> WorkerFuture:
        """Of the workers' construction. Waiting is optional: calls queue behind it, and report its failure as theirs."""
        return WorkerFuture(self._actors.construction, (), Collect(CollectKind.listed))

    # ---- calls

    def call(self, method: RemoteMethod[..., Any, CallP, CallR], *args: CallP.args, **kwargs: CallP.kwargs) -> CallR:
        """A worker's method as its `@register` says: on which ranks, and whether this waits or returns a future.

        Waiting raises WorkerError, PhaseTimeoutError. ValueError where the method is not one of this group's worker.
        """
        future = self._execute(RULES[method.dispatch_mode], self._name(method), args, kwargs)
        return future.get() if method.blocking else future  # type: ignore[return-value]

    def call_rank(self, rank: int, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs) -> WorkerFuture[R]:
        """A worker's method on one rank alone, whatever its `@register` says. ValueError for a rank that does not exist."""
        return self.execute_rank_async(rank, self._name(method), *args, **kwargs)

    def call_all(self, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs) -> WorkerFuture[list[R]]:
        """A worker's method on every rank with the same arguments, whatever its `@register` says; a result of each."""
        return self.execute_all_async(self._name(method), *args, **kwargs)

    def call_beside(self, method: RemoteMethod[[], None, ..., Any]) -> None:
        """A worker's method, which must be safe in a thread of its own, on every rank at once, beside the call that the rank is at.

        Returns at once, and nobody hears of its end.
        """
        self._actors.start_beside(self.role, self._name(method))

    def _name(self, method: RemoteMethod[..., Any, ..., Any]) -> str:
        if not issubclass(self._worker_class, method.owner):
            raise ValueError(f"{self._worker_class.__name__}, the worker of role {self.role!r}, has no method {method!r}")
        return method.name

    # ---- public, for those who know verl; megarl itself calls by `call`, `call_rank` and `call_all`. So are the workers' registered
    # methods that are bound on the group by name.

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        """The same arguments to every rank; the result is a list in the order of ranks."""
        return self._execute(RULES[Dispatch.ONE_TO_ALL], method, args, kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_rank_async(self, rank: int, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        """One rank alone. Raises ValueError for a rank that does not exist."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.role} has ranks 0 to {self.world_size - 1}, not {rank}")
        return self._execute(rule_for_rank(rank), method, args, kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        return self.execute_rank_async(0, method, *args, **kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_async(0, method, *args, **kwargs).get()

    def _execute(self, rule: Rule, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WorkerFuture[Any]:
        if not hasattr(self._worker_class, method):
            raise ValueError(f"{self._worker_class.__name__}, the worker of role {self.role!r}, has no method {method!r}")
        return self._actors.start(self.role, method, plan_call(rule, self.mesh, args, kwargs), self._record_spans)

    # ---- what the processes do

    @property
    def pids(self) -> list[int]:
        """Of the processes that have answered a call, in the order of ranks; each is a number of its own node."""
        return [self._actors.locations[rank].pid for rank in sorted(self._actors.locations)]

    def reports(self) -> list[RankReport]:
        """What every rank is doing right now, without its help; takes at most a few seconds."""
        return self._actors.reports()

    # ---- timeline and end

    def _record_spans(self, role: str, rank: int, record: CallRecord) -> None:
        pool = self._actors.pool_name
        self._spans += [Span(pool, role, rank, span.name, span.start_s, span.end_s) for span in record.spans]

    def drain_spans(self) -> list[Span]:
        """What the calls that were waited for did since the last time, on every rank: each call, then its phases."""
        spans, self._spans = self._spans, []
        return spans

    def shutdown(self) -> None:
        """Ends the processes at once, those of all roles that share them."""
        self._actors.end()


class RayWorkerGroup(RoleGroup):
    """Starts one process per bundle of `resource_pool` and constructs the workers there; returns before they are ready.

    `ray_cls_with_init`: one worker class, or several fused (`create_colocated_worker_cls`), whose groups `spawn` gives.
    `environment`: set in the processes before torch is loaded, beside what the user and environment.py set for all.
    `at_work`: role -> method -> how many processes of a node compute while it runs, which share its cores where there is no GPU and the
    user has not set OMP_NUM_THREADS. Another method has the threads of the one before it.
    `phase_time_limit_s`: a call that runs longer raises PhaseTimeoutError with every rank's stack, and the group is ended.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkerClass,
        *,
        role: str = "worker",
        phase_time_limit_s: float = 1800.0,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
        at_work: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> None:
        fused = isinstance(ray_cls_with_init, ColocatedWorkerClass)
        self._roles = ray_cls_with_init.roles if isinstance(ray_cls_with_init, ColocatedWorkerClass) else {role: ray_cls_with_init}
        for each, spec in self._roles.items():
            _check(each, spec, resource_pool)
        given = {**users_settings(), **environment}
        shares = {role: dict(methods) for role, methods in at_work.items()}
        actors = ActorSet(resource_pool, self._roles, given, phase_time_limit_s, self._record_spans, shares)
        if fused:
            self._actors, self.role, self._spans = actors, "", []
        else:
            self._attach(actors, role, self._roles[role])

    def spawn(self) -> dict[str, RoleGroup]:
        """One group per role, on the same processes."""
        return {role: RoleGroup(self._actors, role, spec) for role, spec in self._roles.items()}


def _check(role: str, worker: RayClassWithInitArgs, pool: RayResourcePool) -> None:
    """Before a process is started. Raises ValueError for a method whose name the group needs for itself, and for a layout of other size
    than the pool."""
    for name in registered_methods(worker.cls):
        if hasattr(RayWorkerGroup, name):
            raise ValueError(f"{worker.cls.__name__}.{name} cannot be registered: {name} is a method of the group; give it another name")
    num_ranks = len(worker.mesh(pool.world_size))
    if num_ranks != pool.world_size:
        raise ValueError(f"role {role!r} has a layout of {num_ranks} ranks, but its pool {pool.name!r} has {pool.world_size} processes")
