"""Where the ranks of a group meet: torch's store, at the address of rank 0's node and no other."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megarl.machine.ports import listen


def open_store(address: str, port: int, rank: int, num_ranks: int, limit: timedelta) -> dist.TCPStore:
    """Returns when all ranks have come, or raises DistStoreError after `limit`. Rank 0 listens at `address`
    (machine/ports.py).

    torch's `env://` and `tcp://` would listen at every address of the node, and whoever reaches a store can
    read and change it, also where the ranks' connections lead.
    """
    is_master = rank == 0
    listening = listen(address, port).detach() if is_master else None
    return dist.TCPStore(address, port, num_ranks, is_master, limit, master_listen_fd=listening)
