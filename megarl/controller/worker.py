"""What runs in a worker process: the base class, `@register` for the methods that the driver calls, to Python
and to a type checker, and its delayed construction there, alone or beside others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from inspect import isasyncgenfunction, iscoroutinefunction
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from megarl.batch.data_proto import DataProto
from megarl.controller.dispatch import RULES, Dispatch, Mesh, MeshCoordinate, Rule
from megarl.controller.messages import Activity, WorkerContext

if TYPE_CHECKING:  # worker classes are imported without Ray
    from megarl.controller.futures import WorkerFuture


P = ParamSpec("P")  # what the method takes on a rank, without the worker itself
R = TypeVar("R", covariant=True)  # what it returns there
CallP = ParamSpec("CallP")  # what the driver gives to `group.call(method, ...)`
CallR = TypeVar("CallR", covariant=True)  # what it gets: of one rank or of several, at once or as a future


class RemoteMethod(Generic[P, R, CallP, CallR]):
    """A method of a worker class that a group's ranks run: `group.call(ActorWorker.update, parts, loss)`.

    Of a worker it is an ordinary method.
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


# Of a mesh: the method takes its part of a batch first; the driver gives the parts of all replicas, and gets
# a result of each.


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
        dispatch_mode: Which ranks run it, on which part of the arguments, and whose results come back. A
            `Rule` is a mode of your own.
        blocking: Whether a call waits for the results. Otherwise it returns a future at once.

    Raises:
        ValueError: The method is an `async def`. All ranks of a group run a call together, one call after the
            other.
    """
    rule = RULES[dispatch_mode] if isinstance(dispatch_mode, Dispatch) else dispatch_mode

    def mark(method: Callable[..., Any]) -> RemoteMethod[..., Any, ..., Any]:
        if iscoroutinefunction(method) or isasyncgenfunction(method):
            raise ValueError(
                f"{method.__qualname__} is `async def`, but ranks run their calls one after the other, and "
                f"nothing would await it; "
                "make it a plain `def`, with asyncio.run around what it awaits (blocking=False frees the "
                "driver meanwhile)"
            )
        return RemoteMethod(method, rule, blocking)

    return mark


def registered_methods(worker_class: type) -> dict[str, RemoteMethod[..., Any, ..., Any]]:
    """Those of the class and of its bases, by name."""
    # Read from the class, so that __get__ returns the RemoteMethod itself; dir() includes the bases.
    found = {name: getattr(worker_class, name) for name in dir(worker_class)}
    return {name: method for name, method in found.items() if isinstance(method, RemoteMethod)}


class Worker:
    """Subclass it and mark with `@register` the methods that the driver calls.

    The context is there before `__init__` runs, and so are RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT in the environment. Outside a worker group (in a unit test) a worker is rank 0 of 1.
    """

    context = WorkerContext(
        role="worker", rank=0, world_size=1, local_rank=0, node="localhost", activity=Activity()
    )

    @property
    def role(self) -> str:
        return self.context.role

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def local_rank(self) -> int:
        """Among the group's ranks of this node. With GPUs, Ray shows a process its own ones only: the first
        is always number 0."""
        return self.context.local_rank

    @property
    def node(self) -> str:
        """Its IP address."""
        return self.context.node

    def phase(self, name: str) -> AbstractContextManager[None]:
        """`with self.phase("forward"):` names a part of a call, for the timeline and for the report of a
        hang."""
        return self.context.activity.phase(name)

    @classmethod
    def mesh(cls, world_size: int, *args: Any, **kwargs: Any) -> Mesh:
        """Where each rank stands in the layout of a worker that is made of these arguments: known to the
        driver without asking.

        Every rank is a replica of its own unless a subclass knows better.
        """
        return tuple(MeshCoordinate(dp=rank) for rank in range(world_size))

    @register()
    def visible_gpus(self) -> str:
        """The GPUs that Ray shows this process, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @register()
    def resident_memory_gb(self) -> float:
        """Memory of this process and of all that it started, in 10^9 bytes; what they share counts for
        each."""
        import psutil

        process = psutil.Process()
        resident = process.memory_info().rss

        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                resident += child.memory_info().rss

        return resident / 1e9


class RayClassWithInitArgs:
    """`cls(*args, **kwargs)`, later and elsewhere. Raises ValueError when `cls` is not a Worker."""

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


class ColocatedWorkerClass:
    """Several roles in one process. Calls to them take turns, in the order in which the driver makes them."""

    def __init__(self, roles: Mapping[str, RayClassWithInitArgs]) -> None:
        self.roles = dict(roles)


def create_colocated_worker_cls(roles: Mapping[str, RayClassWithInitArgs]) -> ColocatedWorkerClass:
    """Workers are made in the order of `roles`. Raises ValueError when there are none."""
    if not roles:
        raise ValueError("create_colocated_worker_cls: there are no roles")
    return ColocatedWorkerClass(roles)
