"""Small workers for the controller's tests, imported by the Ray processes too."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megarl.batch.data_proto import DataProto
from megarl.config.schema import RankCoordinate
from megarl.controller.compat import VerlDispatch
from megarl.controller.dispatch import Dispatch, Mesh
from megarl.controller.worker import Worker, register

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GREETING")


class EchoWorker(Worker):
    """Ranks are arranged as in Megatron: tp fastest, then dp (4 ranks: dp=2, tp=2)."""

    def __init__(self, tensor_parallel_size: int = 1, *, label: str = "echo") -> None:
        self.seen_at_construction = {name: os.environ.get(name) for name in LAUNCH} | {
            "threads": torch.get_num_threads()
        }
        self.label = label

    @classmethod
    def mesh(cls, world_size: int, tensor_parallel_size: int = 1, *, label: str = "echo") -> Mesh:
        return tuple(
            RankCoordinate(dp=rank // tensor_parallel_size, tp=rank % tensor_parallel_size)
            for rank in range(world_size)
        )

    @register(Dispatch.ONE_TO_ALL)
    def about(self) -> dict[str, Any]:
        return {
            **self.seen_at_construction,
            "role": self.role,
            "rank": self.rank,
            "pid": os.getpid(),
            "label": self.label,
            "threads_now": torch.get_num_threads(),
            "node": self.node,
        }

    @register(Dispatch.RANK_ZERO)
    def who(self) -> int:
        return self.rank

    @register(VerlDispatch.ALL_TO_ALL.rule)
    def add_rank(self, value: int, *, factor: int) -> int:
        return value * factor + self.rank

    @register(VerlDispatch.DP_COMPUTE_PROTO.rule)
    def square(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"square": batch.batch["x"] ** 2, "rank": torch.full((len(batch),), self.rank)}
        )

    @register(Dispatch.MEGATRON_MESH)
    def scale(self, batch: DataProto, factor: int) -> DataProto:
        batch.batch["x"] *= factor  # in place: the other ranks of the replica must not see it
        time.sleep(0.05 * self.rank)
        rank = torch.full((len(batch),), self.rank)
        return DataProto.from_dict(
            {"scaled": batch.batch["x"], "rank": rank}, {"uid": batch.non_tensor_batch["uid"]}
        )

    @register(Dispatch.MEGATRON_MESH, blocking=False)
    def scale_later(self, batch: DataProto, factor: int) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] * factor}, {"uid": batch.non_tensor_batch["uid"]})

    @register(Dispatch.MEGATRON_MESH)
    def expand(self, batch: DataProto, n: int) -> DataProto:
        return batch.select(["x"]).repeat(n)

    @register(Dispatch.MEGATRON_MESH)
    def count(self, batch: DataProto) -> dict[str, int]:
        return {"rows": len(batch), "rank": self.rank}

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def size_of(self, value: Any) -> tuple[str, int]:
        return type(value).__name__, len(value)

    def unregistered(self) -> None: ...

    # ---- failures

    @register(Dispatch.ONE_TO_ALL)
    def fail_with(self, kind: str, text: str, how: str) -> None:
        """Raise an error of torch or of Python.

        Args:
            kind: Its name, in torch or builtins.
            text: Its text.
            how: `itself`, or how another error that is raised after it follows from it: `cause`, `context`.
        """
        error = (getattr(torch, kind, None) or getattr(builtins, kind))(text)
        if how == "cause":
            raise ValueError("the snapshot cannot be written") from error
        if how == "context":
            try:
                raise error
            finally:
                self.no_such_attribute.close()
        raise error

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def fail_on(self, rank: int, after_s: float = 0.0) -> int:
        """Raise on the given rank.

        The others complain about it, earlier than it does if `after_s` is positive.
        """
        if self.rank == rank:
            time.sleep(after_s)
            raise KeyError(f"no such layer on rank {rank}")

        if after_s < 0:
            time.sleep(-after_s)
        raise RuntimeError(
            f"[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:{rank}"
        )

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> int:
        with self.phase("napping"):
            time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep_on(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def meet(self, folder: str, number: int) -> int:
        """Return when `number` processes run this method at the same time."""
        with self.phase("waiting"):
            Path(folder, f"{self.role}-{self.rank}").touch()
            while len(os.listdir(folder)) < number:
                time.sleep(0.01)
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def stop_python(self, rank: int) -> None:
        if self.rank == rank:
            print("these are my last words", file=sys.stderr)
            os.abort()
        time.sleep(0.2)
        raise RuntimeError("gloo/transport: Connection reset by peer")

    @register(Dispatch.ONE_TO_ALL)
    def start_children(self) -> list[int]:
        """Start a child, and a grandchild in a separate session whose parent has ended."""
        child = subprocess.Popen(["sleep", "600"])
        script = (
            "import subprocess; quiet = subprocess.DEVNULL;"
            "print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=quiet, "
            "stderr=quiet).pid)"
        )
        grandchild = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        )

        return [child.pid, int(grandchild.stdout)]


class BrokenWorker(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            raise FileNotFoundError("no model in /nowhere")

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> int:
        return self.rank


class SlowToStart(Worker):
    """A worker whose rank 1 takes minutes to start."""

    def __init__(self) -> None:
        if self.rank == 1:
            with self.phase("reading weights"):
                time.sleep(120)

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> int:
        return self.rank


class LayoutOfThree(Worker):
    @classmethod
    def mesh(cls, world_size: int) -> Mesh:
        return Worker.mesh(3)


class ClashingWorker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def shutdown(self) -> None:
        """A method with the name of a group method."""


class CollectiveWorker(Worker):
    """Joins a gloo group through the address that the group chose."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("gloo")

    @register(Dispatch.ONE_TO_ALL)
    def sum_ranks(self) -> int:
        total = torch.tensor(self.rank)
        torch.distributed.all_reduce(total)
        return int(total)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def hang(self, absent: int) -> None:
        if self.rank != absent:
            torch.distributed.barrier()
