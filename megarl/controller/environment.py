"""The environment variables of a run, in one table: what megarl sets where the user has not, where, and why.

What the user sets, in the shell of the driver or on a node, is left as it is, and what is set for the driver
reaches every worker process of every node. docs/launch.md shows the table, a test compares the two. Imports
neither torch nor ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, MutableMapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Where(str, Enum):
    """The processes that get a variable."""

    daemons = "Ray's daemons that megarl starts"
    workers = "worker processes"
    cpu_workers = "worker processes without a GPU"
    gpu_workers = "worker processes with GPUs"
    weight_group_workers = "the actor's processes with GPUs, with `resharding.transport=group`"


class Setting(NamedTuple):
    """`value` None: it is found on each node (INTERFACES)."""

    value: str | None
    where: Where
    why: str


# A model takes about 15 per shape of a micro-batch, whatever its number of layers.
_KERNELS_KEPT = "128"

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "CUDA_DEVICE_MAX_CONNECTIONS": Setting(
            "1",
            Where.gpu_workers,
            "Megatron overlaps tensor-parallel communication with computation only when kernels are "
            "launched in one queue",
        ),
        "NCCL_CUMEM_ENABLE": Setting(
            "0",
            Where.weight_group_workers,
            "the actor joins NCCL groups with SGLang's engines, which set it to 0, and all ranks of a group "
            "must agree; elsewhere NCCL's "
            "default lets communicators connect their peers when they are first used, which saves device "
            "memory",
        ),
        "NCCL_DEBUG": Setting("WARN", Where.gpu_workers, "NCCL says why it fails"),
        "NCCL_SOCKET_IFNAME": Setting(
            None,
            Where.gpu_workers,
            "the interface that has the node's address in the cluster; NCCL would take the first that it "
            "finds",
        ),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Setting(
            "1800",
            Where.gpu_workers,
            "as long as trainer.phase_time_limit_s, which ends a hang with every rank's stack; torch's 480 "
            "s would come before it",
        ),
        "TORCHINDUCTOR_COMPILE_THREADS": Setting(
            "1",
            Where.gpu_workers,
            "Megatron compiles a few small functions; torch would start a pool of up to 32 processes for it "
            "per worker",
        ),
        "GLOO_SOCKET_IFNAME": Setting(
            None,
            Where.workers,
            "the interface that has the node's address in the cluster; gloo would take what the host's name "
            "resolves to",
        ),
        "OMP_NUM_THREADS": Setting(
            "1",
            Where.cpu_workers,
            "as many threads as cores, in each of several processes, stand in each other's way: a phase "
            "gives each process that computes "
            "in it an equal part of the cores; what you set is the number in all",
        ),
        "OMP_WAIT_POLICY": Setting(
            "PASSIVE",
            Where.cpu_workers,
            "threads that wait for each other leave the core to others, where more than a run is at work",
        ),
        "LRU_CACHE_CAPACITY": Setting(
            _KERNELS_KEPT,
            Where.cpu_workers,
            "torch keeps the kernels of 1024 shapes, 0.3 MB each; packed micro-batches differ in shape, so "
            "that few are used again",
        ),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": Setting(
            _KERNELS_KEPT, Where.cpu_workers, "oneDNN keeps as many again, below LRU_CACHE_CAPACITY"
        ),
        "TOKENIZERS_PARALLELISM": Setting(
            "false", Where.workers, "the tokenizers' threads do not survive a fork, and warn of it at length"
        ),
        "RAY_USAGE_STATS_ENABLED": Setting("0", Where.daemons, "nothing is sent out of the cluster"),
        "RAY_agent_register_timeout_ms": Setting(
            "600000",
            Where.daemons,
            "a node whose agents start slowly, from a busy or slow disk, is not ended for it",
        ),
        "RAY_worker_register_timeout_seconds": Setting(
            "600",
            Where.daemons,
            "nor is a worker; by default Ray ends it after 60 s and starts another, which is as slow",
        ),
        "RAY_worker_niceness": Setting(
            "0",
            Where.daemons,
            "workers share the cores as the driver does; at Ray's 15, any other busy process of the node "
            "takes nearly all of their time",
        ),
        "RAY_enable_worker_prestart": Setting(
            "0", Where.daemons, "workers are started when they are needed, not one per logical CPU in advance"
        ),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": Setting(
            "0", Where.daemons, "a worker that asks for no GPU keeps the node's CUDA_VISIBLE_DEVICES"
        ),
    }
)
INTERFACES = tuple(name for name, setting in SETTINGS.items() if setting.value is None)
# What the user sets of these for the driver is meant for every process, also where it is not in the table.
# torch's allocator (PYTORCH_) stays as torch has it: expandable segments can neither be shared with an engine
# on the same device nor given back by SGLang.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_", "PYTORCH_", "UCX_", "NVTE_", "SGLANG_")


def daemon_settings() -> dict[str, str]:
    return {
        name: setting.value
        for name, setting in SETTINGS.items()
        if setting.where is Where.daemons and setting.value is not None
    }


def users_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the user has set in this process's environment, of the table and of PREFIXES: a driver gives it to
    its workers."""
    for_workers = {name for name, setting in SETTINGS.items() if setting.where is not Where.daemons}
    return {
        name: value for name, value in environment.items() if name in for_workers or name.startswith(PREFIXES)
    }


def fill_in(environment: MutableMapping[str, str], node: str, use_gpu: bool) -> None:
    """Adds to the environment of a worker process on `node`, an address, what nobody has set. Before torch is
    loaded."""
    places = (Where.workers, Where.gpu_workers if use_gpu else Where.cpu_workers)
    # What the user or the driver has set takes precedence.
    for name, setting in SETTINGS.items():
        value = setting.value if setting.value is not None else interface_of(node)
        if setting.where in places and value is not None:
            environment.setdefault(name, value)


def weight_group_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that trainer processes need to join NCCL groups with engines, except those the
    user has set."""
    return {
        name: setting.value
        for name, setting in SETTINGS.items()
        if setting.where is Where.weight_group_workers
        and setting.value is not None
        and name not in environment
    }


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address; None where none has it (an address that is
    translated)."""
    import psutil  # here, so that reading the table needs nothing

    try:
        wanted = {info[4][0] for info in socket.getaddrinfo(address, None)}
    except socket.gaierror:
        return None

    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(entry.address in wanted for entry in addresses):
            return name

    return None


def describe(
    use_gpu: bool, places: Collection[Where], environment: Mapping[str, str] = os.environ
) -> list[tuple[str, str, str]]:
    """(name, value, whose value it is) in those of `places` that a run has which this process drives, for its
    first page."""
    absent = {Where.cpu_workers} if use_gpu else {Where.gpu_workers, Where.weight_group_workers}
    rows = [
        (
            name,
            environment.get(name, setting.value or "the interface of the node's address"),
            "yours" if name in environment else "megarl's",
        )
        for name, setting in SETTINGS.items()
        if setting.where in places and setting.where not in absent
    ]
    # Add what the user has set beyond the table, since it reaches the workers too.
    listed = {name for name, _, _ in rows}

    return rows + [
        (name, value, "yours")
        for name, value in sorted(users_settings(environment).items())
        if name not in listed
    ]
