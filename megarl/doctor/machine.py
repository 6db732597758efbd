"""Checks this machine.

It checks shared memory, open files, memory, threads, the clock, the sandbox, and environment variables that
slow down a run.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import psutil

from megarl.config.finding import Finding, doubtful, first_case, good, wrong
from megarl.controller.daemons import OBJECT_STORE_MB
from megarl.doctor.run_inputs import ExaminedRun
from megarl.machine.errors import counted, sized
from megarl.machine.processors import usable_cores
from megarl.machine.sandbox import why_not
from megarl.machine.sandbox_levels import Level, namespace_obstacles
from megarl.plan.placement.dataflow import at_work
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.model_state import snapshot_bytes

# Shared memory per process for NCCL buffers between GPUs without NVLink.
_NCCL_BYTES = 64 * 2**20
PROCESS_BYTES = 700 * 2**20  # memory of a worker without a model: Python, torch, Megatron
# Ray warns below FEW_FILES, and its head alone opens several hundred.
FEW_FILES = 4096
TOO_FEW_FILES = 1024
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

# Variables that are often left over from debugging, with their cost.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host synchronizes after every kernel",
    "NCCL_P2P_DISABLE": "GPUs of a node communicate through host memory",
    "NCCL_SHM_DISABLE": "processes of a node communicate through the network card",
    "NCCL_IB_DISABLE": "nodes communicate over TCP instead of InfiniBand",
    "TORCH_DISTRIBUTED_DEBUG": "every collective is checked",
}
_OFF = ("", "0", "OFF", "INFO")


def shared_memory(subject: ExaminedRun) -> Iterator[Finding]:
    folder = subject.shared_memory
    if not folder.is_dir():
        yield wrong("shared memory", f"there is no {folder}", f"mount it: mount -t tmpfs tmpfs {folder}")
        return

    needed = OBJECT_STORE_MB * 2**20 + (_NCCL_BYTES * subject.processes_here if subject.use_gpu else 0)
    usage = shutil.disk_usage(folder)
    yield judge_shared_memory(str(folder), usage.total, usage.free, needed)


def judge_shared_memory(folder: str, total: int, free: int, needed: int) -> Finding:
    # Suggest twice the required size, in whole GiB.
    gib = max(1, -(-2 * needed // 2**30))
    hint = (
        f"mount -o remount,size={gib}G {folder}; in a container: docker run --shm-size={gib}g, or --ipc=host"
    )
    return first_case(
        "shared memory",
        {"total": total, "free": free, "needed": needed},
        (
            total < needed,
            wrong,
            f"{folder} has {sized(total)}, but the run needs {sized(needed)} (Ray's object store and NCCL)",
            hint,
        ),
        (
            free < needed,
            doubtful,
            f"{folder} has {sized(free)} of {sized(total)} free, but the run needs {sized(needed)}",
            f"remove files left in {folder}, or: {hint}",
        ),
        (True, good, f"{folder} has {sized(free)} free, {sized(needed)} needed"),
    )


def open_files(subject: ExaminedRun) -> Iterator[Finding]:
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    hint = (
        "run ulimit -n 65536 in the shell that starts the run (and Ray); to exceed the hard limit, set "
        "nofile in /etc/security/limits.conf or docker"
    )
    return first_case(
        "open files",
        {"soft": soft, "hard": hard},
        (soft == resource.RLIM_INFINITY, good, "no limit"),
        (
            soft < TOO_FEW_FILES,
            wrong,
            f"a process may open {counted(soft, 'file')} (hard limit {hard:,}), but Ray needs more",
            hint,
        ),
        (
            soft < FEW_FILES,
            doubtful,
            f"a process may open {counted(soft, 'file')}, but many workers need {FEW_FILES:,} or more",
            hint,
        ),
        (True, good, f"a process may open {soft:,}"),
    )


def memory(subject: ExaminedRun) -> Iterator[Finding]:
    """Check host memory.

    It contains the models of a run on CPUs. With GPUs, it contains only libraries and offloaded data.
    """
    total = psutil.virtual_memory().total
    available = psutil.virtual_memory().available
    limit = _cgroup_limit()

    # In a container the cgroup limit applies instead of the machine's memory.
    if limit is not None and limit < total:
        total = limit
        available = min(available, limit)

    yield judge_memory(total, available, _planned(subject))


def _planned(subject: ExaminedRun) -> int:
    """Return the planned memory of the fullest node, with each device at its peak.

    It is 0 for a cluster's nodes, which are unknown here.
    """
    config = subject.config
    plan = subject.plan
    if plan is None or subject.ray_address is not None:
        return 0
    processes = subject.processes_here * PROCESS_BYTES
    if config is None or not subject.all_models_known:
        return processes
    # On CPUs the models are in host memory; with GPUs, only pinned data is.
    of_nodes: dict[int, int] = defaultdict(int)
    for device in plan_memory(config, plan, subject.architectures):
        of_nodes[device.node] += sum(device.pinned.values()) if subject.use_gpu else device.peak
    for node, nbytes in snapshot_bytes(config, plan, subject.architectures).items():
        of_nodes[node] += nbytes

    return processes + max(of_nodes.values())


def _cgroup_limit() -> int | None:
    """Return the memory limit of the container, if there is one."""
    for file in _CGROUP_LIMITS:
        if Path(file).is_file() and (text := Path(file).read_text().strip()).isdigit():
            return int(text)
    return None


def judge_memory(total: int, available: int, planned: int) -> Finding:
    hint = (
        "use fewer or smaller processes on this node (see `megarl check --plan`), more nodes, or a higher "
        "limit of the container"
    )
    needs = f", about {sized(planned)} planned" if planned else ""
    return first_case(
        "memory",
        {"total": total, "available": available, "planned": planned},
        (
            planned > total,
            wrong,
            f"the plan needs about {sized(planned)}, but this machine has {sized(total)}",
            hint,
        ),
        (
            planned > available,
            doubtful,
            f"the plan needs about {sized(planned)}, but {sized(available)} of {sized(total)} are available "
            "now",
            f"end other processes, or {hint}",
        ),
        (True, good, f"{sized(available)} of {sized(total)} available{needs}"),
    )


def sandbox(subject: ExaminedRun) -> Iterator[Finding]:
    """Test each level of the sandbox for model-written programs."""
    # A plain process has no isolation to test.
    reasons = {level: why_not(level) for level in Level if level is not Level.process}
    holds = [level.value for level, reason in reasons.items() if not reason]
    facts = {level.value: reason for level, reason in reasons.items()}

    if not holds:
        obstacles = "; ".join(namespace_obstacles()) or "none of the known settings forbids them"
        installs = "" if shutil.which("bwrap") else "apt-get install bubblewrap, and "
        yield doubtful(
            "sandbox",
            f"none for model-written programs: {'; '.join(reasons.values())}",
            f"use Linux 5.13 or newer, or {installs}allow namespaces: {obstacles}",
            **facts,
        )
    else:
        yield good("sandbox", f"{holds[0]}, for model-written programs", **facts)


def threads(subject: ExaminedRun) -> Iterator[Finding]:
    cores = usable_cores()
    side_by_side = (
        []
        if subject.plan is None
        else [number for methods in at_work(subject.plan).values() for number in methods.values()]
    )
    yield judge_threads(
        os.environ.get("OMP_NUM_THREADS"), cores, subject.processes_here, subject.use_gpu, side_by_side
    )


def judge_threads(
    setting: str | None, cores: int, processes: int, use_gpu: bool, side_by_side: Collection[int] = ()
) -> Finding:
    """Check the number of threads.

    `side_by_side` is the number of processes of a node that compute in each phase.
    """
    in_phases = side_by_side or [1]
    fewest, most = (max(1, cores // number) for number in (max(in_phases), min(in_phases)))
    each = int(setting) if setting is not None and setting.isdigit() else 0
    in_processes = counted(processes, "process")

    return first_case(
        "threads",
        {"OMP_NUM_THREADS": setting, "cores": cores, "processes": processes},
        (
            setting is not None and not setting.isdigit(),
            wrong,
            f"OMP_NUM_THREADS is {setting!r}, not a number",
            "set OMP_NUM_THREADS=1, or unset it",
        ),
        (
            setting is None and side_by_side and not use_gpu,
            good,
            f"{fewest} to {most} per process, depending on the phase, on {cores} cores; OMP_NUM_THREADS is "
            f"not set",
        ),
        (setting is None, good, f"{cores} cores; OMP_NUM_THREADS is not set"),
        # More threads than cores slow every process down.
        (
            not use_gpu and each > 1 and each * processes > cores,
            doubtful,
            f"OMP_NUM_THREADS={each} in {in_processes} is {counted(each * processes, 'thread')} on "
            f"{counted(cores, 'core')}",
            f"set OMP_NUM_THREADS={max(1, cores // processes)}, or unset it",
        ),
        (True, good, f"{each} in each of {in_processes}, {counted(cores, 'core')}"),
    )


class _Timex(ctypes.Structure):
    """The first fields of the kernel's struct timex, and space for the rest (adjtimex(2))."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("max_error", ctypes.c_long),  # microseconds
        ("estimated_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_STA_UNSYNC = 0x0040


def probe_clock() -> tuple[bool | None, float | None]:
    """Read whether the clock is synchronized, and the kernel's bound of its error in seconds.

    No privileges are needed. Any NTP client sets it: chrony, ntpd or timesyncd.
    """
    timex = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        return None, None  # the kernel does not report them
    return not timex.status & _STA_UNSYNC, timex.max_error / 1e6


def clock(subject: ExaminedRun) -> Iterator[Finding]:
    yield judge_clock(*probe_clock(), 1 if subject.plan is None else subject.plan.num_nodes)


def judge_clock(synchronized: bool | None, max_error_s: float | None, num_nodes: int) -> Finding:
    # The key in the JSON output keeps its spelling.
    facts = {"synchronised": synchronized, "max_error_s": max_error_s}  # codespell:ignore
    return first_case(
        "clock",
        facts,
        (synchronized, good, f"synchronized by NTP within {1000 * (max_error_s or 0):,.0f} ms"),
        (
            num_nodes == 1,
            good,
            "not known to be synchronized by NTP, which matters only for several nodes; the run has one",
        ),
        (
            True,
            doubtful,
            "the kernel reports that this clock is not synchronized",
            "enable NTP (timedatectl set-ntp true, or chrony): logs and timelines of several nodes are "
            "ordered by their clocks",
        ),
    )


def environment(subject: ExaminedRun) -> Iterator[Finding]:
    yield from judge_environment(os.environ)


def judge_environment(variables: Mapping[str, str]) -> Iterator[Finding]:
    slow = {name: cost for name, cost in _SLOW.items() if variables.get(name, "") not in _OFF}
    for name, cost in slow.items():
        yield doubtful(
            "environment",
            f"{name}={variables[name]}: {cost}",
            f"unset {name}, unless you are debugging",
            name=name,
        )

    if "expandable_segments:True" in variables.get(
        "PYTORCH_CUDA_ALLOC_CONF", variables.get("PYTORCH_ALLOC_CONF", "")
    ):
        yield doubtful(
            "environment",
            "torch's expandable segments are enabled, with which SGLang cannot release the memory of its "
            "weights",
            "unset PYTORCH_CUDA_ALLOC_CONF if rollout and actor share devices",
            name="PYTORCH_CUDA_ALLOC_CONF",
        )
    elif not slow:
        yield good("environment", "no variable that is known to slow down a run")
