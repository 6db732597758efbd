"""A process group of one trainer rank, which broadcasts, and engine ranks, which receive: beside whatever groups they have."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megarl.weights.bucket import GroupAddress
from megarl.weights.receipt import WeightTransferError


def reserve_port(host: str) -> socket.socket:
    """A listening socket on a free port of `host`, an address of this node: no one else can take the port, and nobody beyond
    that address can reach it. To be given to WeightGroup, which owns it then."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    return listener


class WeightGroup:
    """One rank's place in the group. Rank 0 holds the meeting point: `listener` is the reserved port of `address`.

    Returns when all `address.world_size` ranks are there. Raises WeightTransferError when they are not within
    `address.time_limit_s`.
    """

    def __init__(self, address: GroupAddress, rank: int, device: torch.device, listener: socket.socket | None = None) -> None:
        self._address, self._rank = address, rank
        limit = timedelta(seconds=address.time_limit_s)
        descriptor = None if listener is None else listener.detach()
        try:
            self._store: Any = dist.TCPStore(
                address.host,
                address.port,
                is_master=rank == 0,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
            self._group: Any = self._backend(limit, device)
        except RuntimeError as error:  # all that torch.distributed raises derives from it
            self.close()
            raise WeightTransferError(
                f"weight group {address}: rank {rank} could not join within {address.time_limit_s:g} s: {error}"
            ) from error

    def _backend(self, limit: timedelta, device: torch.device) -> Any:
        """The backends themselves, which need no default group as `dist.new_group` does."""
        address = self._address
        if address.backend == "nccl":
            torch.cuda.set_device(device)
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = limit
            return dist.ProcessGroupNCCL(self._store, self._rank, address.world_size, nccl_options)
        if address.backend != "gloo":
            raise ValueError(f"weight group backend {address.backend!r}; it must be gloo or nccl")
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address_towards(address.host, address.port))]
        return dist.ProcessGroupGloo(self._store, self._rank, address.world_size, options)

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Starts to send (rank 0) or to receive `tensor`, contiguous; `wait` for it by `wait_for`."""
        assert self._group is not None, "the group is closed"
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([tensor], options)

    def wait_for(self, work: dist.Work) -> None:
        """Raises WeightTransferError where a peer is gone or too slow; the group is of no use then."""
        try:
            work.wait()
        except RuntimeError as error:
            raise WeightTransferError(
                f"weight group {self._address.name}: rank {self._rank} lost a peer in a broadcast: {error}"
            ) from error

    def close(self) -> None:
        """Leaves; peers that still wait for this rank fail at once."""
        self._group = None
        self._store = None


def _own_address_towards(host: str, port: int) -> str:
    """Of the interface that leads to `host`; a UDP socket that is connected sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
