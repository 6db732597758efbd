"""Hints for failures of a process, a node or a cluster.

`cli/run/failure_report.py` fills in the settings and facts in braces.
"""

from __future__ import annotations

# What a run can change if a node's memory is full. A line is dropped for a run that has none of its settings.
LESS_HOST_MEMORY = (
    "data of a step: {samples_per_step} per step, of {trainer.prompts_per_step, rollout.n, "
    "trainer.samples_per_step, data.max_response_length, data.max_length}; use fewer or shorter samples",
    "processes: {rollout.num_replicas, reward.num_processes}; use fewer",
    "roles that share devices are offloaded to it: {placement.strategy}; stand_alone offloads none",
    "saving copies the state first: {checkpoint.asynchronous}; false writes it without a copy",
)
HOST_MEMORY = (
    "this is the node's memory, not a GPU's: see `free -g` there. The driver's node has {free_memory} free",
    *LESS_HOST_MEMORY,
)
OOM_KILLED = (
    *HOST_MEMORY,
    "`dmesg -T | grep -i 'killed process'` shows the process that the kernel ended and its size",
)
MEMORY_MONITOR = (
    *HOST_MEMORY,
    "Ray ends processes when a node has used 95 % of its memory (RAY_memory_usage_threshold, set before "
    "Ray starts)",
)

_PERHAPS_KILLED = (
    "the kernel may have ended it for memory: `dmesg -T | grep -i 'killed process'` on its node; if so:"
)

# The cause of the end is unknown.
PROCESS_GONE = (
    _PERHAPS_KILLED,
    *(f"  {line}" for line in LESS_HOST_MEMORY),
    "a crash in a library: the end of its log (below), and `dmesg` for a segfault or an Xid of a GPU",
)
# A signal, an exit code or a crash is known.
PROCESS_EXITED = (
    "the end of its log (below) shows what it was doing; for a crash, `dmesg -T` on its node also has "
    "segfaults and a GPU's Xid",
    "a signal or a nonzero exit code means that the node's memory is not the cause: find what sent the "
    "signal, or the code that calls exit (rewards, tools, environments, libraries)",
    "the same command resumes from the latest checkpoint",
)
GPU_FAILED = (
    "`dmesg -T | grep -i xid` and `nvidia-smi -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER` on its node tell "
    "whether the GPU is faulty: reset it (`nvidia-smi -r`), or leave the node out",
    "an illegal access or an illegal instruction without an Xid of the hardware is a fault of a kernel: with "
    "CUDA_LAUNCH_BLOCKING=1 the traceback names its call",
    "the same command resumes from the latest checkpoint; with recovery.enabled, the run continues by itself",
)
NODE_LOST = (
    "is the node up, and is the network between it and the driver up? Run `ray list nodes`, and `ping` from "
    "another node",
    "if it is up: raylet.out and raylet.err in Ray's logs on that node show why its raylet ended; `dmesg -T` "
    "and `last -x` show whether the machine crashed, restarted, or ran out of memory",
    "the same command resumes from the latest checkpoint once the node is back, or another one has joined "
    "the cluster",
    "steps since the latest checkpoint are repeated: {checkpoint.every_steps}; with 0, only the end is saved",
)
RAY_ENDED = (
    "its last messages are in gcs_server.out, raylet.out and raylet.err of Ray's logs (below)",
    _PERHAPS_KILLED,
    *(f"  {line}" for line in LESS_HOST_MEMORY),
)
NO_RESOURCES = (
    "the cluster does not have the resources this run requests ({placement.strategy, placement.num_nodes, "
    "placement.devices_per_node}); `megarl check --plan` shows them, `ray status` what is free",
    "another job may hold them: `ray list actors --filter state=ALIVE`; or a node has left: `ray list nodes`",
)
SLOW_CONSTRUCTION = (
    "its stack, above, shows what it was doing: loading a model (how fast is the disk?), starting an engine, "
    "or waiting for other ranks",
    "if it is only slow, raise {trainer.phase_time_limit_s}",
)
SLOW_CALL = (
    "a rank that is idle, or in another call than its peers, is the one that they wait for; every rank's "
    "stack is above",
    "if all are in the same collective, check the network between their nodes (NCCL_DEBUG=INFO, "
    "NCCL_SOCKET_IFNAME)",
    "if all are computing, the call is slow, not stuck; raise the limit: {trainer.phase_time_limit_s}",
)
