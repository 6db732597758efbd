"""Start Ray for a run, or join an existing cluster, and end all processes afterwards."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager, nullcontext

import ray
import ray._private.worker
from ray._private import services

from megarl.controller.daemons import (
    LOOPBACK,
    OBJECT_STORE_MB,
    add_key,
    last_words,
    loopback_only,
    read_key,
    small_nodes,
    start_patiently,
    without_job_server,
)
from megarl.controller.environment import daemon_settings
from megarl.controller.lost_process import num_oom_kills
from megarl.machine.ray_address import AUTO, VARIABLE, cluster_address, host_and_port
from megarl.machine.reaper import (
    OWNER,
    descendants,
    end_held,
    end_processes_of,
    has_ended,
    hold,
    name_of,
    start_reaper,
)
from megarl.machine.replaced import replaced

_ANSWER_S = 10.0
_END_S = 5.0  # how long a raylet may take to end after a process that it needs
_LOOK_S = 0.1
_MIN_OBJECT_STORE_MB = 80  # Ray refuses less than 75 MiB

_log = logging.getLogger(__name__)

_RAY = "/ray"  # suffix of the driver's mark for processes under Ray

_owner: str | None = None
_daemons: list[int] = []  # descriptors of the processes that ray.init started here
_added_variables: list[str] = []  # the key of a Ray that was started here
_oom_kills_before = 0  # by this machine's kernel, when Ray was started or joined
_needed: dict[str, int] = {}  # descriptors of indispensable daemons, by name


def start_ray(*, num_cpus: int, num_gpus: int = 0, object_store_mb: float = OBJECT_STORE_MB) -> None:
    """Join the cluster of RAY_ADDRESS if it is set; otherwise start Ray on this machine.

    A Ray that is started here can be reached from this machine only.

    Args:
        num_cpus: Logical CPUs: one per process that the run needs, whatever the number of cores.
        num_gpus: The number of GPUs.
        object_store_mb: The limit of the shared memory for values sent between processes.

    Raises:
        ValueError: A value that Ray would refuse, or a RAY_ADDRESS that does not answer.
    """
    if num_cpus < 1 or object_store_mb < _MIN_OBJECT_STORE_MB:
        raise ValueError(
            f"start_ray: num_cpus={num_cpus} must be at least 1, object_store_mb={object_store_mb:g} at "
            f"least {_MIN_OBJECT_STORE_MB}"
        )

    global _oom_kills_before
    # OOM kills before this run must not be attributed to it.
    _oom_kills_before = num_oom_kills()
    if ray.is_initialized():
        raise ValueError("start_ray: Ray is already running in this process; call shutdown() first")

    # Join the cluster of RAY_ADDRESS. This process neither owns nor ends its daemons.
    if (named := cluster_address()) is not None:
        _join(named)
        # The driver may share its process group with a shell pipeline.
        start_reaper(process_owner(), whole_group=False)
        return

    # Start a Ray for this run. Its daemons inherit the settings and the key from this environment.
    for name, value in daemon_settings().items():
        os.environ.setdefault(name, value)
    _added_variables.extend(add_key(os.environ))
    read_key()
    # Child processes that appear during the start are Ray's daemons.
    before = set(descendants(os.getpid()))
    # Ray's daemons, and so its workers, have a separate mark.
    mark = {OWNER: process_owner() + _RAY}
    with loopback_only(), small_nodes(), without_job_server(), replaced(os.environ, mark):
        start_patiently(lambda: _start_here(num_cpus, num_gpus, object_store_mb), _log.warning)
    daemons = [pid for pid in descendants(os.getpid()) if pid not in before]
    start_reaper(process_owner(), whole_group=False, named=daemons)
    _daemons.extend(hold(daemons))

    # Nothing works without the GCS and the raylet, so their end is monitored explicitly.
    for pid in daemons:
        if (name := name_of(pid)) in ("gcs_server", "raylet"):
            _needed.update((name, descriptor) for descriptor in hold([pid]))


def _start_here(num_cpus: int, num_gpus: int, object_store_mb: float) -> None:
    ray.init(
        address="local",  # otherwise a Ray that happens to run here would be joined
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=int(object_store_mb * 2**20),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )


def oom_kills(node: str | None) -> int:
    """Return how many processes the kernel's OOM killer has ended on a node during this run.

    Returns 0 for other nodes than the driver's.
    """
    is_here = ray.is_initialized() and node == ray._private.worker.global_worker.node_ip_address
    return max(0, num_oom_kills() - _oom_kills_before) if is_here else 0


def ended_daemon() -> str | None:
    """Return the name of an indispensable Ray daemon of this process that has ended, if any."""
    return next((name for name, descriptor in _needed.items() if has_ended(descriptor)), None)


def ended_node() -> str | None:
    """Return the daemon whose end has ended the only node of a Ray that was started here, if Ray says so.

    To be called when Ray has reported that a node is lost. No other node can join such a Ray, and its raylet
    may take a moment to end after a process that it needs.
    """
    return (await_ended_daemon() or "raylet") if _needed else None


def await_ended_daemon() -> str | None:
    """Return `ended_daemon` after processes of a Ray that was started here were lost.

    After the end of an agent, its raylet ends them, and itself a moment later.
    """
    end_s = time.monotonic() + _END_S
    while any(map(has_ended, _daemons)) and ended_daemon() is None and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return ended_daemon()


def daemons_last_words() -> list[str]:
    """Return the last severe lines in the logs of Ray's daemons on this node."""
    return last_words(log_folder()) if ray._private.worker._global_node is not None else []


def is_joined() -> bool:
    """Return whether this process has joined a cluster that it did not start, and that outlives it."""
    return ray.is_initialized() and not _needed


@contextmanager
def visit() -> Generator[None]:
    """Be in the cluster of RAY_ADDRESS during the block, unless this process already is in one."""
    named = cluster_address()
    if ray.is_initialized() or named is None:
        yield
        return
    _join(named)
    try:
        yield
    finally:
        ray.shutdown()


def _join(named: str) -> None:
    address = _found(named)
    with loopback_only() if address.startswith(LOOPBACK) else nullcontext():
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)


def _found(address: str) -> str:
    """Return the address of the cluster to join, after checking that it answers.

    Without the check, Ray would try to connect for minutes.

    Raises:
        ValueError: There is no cluster, or it does not answer.
    """
    if address != AUTO:
        _check_answers(f"{VARIABLE}={address}", *host_and_port(address))
        return address

    # Resolve `auto` first, so that the cluster's own address can be checked.
    try:
        found = services.canonicalize_bootstrap_address(AUTO)
    except ConnectionError:
        found = None

    if found is None:
        raise ValueError(
            f"{VARIABLE}=auto: no Ray cluster runs on this machine; start one (ray start --head), set it to "
            f"HOST:PORT, or unset {VARIABLE}"
        )

    _check_answers(
        f"{VARIABLE}=auto: {found}, the cluster that was last started here,", *host_and_port(found)
    )
    return found


def _check_answers(named: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_ANSWER_S).close()
    except OSError as error:
        raise ValueError(
            f"{named} does not answer ({error}); start the cluster, or unset {VARIABLE} to run here"
        ) from error


def shutdown() -> list[int]:
    """Leave the cluster and wait until no process that this one started through Ray is left.

    Leaving the cluster ends this run's workers. May be called twice.

    Returns:
        The pids that could not be ended, normally none.
    """
    # Disconnect first, which ends the workers; the daemons follow.
    ray.shutdown()
    end_held([*_daemons, *_needed.values()])
    _daemons.clear()
    _needed.clear()
    # Remove the key of this cluster, so that it is not used for the next one.
    while _added_variables:
        os.environ.pop(_added_variables.pop(), None)

    return end_processes_of(process_owner() + _RAY)


def worker_owner(group: int, rank: int) -> str:
    """Return the mark that identifies a worker's descendants."""
    return f"{process_owner()}{_RAY}/{group}.{rank}/"


def process_owner() -> str:
    """Return the mark that identifies this driver's descendants."""
    global _owner
    if _owner is None:
        _owner = os.environ.get(OWNER, "") + uuid.uuid4().hex
        os.environ[OWNER] = _owner
        atexit.register(shutdown)

    return _owner


def log_folder() -> str:
    """Return the folder in which Ray and all workers log. It has the same path on each node."""
    return ray._private.worker._global_node.get_logs_dir_path()  # pyrefly: ignore[missing-attribute]


def node_addresses() -> list[str]:
    """Return the addresses of the nodes of the joined cluster."""
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def num_cluster_gpus() -> int:
    """Return the number of GPUs on all nodes of the joined cluster."""
    return ray.cluster_resources().get("GPU", 0)
