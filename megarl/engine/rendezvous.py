"""The rendezvous of a group: torch's store, at the address of rank 0's node only."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megarl.machine.ports import listen


def open_store(address: str, port: int, rank: int, num_ranks: int, limit: timedelta) -> dist.TCPStore:
    """Open the store when all ranks have joined. Rank 0 listens at `address` (machine/ports.py).

    torch's `env://` and `tcp://` would listen on all interfaces of the node, and anyone who can reach a store
    can read and change it, including where ranks connect to.

    Raises:
        DistStoreError: Not all ranks joined within `limit`.
    """
    is_master = rank == 0
    listening = listen(address, port).detach() if is_master else None
    return dist.TCPStore(address, port, num_ranks, is_master, limit, master_listen_fd=listening)
