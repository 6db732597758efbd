"""Process group with NCCL's semantics over gloo, so that what hangs or fails only on CUDA also hangs or fails
on a CPU.

gloo is lenient: it connects in its constructor, raises when a peer dies, and allows two ranks on one device.
Here, as with NCCL:

- The first operation creates a communicator, and blocks its caller until all ranks have joined: those of the
  group for collectives and for coalesced transfers, the two of a pair for another send or receive. After
  `eager_connect_single_device` all use the group's.
- Operations return immediately. Those of a communicator run one after another: one that cannot end blocks all
  later ones.
- A watchdog ends the process (SIGABRT) when a peer dies during an operation, or an operation exceeds the
  limit of the group. It does not if `TORCH_NCCL_ASYNC_ERROR_HANDLING` is 0 when the group is constructed.
  Then `wait` neither returns nor raises when a peer has died or hangs: only `abort` ends it, and the use of
  the group.
- Two ranks on one device are refused.
- A communicator lives until `abort` or `shutdown`, whether its group still exists or not.

CPU tensors replace device tensors, and `wait` replaces waiting on a stream.

    group = NcclSemantics(store, rank, size, timedelta(seconds=60))      # bare, like dist.ProcessGroupNCCL
    register(); dist.init_process_group(BACKEND, ...)                  # or as the backend of all groups
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megarl.weights.p2p import ASYNC_ERROR_HANDLING
from tests.logical_devices import VisibleDevices
from tests.nccl_communicator import ENDED, Begin, Communicator, QueuedWork

BACKEND = "nccl_semantics"

_FULL = "full"  # key of the communicator of all ranks
_TAG = 0  # of all transfers: NCCL has no tags, and those of a pair match in order
_ProcessGroup: Any = dist.ProcessGroup  # its stubs overload methods that are one function here


def _collective(name: str) -> Callable[..., Any]:
    """Return a collective as a method of dist.ProcessGroup."""

    def method(self: NcclSemantics, *arguments: Any, **options: Any) -> Any:
        return self._submit(lambda gloo: getattr(gloo, name)(*arguments, **options))

    return method


class NcclSemantics(_ProcessGroup):
    """One rank of a group. The constructor returns immediately.

    Operations return a QueuedWork, or nothing if they are coalesced. They raise RuntimeError if the group was
    aborted or shut down, or if a communicator cannot be created.

    Args:
        options: A time limit, or an object with one, such as dist.ProcessGroupNCCL.Options. It applies to the
            creation of each communicator and to `shutdown`.
        device: Logical device of this rank. If None, the process's own; if that is None, one that no other
            rank uses.
    """

    supports_coalescing = True
    supports_splitting = False

    def __init__(
        self, store: dist.Store, rank: int, size: int, options: Any, device: int | None = None
    ) -> None:
        super().__init__(rank, size)
        self.store = store
        self.limit: timedelta = options if isinstance(options, timedelta) else options._timeout
        self._device = VisibleDevices().own if device is None else device
        self.communicators: dict[str, Communicator] = {}
        self._coalesced: list[Begin] | None = None
        self._is_eager = self._is_over = False
        self._has_watchdog = os.environ.get(ASYNC_ERROR_HANDLING) != "0"
        self._name = BACKEND

    @property
    def num_pair_communicators(self) -> int:
        """Number of communicators created by sends and receives that were not coalesced."""
        return len(self.communicators.keys() - {_FULL})

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Create the communicator of all ranks. Raises RuntimeError if they do not all call this, or an
        operation, within the limit."""
        self._full()
        self._is_eager = True

    def abort(self) -> None:
        """Abort the operations of this rank; its peers keep waiting. It does not affect a communicator that
        is being created."""
        self._is_over = True
        for communicator in list(self.communicators.values()):
            communicator.abort()

    def shutdown(self) -> None:
        """Wait for pending operations. Raises RuntimeError if they have not ended within the limit and were
        aborted."""
        self._is_over = True
        hung = [
            key for key, communicator in self.communicators.items() if not communicator.shut_down(self.limit)
        ]

        if hung:
            raise RuntimeError(
                f"NCCL communicators {hung} had operations that did not end within {self.limit}"
            )

    def _full(self) -> Communicator:
        return self._communicator(_FULL, self.rank(), self.size())

    def _communicator(self, key: str, rank: int, size: int) -> Communicator:
        if self._is_over:
            raise RuntimeError(ENDED)
        if key not in self.communicators:
            store = dist.PrefixStore(key, self.store)
            made = Communicator(store, rank, size, self._device, self.limit, has_watchdog=self._has_watchdog)
            self.communicators[key] = made
            if self._is_over:  # while it was being created
                made.abort()

        return self.communicators[key]

    def _submit(self, begin: Begin) -> Any:
        full = self._full()
        if self._coalesced is None:
            return full.submit([begin])
        self._coalesced.append(begin)
        return None

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """Start coalescing. `device` is given if it is called on a process group, not on a bare backend."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> QueuedWork | None:
        """Return everything since `_start_coalescing` as one operation; None if there is nothing."""
        begins = self._coalesced or []
        self._coalesced = None
        return self._full().submit(begins) if begins else None

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> Any:
        return self._transfer(lambda gloo, peer: gloo.send(tensors, peer, _TAG), destination)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._transfer(lambda gloo, peer: gloo.recv(tensors, peer, _TAG), source)

    def _transfer(self, begin: Callable[[dist.ProcessGroup, int], dist.Work], peer: int) -> Any:
        if peer == self.rank():
            raise ValueError(
                f"rank {peer} sends to itself or receives from itself, for which there is no stub"
            )

        if self._is_eager or self._coalesced is not None:
            return self._submit(lambda gloo: begin(gloo, peer))
        low, high = sorted((self.rank(), peer))
        pair = self._communicator(f"{low}:{high}", int(self.rank() == high), 2)

        return pair.submit([lambda gloo: begin(gloo, int(peer == high))])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        raise RuntimeError("NCCL cannot receive from any source")

    allreduce = _collective("allreduce")
    allreduce_coalesced = _collective("allreduce_coalesced")
    reduce = _collective("reduce")
    broadcast = _collective("broadcast")
    barrier = _collective("barrier")
    allgather = _collective("allgather")
    allgather_coalesced = _collective("allgather_coalesced")
    all_gather_single = _allgather_base = _collective("all_gather_single")
    all_gather_single_coalesced = allgather_into_tensor_coalesced = _collective("all_gather_single_coalesced")
    gather = _collective("gather")
    scatter = _collective("scatter")
    reduce_scatter = _collective("reduce_scatter")
    reduce_scatter_single = _reduce_scatter_base = _collective("reduce_scatter_single")
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = _collective(
        "reduce_scatter_single_coalesced"
    )
    alltoall = _collective("alltoall")
    all_to_all_single = alltoall_base = _collective("all_to_all_single")

    # The interface that torch and megarl.weights.p2p use of a group created by torch.

    def _is_initialized(self) -> bool:
        return _FULL in self.communicators

    def _get_backend(self, device: torch.device) -> NcclSemantics:
        return self

    def _get_backend_name(self) -> str:
        return BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name


def register() -> None:
    """Register BACKEND with torch.distributed in this process. Idempotent."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, NcclSemantics, devices=["cpu"])
        dist.batch_isend_irecv = partial(_batch_isend_irecv, dist.batch_isend_irecv)


def _batch_isend_irecv(of_torch: Callable[..., list[Any]], transfers: list[dist.P2POp]) -> list[Any]:
    """Coalesce transfers; torch does so only for groups of its own class."""
    group: Any = transfers[0].group or dist.group.WORLD
    if not isinstance(group, NcclSemantics):
        return of_torch(transfers)

    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as coalesced:
        for transfer in transfers:
            peer = {"group_dst" if transfer.op is dist.isend else "group_src": transfer.group_peer}
            transfer.op(transfer.tensor, group=group, tag=transfer.tag, **peer)

    return coalesced.works
