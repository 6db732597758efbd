"""One rank of the all-reduce with which `megarl doctor` tests communication between processes of a node.

Run it with `python -m`. The arguments are backend, rank, number of ranks, address, port, and time limit in
seconds. It prints the seconds of the second all-reduce, and exits with 1 if a sum is wrong.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.engine.rendezvous import open_store

ELEMENTS = 2**18  # 1 MiB of float32


def main(backend: str, rank: int, ranks: int, address: str, port: int, limit_s: float) -> int:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=limit_s)
    # All ranks meet at the store, which rank 0 opens on the port that the parent has reserved.
    dist.init_process_group(
        backend,
        store=open_store(address, port, rank, ranks, limit),
        rank=rank,
        world_size=ranks,
        timeout=limit,
    )

    for _ in range(2):  # the first one includes connecting
        begin = time.monotonic()
        values = torch.full((ELEMENTS,), float(rank + 1), device=device)
        dist.all_reduce(values)
        # Reading the values synchronizes with a GPU.
        low = float(values.min())
        high = float(values.max())

    print(time.monotonic() - begin)
    dist.destroy_process_group()
    return 0 if low == high == ranks * (ranks + 1) / 2 else 1


if __name__ == "__main__":
    backend, rank, ranks, address, port, limit_s = sys.argv[1:]
    sys.exit(main(backend, int(rank), int(ranks), address, int(port), float(limit_s)))
