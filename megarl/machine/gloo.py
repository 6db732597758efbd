"""One gloo device for all process groups of a process.

torch creates a device for each group. A device has a thread that wakes up a hundred times per second, also
when the group is idle, and Megatron creates dozens of groups in each rank: together, they use several percent
of a core.

The thread polls without sleeping while another thread holds the lock of a connection that has data. If the
holder waits for a core, the thread may occupy that core: with four ranks on two cores, it used more than half
of the processor time of small collectives. It therefore has a low priority.
"""

from __future__ import annotations

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

_NICENESS = 10  # a tenth of the usual share of a core


@functools.cache
def device_of(address: str) -> Any:
    """Return this process's gloo device that listens at an address; an empty one is torch's default."""
    # On Linux, os.nice concerns the calling thread only, and the device's thread inherits its priority.
    with ThreadPoolExecutor(max_workers=1, initializer=os.nice, initargs=(_NICENESS,)) as creator:
        return creator.submit(_create_device, address).result()


def _create_device(address: str) -> Any:
    if not address:
        return dist.ProcessGroupGloo.create_default_device()
    return dist.ProcessGroupGloo.create_device(hostname=address)


def share_device() -> None:
    """Let all gloo groups that torch creates in this process use one device.

    Call it before the first group is created.
    """
    dist.Backend.register_backend(
        "gloo",
        _create,
        extended_api=True,
        devices=["cpu", "cuda"],
        _backend_type=dist.ProcessGroup.BackendType.GLOO,
    )


def _create(group: Any, options: Any) -> dist.ProcessGroupGloo:
    """Create a group as torch does, with the shared device."""
    settings = dist.ProcessGroupGloo._Options()  # pyrefly: ignore[missing-attribute]
    settings._timeout = group.timeout
    settings._devices = [device_of("")]
    settings.enable_reconfigure = group.enable_reconfigure
    settings.global_ranks_in_group = group.global_ranks_in_group
    settings.group_name = group.group_id

    return dist.ProcessGroupGloo(group.store, group.group_rank, group.group_size, settings)
