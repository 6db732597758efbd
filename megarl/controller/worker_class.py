"""Delayed construction: a worker class with its arguments, made in the worker's process; and several of them in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.controller.worker import Worker


class RayClassWithInitArgs:
    """`cls(*args, **kwargs)`, later and elsewhere. Raises ValueError when `cls` is not a Worker."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise ValueError(f"{cls!r} is not a subclass of megarl.controller.worker.Worker")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

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
