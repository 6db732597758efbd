"""The names that verl gives to worker groups and their calls, for code written for verl.

megarl itself does not use them.

| verl, and here | megarl |
|---|---|
| `group.update(batch)` | `group.call(ActorWorker.update, batch)` |
| `group.execute_all_sync("update", x)` | `group.call_all(ActorWorker.update, x).get()` |
| `group.execute_rank_zero_async("update", x)` | `group.call_rank(0, ActorWorker.update, x)` |
| `@register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)` | `@register(Dispatch.MEGATRON_MESH)` |
| `@register(..., execute_mode=Execute.RANK_ZERO)` | `@register(Dispatch.RANK_ZERO)` |
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any

from megarl.controller.dispatch import (
    RULES,
    Arranged,
    CallRoute,
    CollectKind,
    Mesh,
    Rule,
    arrange_split,
    rule_for_rank,
)
from megarl.controller.dispatch import (
    Dispatch as OwnDispatch,
)
from megarl.controller.futures import WorkerFuture
from megarl.controller.group import RayWorkerGroup as OwnWorkerGroup
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import (
    ColocatedWorkers,
    RayClassWithInitArgs,
    RemoteMethod,
    registered_methods,
)
from megarl.controller.worker import register as own_register
from megarl.machine.errors import counted


def _route_one_part_each(mesh: Mesh) -> CallRoute:
    ranks = tuple(range(len(mesh)))
    return CallRoute(ranks, ranks, ranks)


def _arrange_one_each(value: Any, num_parts: int) -> Arranged:
    if not isinstance(value, (list, tuple)) or len(value) != num_parts:
        found = f"{len(value)} values" if isinstance(value, (list, tuple)) else type(value).__name__
        raise ValueError(
            f"this method takes lists with one value for each of the {counted(num_parts, 'rank')}, not "
            f"{found}"
        )
    return tuple(value), None


_ONE_EACH = Rule(_route_one_part_each, _arrange_one_each, CollectKind.listed)


class VerlDispatch(Enum):
    """How the arguments of a call reach the ranks, by verl's names. The values are megarl's rules."""

    RANK_ZERO = (RULES[OwnDispatch.RANK_ZERO],)  # rank 0 only; returns its result
    ONE_TO_ALL = (RULES[OwnDispatch.ONE_TO_ALL],)  # the same arguments for all; returns a list
    # Every argument is a list with one value per rank; returns a list of all results.
    ALL_TO_ALL = (_ONE_EACH, "ALL_TO_ALL")
    DP_COMPUTE = (_ONE_EACH, "DP_COMPUTE")  # an alias of ALL_TO_ALL
    # Batches are split over all ranks; results are concatenated.
    DP_COMPUTE_PROTO = (Rule(_route_one_part_each, arrange_split, CollectKind.joined),)
    # Batches are split over data-parallel replicas; results are concatenated.
    MEGATRON_COMPUTE_PROTO = (RULES[OwnDispatch.MEGATRON_MESH],)

    @property
    def rule(self) -> Rule:
        return self.value[0]


class Execute(Enum):
    """The ranks that run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


def register(
    dispatch_mode: VerlDispatch = VerlDispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[Callable[..., Any]], RemoteMethod[..., Any, ..., Any]]:
    """Mark a worker's method that a group calls by its name.

    Raises:
        ValueError: `execute_mode` is RANK_ZERO, but `dispatch_mode` sends different arguments to each rank.
    """
    rule = dispatch_mode.rule
    if execute_mode is Execute.RANK_ZERO:
        # Rank 0 can replace all ranks only if all would receive the same arguments.
        if dispatch_mode not in (VerlDispatch.ONE_TO_ALL, VerlDispatch.RANK_ZERO):
            raise ValueError(
                f"execute_mode=RANK_ZERO requires dispatch_mode=ONE_TO_ALL or RANK_ZERO, not "
                f"{dispatch_mode.name}"
            )
        rule = VerlDispatch.RANK_ZERO.rule

    return own_register(rule, blocking)


class _VerlNames(RoleGroup):
    """Adds verl's names to a group: the worker's registered methods as methods of the group, and `execute_*`.

    A type checker cannot follow these names.
    """

    def __getattr__(self, name: str) -> Any:
        """Return a registered method of the worker for a name that the group does not define."""
        # Private names fail at once: a missing `_worker_class` would otherwise cause infinite recursion.
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self.call, self._method(name, AttributeError))

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        """Call a method on every rank with the same arguments. The result is a list by rank."""
        return self._execute(RULES[OwnDispatch.ONE_TO_ALL], self._method(method, ValueError), args, kwargs)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.execute_all_async(method, *args, **kwargs).get()

    execute_all = execute_all_async

    def execute_rank_async(self, rank: int, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        """Call a method on one rank.

        Raises:
            ValueError: The rank does not exist.
        """
        return self.call_rank(rank, self._method(method, ValueError), *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> WorkerFuture[Any]:
        return self._execute(rule_for_rank(0), self._method(method, ValueError), args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_rank_zero = execute_rank_zero_async

    def _method(self, name: str, error: type[Exception]) -> RemoteMethod[..., Any, ..., Any]:
        if self._worker_class is None:
            raise error(
                f"{name}: several roles share these processes; call it on one of the groups that spawn() "
                f"returns"
            )

        method = getattr(self._worker_class, name, None)
        if not isinstance(method, RemoteMethod):
            raise error(
                f"{self._worker_class.__name__}, the worker of role {self.role!r}, has no registered method "
                f"{name!r}"
            )

        return method


class VerlWorkerGroup(_VerlNames, OwnWorkerGroup):
    """A `RayWorkerGroup` with verl's names, also on the groups that `spawn()` returns.

    Raises:
        ValueError: A worker registers a method with the name of a group method.
    """

    _role_group = _VerlNames

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        **options: Any,
    ) -> None:
        specs = (
            [ray_cls_with_init]
            if isinstance(ray_cls_with_init, RayClassWithInitArgs)
            else ray_cls_with_init.values()
        )
        # __getattr__ is not called for names that the group defines itself.
        for spec in specs:
            for name in registered_methods(spec.cls):
                if hasattr(VerlWorkerGroup, name):
                    raise ValueError(
                        f"{spec.cls.__name__}.{name} cannot be called by its name, because {name} is a "
                        f"method of the group; rename it"
                    )

        super().__init__(resource_pool, ray_cls_with_init, **options)


# The names that verl's users know.
Dispatch = VerlDispatch
RayWorkerGroup = VerlWorkerGroup
