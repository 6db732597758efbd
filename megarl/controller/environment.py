"""The environment variables of a run in one table: what megarl sets if the user has not, where, and why.

Variables that the user sets, in the shell of the driver or on a node, are kept. Those set for the driver
reach every worker process on every node. docs/launch.md contains the table, and a test compares the two.
Imports neither torch nor ray.
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
    """The default of one variable.

    Attributes:
        value: The value. None: it is determined on each node (INTERFACES).
        where: The processes that get it.
        why: The reason.
    """

    value: str | None
    where: Where
    why: str


# A model needs about 15 per micro-batch shape, whatever its number of layers.
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
            "must agree; otherwise NCCL's default connects peers when they are first used, which saves "
            "device memory",
        ),
        "NCCL_DEBUG": Setting("WARN", Where.gpu_workers, "NCCL reports why it fails"),
        "NCCL_SOCKET_IFNAME": Setting(
            None,
            Where.gpu_workers,
            "the interface with the node's address in the cluster; by default NCCL takes the first that it "
            "finds",
        ),
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Setting(
            "1800",
            Where.gpu_workers,
            "equals trainer.phase_time_limit_s, which ends a hang with every rank's stack; torch's 480 s "
            "would expire first",
        ),
        "TORCHINDUCTOR_COMPILE_THREADS": Setting(
            "1",
            Where.gpu_workers,
            "Megatron compiles a few small functions; by default torch starts a pool of up to 32 processes "
            "per worker for it",
        ),
        "GLOO_SOCKET_IFNAME": Setting(
            None,
            Where.workers,
            "the interface with the node's address in the cluster; by default gloo takes what the host "
            "name resolves to",
        ),
        "OMP_NUM_THREADS": Setting(
            "1",
            Where.cpu_workers,
            "as many threads as cores in each of several processes compete for the cores; each phase gives "
            "its processes equal shares of the cores; a value that you set is the total",
        ),
        "OMP_WAIT_POLICY": Setting(
            "PASSIVE",
            Where.cpu_workers,
            "waiting threads leave the core to others when more than one run is active",
        ),
        "LRU_CACHE_CAPACITY": Setting(
            _KERNELS_KEPT,
            Where.cpu_workers,
            "torch caches kernels for 1024 shapes, 0.3 MB each; packed micro-batches differ in shape, so "
            "few are reused",
        ),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": Setting(
            _KERNELS_KEPT, Where.cpu_workers, "oneDNN's own cache of the same size, below LRU_CACHE_CAPACITY"
        ),
        "TOKENIZERS_PARALLELISM": Setting(
            "false", Where.workers, "the tokenizers' threads do not survive a fork, and warn about it"
        ),
        "RAY_USAGE_STATS_ENABLED": Setting("0", Where.daemons, "no data is sent out of the cluster"),
        "RAY_agent_register_timeout_ms": Setting(
            "600000",
            Where.daemons,
            "a node whose agents start slowly, for example from a slow disk, is not ended",
        ),
        "RAY_worker_register_timeout_seconds": Setting(
            "600",
            Where.daemons,
            "the same for workers; by default Ray ends one after 60 s and starts another, equally slow one",
        ),
        "RAY_health_check_period_ms": Setting(
            "1000", Where.daemons, "how often the head asks each node whether it is alive"
        ),
        "RAY_health_check_timeout_ms": Setting(
            "4000",
            Where.daemons,
            "a node that has vanished is noticed within half a minute, not after more than a minute",
        ),
        "RAY_health_check_failure_threshold": Setting(
            "5", Where.daemons, "a node is lost after this number of questions without an answer"
        ),
        "RAY_worker_niceness": Setting(
            "0",
            Where.daemons,
            "workers share the cores like the driver; at Ray's 15, any other busy process on the node takes "
            "nearly all CPU time",
        ),
        "RAY_enable_worker_prestart": Setting(
            "0", Where.daemons, "workers are started when needed, not in advance for each logical CPU"
        ),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": Setting(
            "0", Where.daemons, "a worker without a GPU keeps the node's CUDA_VISIBLE_DEVICES"
        ),
    }
)
INTERFACES = tuple(name for name, setting in SETTINGS.items() if setting.value is None)
# Variables with these prefixes that the user sets for the driver reach every process, even if they are not in
# the table. torch's allocator (PYTORCH_) keeps torch's defaults: expandable segments can neither be shared
# with an engine on the same device nor released by SGLang.
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_", "PYTORCH_", "UCX_", "NVTE_", "SGLANG_")


def daemon_settings() -> dict[str, str]:
    return {
        name: setting.value
        for name, setting in SETTINGS.items()
        if setting.where is Where.daemons and setting.value is not None
    }


def users_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the table and of PREFIXES in this process's environment.

    The driver passes them to its workers.
    """
    for_workers = {name for name, setting in SETTINGS.items() if setting.where is not Where.daemons}
    return {
        name: value for name, value in environment.items() if name in for_workers or name.startswith(PREFIXES)
    }


def fill_in(environment: MutableMapping[str, str], node: str, use_gpu: bool) -> None:
    """Add the defaults to the environment of a worker process, before torch is loaded.

    Args:
        environment: The environment of the process.
        node: The address of its node.
        use_gpu: Whether the process has GPUs.
    """
    places = (Where.workers, Where.gpu_workers if use_gpu else Where.cpu_workers)
    # Values set by the user or the driver take precedence.
    for name, setting in SETTINGS.items():
        value = setting.value if setting.value is not None else interface_of(node)
        if setting.where in places and value is not None:
            environment.setdefault(name, value)


def weight_group_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that trainer processes need to join NCCL groups with engines.

    Those that the user has set are omitted.
    """
    return {
        name: setting.value
        for name, setting in SETTINGS.items()
        if setting.where is Where.weight_group_workers
        and setting.value is not None
        and name not in environment
    }


def interface_of(address: str) -> str | None:
    """Return the network interface of this machine that has the address.

    None if there is none, as with a translated (NAT) address.
    """
    import psutil  # imported here, so that reading the table needs no packages

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
    """Return (name, value, origin) of the variables in `places` for the first page of a run."""
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
    # Add variables outside the table that the user has set, because they reach the workers too.
    listed = {name for name, _, _ in rows}

    return rows + [
        (name, value, "yours")
        for name, value in sorted(users_settings(environment).items())
        if name not in listed
    ]
