"""A process group with NCCL's semantics over gloo: what hangs or fails on CUDA only, hangs or fails on a CPU
as well.

gloo forgives: it connects in its constructor, raises when a peer dies, and does not mind two ranks on one
device. Here, as with NCCL:

- The first operation makes a communicator, and blocks its caller until all ranks are there: those of the
  group for collectives and for coalesced transfers, the two of a pair for another send or receive. After
  `eager_connect_single_device` all use the group's.
- Operations return at once. Those of a communicator run one after another: one that cannot end holds up all
  later ones.
- A watchdog ends the process (SIGABRT) when a peer dies during an operation, or an operation exceeds the
  limit of the group. It does not where `TORCH_NCCL_ASYNC_ERROR_HANDLING` is 0 when the group is constructed.
  Then `wait` neither returns nor raises when a peer has died or hangs: only `abort` ends it, and the use of
  the group.
- Two ranks on one device are refused.
- A communicator lives until `abort` or `shutdown`, whether its group is still there or not.

CPU tensors stand for those of devices, and `wait` for what waits on a stream.

    group = NcclSemantics(store, rank, size, timedelta(seconds=60))      # bare, as dist.ProcessGroupNCCL
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
_TAG = 0  # of all transfers: NCCL has no tags, and those of a pair match in their order
_ProcessGroup: Any = dist.ProcessGroup  # its stubs overload what is one function here


def _collective(name: str) -> Callable[..., Any]:
    """A method of dist.ProcessGroup."""

    def method(self: NcclSemantics, *arguments: Any, **options: Any) -> Any:
        return self._submit(lambda gloo: getattr(gloo, name)(*arguments, **options))

    return method


class NcclSemantics(_ProcessGroup):
    """One rank's place in a group; it returns at once.

    options: a limit of time, or an object with one, as dist.ProcessGroupNCCL.Options; it holds for the making
    of each communicator and for `shutdown`. device: the logical device of this rank; where it is None, the
    process's own, and where that is None, one that no other rank is on.

    Operations return a QueuedWork, or nothing where they are coalesced. They raise RuntimeError when the
    group was aborted or shut down, and where a communicator cannot be made.
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
        """Made so far, by sends and receives that were not coalesced."""
        return len(self.communicators.keys() - {_FULL})

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        """Makes the communicator of all ranks. Raises RuntimeError when they do not all call this, or an
        operation, within the limit."""
        self._full()
        self._is_eager = True

    def abort(self) -> None:
        """Ends what is under way on this rank; its peers still wait. It does not reach a communicator that is
        being made."""
        self._is_over = True
        for communicator in list(self.communicators.values()):
            communicator.abort()

    def shutdown(self) -> None:
        """Waits for what is under way. Raises RuntimeError where that has not ended within the limit, and was
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
            if self._is_over:  # while it was made
                made.abort()

        return self.communicators[key]

    def _submit(self, begin: Begin) -> Any:
        full = self._full()
        if self._coalesced is None:
            return full.submit([begin])
        self._coalesced.append(begin)
        return None

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """device: given where it is called as a process group's, not as a bare backend's."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device | None = None) -> QueuedWork | None:
        """What was begun since `_start_coalescing` is one operation; None where that is nothing."""
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

    # What torch, and megarl.weights.p2p, ask of a group that torch has made.

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
    """Makes BACKEND known to torch.distributed in this process; another call changes nothing."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, NcclSemantics, devices=["cpu"])
        dist.batch_isend_irecv = partial(_batch_isend_irecv, dist.batch_isend_irecv)


def _batch_isend_irecv(of_torch: Callable[..., list[Any]], transfers: list[dist.P2POp]) -> list[Any]:
    """torch coalesces the transfers of groups of its own class only."""
    group: Any = transfers[0].group or dist.group.WORLD
    if not isinstance(group, NcclSemantics):
        return of_torch(transfers)

    with dist._coalescing_manager(group, torch.device("cpu"), async_ops=True) as coalesced:
        for transfer in transfers:
            peer = {"group_dst" if transfer.op is dist.isend else "group_src": transfer.group_peer}
            transfer.op(transfer.tensor, group=group, tag=transfer.tag, **peer)

    return coalesced.works
