"""`@register` makes a worker's method one that the driver calls: what such a method is, to Python and to a type checker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isasyncgenfunction, iscoroutinefunction
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from megarl.batch.data_proto import DataProto
from megarl.controller.dispatch import Dispatch

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

    def __init__(self, function: Callable[..., Any], dispatch_mode: Dispatch, blocking: bool) -> None:
        self.function, self.dispatch_mode, self.blocking = function, dispatch_mode, blocking
        self.name = function.__name__
        self.owner: type = object
        self.__doc__, self.__wrapped__ = function.__doc__, function

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    @overload
    def __get__(self, worker: None, owner: type) -> Self: ...
    @overload
    def __get__(self, worker: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, worker: object, owner: type) -> Any:
        return self if worker is None else MethodType(self.function, worker)

    def __repr__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


# Of a mesh: the method takes its part of a batch first; the driver gives the parts of all replicas, and gets a result of each.


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
    dispatch_mode: Literal[Dispatch.ALL_TO_ALL, Dispatch.DATA_PARALLEL], blocking: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], RemoteMethod[P, R, ..., Any]]: ...
def register(dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL, blocking: bool = True) -> Any:
    """Marks a worker's method for `group.call`, and binds it on the group by name. `blocking` False: the call returns a future at once.

    Raises ValueError for an `async def`: all ranks of a group run a call together, one call after the other.
    """

    def mark(method: Callable[..., Any]) -> RemoteMethod[..., Any, ..., Any]:
        if iscoroutinefunction(method) or isasyncgenfunction(method):
            raise ValueError(
                f"{method.__qualname__} is `async def`, but ranks run their calls one after the other, and nothing would await it; "
                "make it a plain `def`, with asyncio.run around what it awaits (blocking=False frees the driver meanwhile)"
            )
        return RemoteMethod(method, dispatch_mode, blocking)

    return mark


def registered_methods(worker_class: type) -> dict[str, RemoteMethod[..., Any, ..., Any]]:
    """Those of the class and of its bases, by name."""
    found = {name: getattr(worker_class, name) for name in dir(worker_class)}
    return {name: method for name, method in found.items() if isinstance(method, RemoteMethod)}
