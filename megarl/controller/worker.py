"""The base class of what runs in a worker process, and its delayed construction there, alone or beside others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from megarl.controller.activity import Activity, WorkerContext
from megarl.controller.dispatch import Mesh, MeshCoordinate
from megarl.controller.register import register


class Worker:
    """Subclass it and mark with `@register` the methods that the driver calls.

    The context is there before `__init__` runs, and so are RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in the
    environment. Outside a worker group (in a unit test) a worker is rank 0 of 1.
    """

    context = WorkerContext(role="worker", rank=0, world_size=1, local_rank=0, node="localhost", activity=Activity())

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
        """Among the group's ranks of this node. With GPUs, Ray shows a process its own ones only: the first is always number 0."""
        return self.context.local_rank

    @property
    def node(self) -> str:
        """Its IP address."""
        return self.context.node

    def phase(self, name: str) -> AbstractContextManager[None]:
        """`with self.phase("forward"):` names a part of a call, for the timeline and for the report of a hang."""
        return self.context.activity.phase(name)

    @classmethod
    def mesh(cls, world_size: int, *args: Any, **kwargs: Any) -> Mesh:
        """Where each rank stands in the layout of a worker that is made of these arguments: known to the driver without asking.

        Every rank is a replica of its own unless a subclass knows better.
        """
        return tuple(MeshCoordinate(dp=rank) for rank in range(world_size))

    @register()
    def visible_gpus(self) -> str:
        """The GPUs that Ray shows this process, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    @register()
    def resident_memory_gb(self) -> float:
        """Memory of this process and of all that it started, in 10^9 bytes; what they share counts for each."""
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
