"""RayWorkerGroup: the driver's handle on all ranks of a role.

Methods of the workers are called with `group.call(ActorWorker.update, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ray import cloudpickle

from megarl.controller.actors import NOTHING_LEARNED, ActorSet, GroupLimits, LearnedLimits
from megarl.controller.calls import construction_calls, start_calls
from megarl.controller.dispatch import (
    RULES,
    Collect,
    CollectKind,
    Dispatch,
    Mesh,
    Rule,
    plan_call,
    rule_for_rank,
)
from megarl.controller.environment import users_settings
from megarl.controller.errors import PhaseTimeoutError, RankReport, WorkerError
from megarl.controller.futures import WorkerFuture
from megarl.controller.messages import CallRecord, FailureKind, qualified_name
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import (
    ColocatedWorkers,
    RayClassWithInitArgs,
    RemoteMethod,
    Worker,
)
from megarl.machine.errors import EngineDeadError, counted
from megarl.tracking.timeline import Span

RANKS_PER_RELAY = 32
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


class RoleGroup:
    """All ranks of one role. Several groups may share the same processes (`RayWorkerGroup.spawn`).

    Args:
        worker: None for fused roles, whose calls go through the groups that `spawn` returns.
    """

    def __init__(self, actors: ActorSet, role: str, worker: RayClassWithInitArgs | None) -> None:
        self._actors = actors
        self.role = role
        self._worker_class: type[Worker] | None = None if worker is None else worker.cls
        self.mesh: Mesh = () if worker is None else worker.mesh(actors.world_size)
        self._spans: list[Span] = []
        self._processes: RayWorkerGroup | None = None

    @property
    def world_size(self) -> int:
        return self._actors.world_size

    @property
    def has_ended(self) -> bool:
        """Whether the group was shut down or exceeded a call's limit, so that it accepts no calls."""
        return not self._actors.alive

    @property
    def ready(self) -> WorkerFuture:
        """The future of the workers' construction.

        Waiting is optional: calls are queued after it, and report its failure as theirs.
        """
        return WorkerFuture(self._actors.construction, (), Collect(CollectKind.listed))

    @property
    def limits(self) -> GroupLimits:
        """The time limits of its calls."""
        return self._actors.limits

    @property
    def processes(self) -> RayWorkerGroup:
        """The processes of the group, which several roles may share."""
        assert self._processes is not None
        return self._processes

    # ---- calls

    def call[**CallP, CallR](
        self, method: RemoteMethod[..., Any, CallP, CallR], *args: CallP.args, **kwargs: CallP.kwargs
    ) -> CallR:
        """Call a worker's method on the ranks that its `@register` defines.

        Returns:
            The result, or a future if the method is registered as non-blocking.

        Raises:
            WorkerError: A rank failed.
            PhaseTimeoutError: The call exceeded its limit.
            ValueError: The method does not belong to this group's worker.
        """
        future = self._execute(method.rule, method, args, kwargs)
        return future.get() if method.blocking else future  # pyrefly: ignore[bad-return]

    def call_rank[**P, R](
        self, rank: int, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerFuture[R]:
        """Call a worker's method on one rank only, regardless of its `@register`.

        Raises:
            ValueError: The rank does not exist, or the method does not belong to this group's worker.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"{self.role} has ranks 0 to {self.world_size - 1}, not {rank}")
        return self._execute(rule_for_rank(rank), method, args, kwargs)

    def call_all[**P, R](
        self, method: RemoteMethod[P, R, ..., Any], *args: P.args, **kwargs: P.kwargs
    ) -> WorkerFuture[list[R]]:
        """Call a worker's method on every rank with the same arguments, regardless of its `@register`.

        Returns:
            A future of the list of results by rank.
        """
        return self._execute(RULES[Dispatch.ONE_TO_ALL], method, args, kwargs)

    def call_beside(self, method: RemoteMethod[[], None, ..., Any]) -> None:
        """Run a worker's method on every rank at once, concurrently with the rank's current call.

        The method must be thread-safe. Returns at once; the outcome is ignored.
        """
        self._actors.start_beside(self.role, self._name(method))

    def _name(self, method: RemoteMethod[..., Any, ..., Any]) -> str:
        if self._worker_class is None:
            raise ValueError(
                f"{method!r}: several roles share these processes; call it on one of the groups that "
                f"spawn() returns"
            )

        if not issubclass(self._worker_class, method.owner):
            raise ValueError(
                f"{self._worker_class.__name__}, the worker of role {self.role!r}, has no method {method!r}"
            )

        return method.name

    def _execute(
        self,
        rule: Rule,
        method: RemoteMethod[..., Any, ..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> WorkerFuture[Any]:
        name = self._name(method)
        plan = plan_call(rule, self.mesh, args, kwargs)
        calls = start_calls(self._actors, self.role, name, plan, self._record_spans)
        return WorkerFuture(list(calls.values()), [calls[rank] for rank in plan.route.results], plan.collect)

    # ---- what the processes do

    @property
    def pids(self) -> list[int]:
        """The pids of the processes that have answered a call, by rank. Each pid is one of its own node."""
        return [self._actors.locations[rank].pid for rank in sorted(self._actors.locations)]

    def where(self, rank: int) -> str:
        """Return the node and the device of a rank that has answered a call."""
        location = self._actors.locations[rank]
        return f"node {location.node}, {f'GPU {location.gpus}' if location.gpus else 'on CPU'}"

    def reports(self) -> list[RankReport]:
        """Report what every rank is doing, even if it hangs. Takes at most a few seconds."""
        return self._actors.reports()

    # ---- timeline and end

    def _record_spans(self, role: str, rank: int, record: CallRecord) -> None:
        pool = self._actors.pool_name
        self._spans += [Span(pool, role, rank, *span) for span in record.spans]

    def drain_spans(self) -> list[Span]:
        """Return the spans of calls completed since the last time: each call, then its phases."""
        spans = self._spans
        self._spans = []
        return spans

    def shutdown(self) -> None:
        """End the processes at once, and so all roles that share them."""
        self._actors.end()


class RayWorkerGroup(RoleGroup):
    """Starts one process per bundle of a pool and constructs workers there, without waiting for them.

    Args:
        resource_pool: Where the processes run.
        ray_cls_with_init: One worker class, or several fused ones (`create_colocated_worker_cls`), whose
            groups `spawn` returns.
        role: The role of a single worker class.
        phase_time_limit_s: A call that runs longer raises PhaseTimeoutError with every rank's stack, and the
            group is ended.
        environment: Variables to set in the processes before torch is loaded, in addition to those of the
            user and environment.py.
        rank_environments: Further variables of each rank.
        at_work: role -> method -> the number of processes that compute on a node while it runs. They share
            its cores if there is no GPU and the user has not set OMP_NUM_THREADS. Other methods keep the
            thread count of the previous one.
        ranks_per_relay: A larger group is called by relays, one for this number of ranks (see `Relay`).
        learned_limits: The limits that are learned from earlier calls, in addition to `phase_time_limit_s`.
    """

    _role_group = RoleGroup  # the class of the groups that spawn() returns

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        *,
        role: str = "worker",
        phase_time_limit_s: float = 1800.0,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
        rank_environments: Sequence[Mapping[str, str]] = (),
        at_work: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
        ranks_per_relay: int = RANKS_PER_RELAY,
        learned_limits: LearnedLimits = NOTHING_LEARNED,
    ) -> None:
        single = None
        if isinstance(ray_cls_with_init, RayClassWithInitArgs):
            single = ray_cls_with_init
            ray_cls_with_init = {role: single}
        self._roles = ray_cls_with_init
        for each, spec in self._roles.items():
            _check_layout(each, spec, resource_pool)

        # Variables for this group override what the user has set for all.
        given = {**users_settings(), **environment}
        of_ranks = rank_environments or [NO_ENVIRONMENT] * resource_pool.world_size
        environments = [{**given, **own} for own in of_ranks]
        shares = {role: dict(methods) for role, methods in at_work.items()}
        self.pool = resource_pool
        self._new_actors = lambda: ActorSet(
            resource_pool,
            "+".join(self._roles),
            # The classes are sent pickled, so that they are loaded only after the environment is set.
            cloudpickle.dumps(
                {each: (spec.cls, spec.args, spec.kwargs) for each, spec in self._roles.items()}
            ),
            environments,
            phase_time_limit_s,
            shares,
            ranks_per_relay,
            learned_limits,
        )
        self._spawned: list[RoleGroup] = []
        super().__init__(self._start(), "" if single is None else role, single)
        self._processes = self

    def _start(self) -> ActorSet:
        actors = self._new_actors()
        actors.construction = construction_calls(actors, self._record_spans)
        return actors

    def spawn(self) -> dict[str, RoleGroup]:
        """Return one group per role, on the same processes."""
        groups = {role: self._role_group(self._actors, role, spec) for role, spec in self._roles.items()}
        for group in groups.values():
            group._processes = self
        self._spawned += groups.values()
        return groups

    @property
    def roles(self) -> list[str]:
        return list(self._roles)

    def lost_ranks(self) -> list[RankReport]:
        """Return the reports of ranks that died or hang; see ActorSet.lost_ranks."""
        return self._actors.lost_ranks()

    def restart(self) -> None:
        """End all processes and start new ones on the same pool, without waiting for them.

        All groups that `spawn` returned use the new processes. Futures of earlier calls fail.
        """
        self._actors.end()
        self._actors = self._start()
        for group in self._spawned:
            group._actors = self._actors


def _check_layout(role: str, worker: RayClassWithInitArgs, pool: RayResourcePool) -> None:
    """Refuse a layout of another size than the pool, before a process is started.

    Raises:
        ValueError: The sizes differ.
    """
    num_ranks = len(worker.mesh(pool.world_size))
    if num_ranks != pool.world_size:
        raise ValueError(
            f"role {role!r} has a layout of {counted(num_ranks, 'rank')}, but its pool {pool.name!r} has "
            f"{counted(pool.world_size, 'process')}"
        )


# ---- results of several replicas, some of which may be lost


def results_of[T](
    futures: Mapping[int, WorkerFuture[T]],
    lost: dict[int, Exception],
    is_lost: Callable[[WorkerError | PhaseTimeoutError], bool],
) -> dict[int, T]:
    """Returns the results by replica.

    Failures of lost replicas go into `lost`. Any other failure is raised after all calls have ended.
    """
    results: dict[int, T] = {}
    failure: WorkerError | PhaseTimeoutError | None = None

    # Wait for all calls even after a failure: a replica must not have a call in progress afterwards.
    for number, future in futures.items():
        try:
            results[number] = future.get()
        except (WorkerError, PhaseTimeoutError) as error:
            if is_lost(error):
                lost[number] = error
            else:
                failure = failure or error

    if failure is not None:
        raise failure
    return results


def is_dead_or_failed_start(error: WorkerError | PhaseTimeoutError) -> bool:
    return is_dead(error) or is_failed_start(error)


def is_dead(error: WorkerError | PhaseTimeoutError) -> bool:
    """Whether the process, its engine or its GPU is gone or stuck. Others come from the call itself."""
    # The group is killed when a call exceeds its limit, so a timeout is a death.
    if isinstance(error, PhaseTimeoutError):
        return True
    return error.kind.is_loss or error.error_type == qualified_name(EngineDeadError)


def is_failed_start(error: WorkerError | PhaseTimeoutError) -> bool:
    """Whether a replica failed to start."""
    return (
        isinstance(error, WorkerError)
        and error.role == "rollout"
        and error.method == "__init__"
        and error.kind is FailureKind.exception
    )
