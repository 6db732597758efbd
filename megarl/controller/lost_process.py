"""Explain why a process is gone, from Ray's errors.

Distinguishes failures of the process, its node and the network.
"""

from __future__ import annotations

import re
from pathlib import Path

from ray.exceptions import (
    ActorUnavailableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)

from megarl.controller import hints
from megarl.machine.errors import counted

# Errors which mean that the process, or what it returned, no longer exists.
LOST = (
    ActorUnavailableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
UNKNOWN = "the process ended (killed, out of memory, or crashed)"

_NODE_DIED = re.compile(
    r"its node has died|health check failed|missed too many heartbeats|node (?:is|was) (?:dead|terminated)"
)
_NODE_REASON = re.compile(r"node was terminated(?: \w+)?: ([^\n]+)")
_NODE_ADDRESS = re.compile(r"^\s*ip: (\S+)$", re.MULTILINE)
_MEMORY_USED = re.compile(r"(\S+) used / (\S+) limit")
_SIGNAL = re.compile(r"The process receives a (SIG[A-Z]+)")
_EXIT_CODE = re.compile(r"exits with an exit code (-?\d+)")
_CRASH = re.compile(r"\*\*\* (SIG[A-Z]+) received|^Fatal Python error: ([^\n]+)", re.MULTILINE)


# Why a process is gone, in one line, and what to try.
ProcessLoss = tuple[str, tuple[str, ...]]


def why_lost(error: RayError, node: str | None, log: str, oom_kills: int) -> ProcessLoss:
    """Describe why a process is gone.

    Args:
        error: Ray's error, one of `LOST`.
        node: The address of the process's node, None if not known.
        log: The end of the process's standard error, empty if it cannot be read.
        oom_kills: The number of processes on that node that the kernel's OOM killer has ended during this
            run, 0 if not known.
    """
    text = str(error)
    # The memory monitor states its reason itself.
    if isinstance(error, OutOfMemoryError):
        used = _MEMORY_USED.search(text)
        memory = f" ({used[1]} of {used[2]} used)" if used else ""
        summary = f"Ray's memory monitor ended the process: its node is running out of memory{memory}"
        return summary, hints.MEMORY_MONITOR

    # A lost node takes its processes with it, so check for it before blaming the process.
    if isinstance(error, NodeDiedError) or _NODE_DIED.search(text):
        address = _NODE_ADDRESS.search(text)
        reason = _NODE_REASON.search(text)
        return node_lost(
            address[1] if address else node, reason[1].strip() if reason else "it no longer answers"
        )

    if isinstance(error, ActorUnavailableError):
        summary = (
            "the process cannot be reached: the connection broke, although its node is still part of the "
            "cluster"
        )
        return summary, hints.PROCESS_EXITED

    if isinstance(error, ObjectLostError):
        summary = (
            f"a value on node {node or 'not known'} is lost: the process or the node that stored it is gone"
        )
        return summary, hints.NODE_LOST

    return _why_ended(text, log, oom_kills)


def node_lost(address: str | None, reason: str) -> ProcessLoss:
    """Describe a node that left the cluster."""
    return f"node {address or '(address not known)'} is lost: {reason}", hints.NODE_LOST


def _why_ended(text: str, log: str, oom_kills: int) -> ProcessLoss:
    # Report what is certain first: a signal, a crash in the log, an exit code.
    if signal := _SIGNAL.search(text):
        return f"the process was ended by {signal[1]}", hints.PROCESS_EXITED
    if crash := _CRASH.search(log):
        return f"the process crashed ({crash[1] or crash[2]})", hints.PROCESS_EXITED
    if code := _EXIT_CODE.search(text):
        return f"the process ended with exit code {code[1]}", hints.PROCESS_EXITED

    # The kills are known per node, not per process: this is a suspicion, not a proof.
    if oom_kills:
        processes = counted(oom_kills, "process")
        summary = (
            f"the process ended; the kernel's OOM killer has ended {processes} on its node during this run"
        )
        return summary, hints.OOM_KILLED

    return UNKNOWN, hints.PROCESS_GONE


def num_oom_kills() -> int:
    """Return the number of processes that this machine's OOM killer has ended since boot, 0 if not known."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
