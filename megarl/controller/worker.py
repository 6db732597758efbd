"""The base class of what runs in a worker process: who am I, where, and what am I doing."""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import NamedTuple

from megarl.controller.activity import Activity
from megarl.controller.mesh import MeshCoordinate


class WorkerContext(NamedTuple):
    role: str
    rank: int
    world_size: int
    local_rank: int
    node: str
    activity: Activity


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

    def mesh_coordinate(self) -> MeshCoordinate:
        """Where this rank stands in its model's layout. Every rank is a replica of its own unless a subclass knows better."""
        return MeshCoordinate(dp=self.rank)

    def visible_gpus(self) -> str:
        """The GPUs that Ray shows this process, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def resident_memory_gb(self) -> float:
        """Memory of this process and of all that it started, in 10^9 bytes; what they share counts for each."""
        import psutil

        process = psutil.Process()
        resident = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                resident += child.memory_info().rss
        return resident / 1e9
