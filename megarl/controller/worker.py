"""The base class of workers, `@register` for the methods that the driver calls, and delayed construction.

`register` types the calls for a type checker. Workers are constructed in a worker process, alone or with
others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import isasyncgenfunction, iscoroutinefunction
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, overload

from megarl.batch.data_proto import DataProto
from megarl.config.schema import RankCoordinate
from megarl.controller.dispatch import RULES, Dispatch, Mesh, Rule
from megarl.controller.messages import Activity
from megarl.machine.reaper import descendants

if TYPE_CHECKING:  # worker classes are imported without Ray
    from megarl.controller.futures import WorkerFuture


P = ParamSpec("P")  # the method's parameters on a rank, without self
R = TypeVar("R")  # its return type on a rank


class RemoteMethod[**P, R, **CallP, CallR]:
    """A method of a worker class that a group's ranks run: `group.call(ActorWorker.update, parts, loss)`.

    On a worker it is an ordinary method.

    The type parameters are the method's parameters, without self, and its return type on a rank; then those
    of `group.call` on the driver, which returns one or several results, or a future.
    """

    def __init__(self, function: Callable[..., Any], rule: Rule, blocking: bool) -> None:
        self.function = function
        self.rule = rule
        self.blocking = blocking
        self.name = function.__name__
        self.owner: type = object
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.name = name

    @overload
    def __get__(self, worker: None, owner: type) -> Self: ...
    @overload
    def __get__(self, worker: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, worker: object, owner: type) -> Any:
        return self if worker is None else MethodType(self.function, worker)

    def __repr__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


# On a mesh, the method takes its part of a batch first; the driver passes the parts of all replicas, and gets
# one result from each.


@overload
def register(
    dispatch_mode: Literal[Dispatch.RANK_ZERO], blocking: Literal[True] = True
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, P, R]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.RANK_ZERO], blocking: Literal[False]
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, P, WorkerFuture[R]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL] = ..., blocking: Literal[True] = True
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, P, list[R]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.ONE_TO_ALL] = ..., *, blocking: Literal[False]
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, P, WorkerFuture[list[R]]]]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.MEGATRON_MESH], blocking: Literal[True] = True
) -> Callable[
    [Callable[Concatenate[Any, DataProto, P], R]],
    RemoteMethod[Concatenate[DataProto, P], R, Concatenate[Sequence[DataProto], P], list[R]],
]: ...
@overload
def register(
    dispatch_mode: Literal[Dispatch.MEGATRON_MESH], blocking: Literal[False]
) -> Callable[
    [Callable[Concatenate[Any, DataProto, P], R]],
    RemoteMethod[Concatenate[DataProto, P], R, Concatenate[Sequence[DataProto], P], WorkerFuture[list[R]]],
]: ...
@overload
def register(
    dispatch_mode: Rule, blocking: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, ..., Any]]: ...
def register(dispatch_mode: Dispatch | Rule = Dispatch.ONE_TO_ALL, blocking: bool = True) -> Any:
    """Mark a worker's method for `group.call`.

    Args:
        dispatch_mode: Which ranks run it, on which part of the arguments, and whose results are returned. A
            `Rule` is a custom mode.
        blocking: Whether a call waits for the results. Otherwise it returns a future at once.

    Raises:
        ValueError: The method is an `async def`. All ranks of a group run calls together, one call after
            another.
    """
    rule = RULES[dispatch_mode] if isinstance(dispatch_mode, Dispatch) else dispatch_mode

    def mark(method: Callable[..., Any]) -> RemoteMethod[..., Any, ..., Any]:
        if iscoroutinefunction(method) or isasyncgenfunction(method):
            raise ValueError(
                f"{method.__qualname__} is `async def`, but ranks run their calls one after another and do "
                "not await them; make it a plain `def` that uses asyncio.run for what it awaits "
                "(blocking=False lets the driver continue meanwhile)"
            )
        return RemoteMethod(method, rule, blocking)

    return mark


def registered_methods(worker_class: type) -> dict[str, RemoteMethod[..., Any, ..., Any]]:
    """Return the registered methods of the class and of its bases, by name."""
    # Read from the class, so that __get__ returns the RemoteMethod itself; dir() includes the bases.
    found = {name: getattr(worker_class, name) for name in dir(worker_class)}
    return {name: method for name, method in found.items() if isinstance(method, RemoteMethod)}


class Worker:
    """The base class of workers. Mark the methods that the driver calls with `@register`.

    Before `__init__` runs, the attributes and the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT are set. Outside a worker group (in a unit test), a worker is rank 0 of 1.

    Attributes:
        local_rank: The rank among the group's ranks on this node. With GPUs, Ray shows a process only its own
            ones: the first is always number 0.
        node: The IP address of the node.
        activity: What the process is doing.
    """

    role = "worker"
    rank = 0
    world_size = 1
    local_rank = 0
    node = "localhost"
    activity = Activity()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a part of a call in the timeline and in hang reports: `with self.phase("forward"):`."""
        return self.activity.phase(name)

    @classmethod
    def mesh(cls, world_size: int, *args: Any, **kwargs: Any) -> Mesh:
        """Return the coordinate of each rank in the layout of a worker with these arguments.

        The driver calls this without a worker. By default, every rank is a replica of its own.
        """
        return tuple(RankCoordinate(dp=rank) for rank in range(world_size))

    @register()
    def visible_gpus(self) -> str:
        """Return the GPUs that Ray shows this process, as CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @register()
    def resident_memory_gb(self) -> float:
        """Return the memory of this process and its descendants in GB (10^9 bytes), sharing ignored."""
        import psutil

        resident = 0
        for pid in (os.getpid(), *descendants(os.getpid())):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                resident += psutil.Process(pid).memory_info().rss

        return resident / 1e9


class RayClassWithInitArgs:
    """A delayed `cls(*args, **kwargs)`, for another process.

    Raises:
        ValueError: `cls` is not a Worker.
    """

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"{cls!r} is not a subclass of megarl.controller.worker.Worker")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def mesh(self, world_size: int) -> Mesh:
        return self.cls.mesh(world_size, *self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"RayClassWithInitArgs({self.cls.__name__})"


# The workers of several roles in one process. Their calls run one at a time, in submission order.
ColocatedWorkers = Mapping[str, RayClassWithInitArgs]


def create_colocated_worker_cls(roles: ColocatedWorkers) -> ColocatedWorkers:
    """Fuse several workers in one process. They are constructed in the order of `roles`.

    Raises:
        ValueError: There are no roles.
    """
    if not roles:
        raise ValueError("create_colocated_worker_cls: there are no roles")
    return dict(roles)
