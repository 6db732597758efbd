"""What to do about a process, a node or a cluster that failed.

`cli/run/hints.py` fills in the settings and the facts in braces.
"""

from __future__ import annotations

# What a run can change when a node's memory is full. Each line is dropped for a run that has none of its
# settings.
LESS_HOST_MEMORY = (
    "what a step holds: {samples_per_step} a step ({trainer.prompts_per_step, rollout.n, "
    "trainer.samples_per_step, "
    "data.max_response_length, data.max_length}); fewer, or shorter",
    "processes: {rollout.num_replicas, reward.num_processes}; fewer",
    "roles that share devices wait in it: {placement.strategy}; with stand_alone none does",
    "saving copies the state first: {checkpoint.asynchronous}; false writes it without a copy",
)
HOST_MEMORY = (
    "it is the node's memory, not a GPU's: `free -g` there. The driver's node has {free_memory} free now",
    *LESS_HOST_MEMORY,
)
OOM_KILLED = (
    *HOST_MEMORY,
    "`dmesg -T | grep -i 'killed process'` names the process that the kernel ended and its size",
)
MEMORY_MONITOR = (
    *HOST_MEMORY,
    "Ray ends processes when a node has used 95 % of its memory (RAY_memory_usage_threshold, set before Ray "
    "starts)",
)

_PERHAPS_KILLED = (
    "it may have been the kernel, for memory: `dmesg -T | grep -i 'killed process'` on its node; if so:"
)

# Nothing is known of how the process ended.
PROCESS_GONE = (
    _PERHAPS_KILLED,
    *(f"  {line}" for line in LESS_HOST_MEMORY),
    "a crash in a library: the end of its log (below), and `dmesg` for a segfault or an Xid of a GPU",
)
# A signal, an exit code or a crash is known.
PROCESS_EXITED = (
    "the end of its log (below) shows what it was doing; for a crash, `dmesg -T` on its node also has "
    "segfaults and a GPU's Xid",
    "a signal or an exit code of its own means that the node's memory did not end it: look at whoever sent "
    "the signal, "
    "or at code that calls exit (rewards, tools, environments, libraries)",
    "the same command continues from the latest checkpoint",
)
NODE_LOST = (
    "is the node up, and is the network between it and the driver? `ray list nodes`, and `ping` from "
    "another node",
    "if it is up: raylet.out and raylet.err of Ray's logs on that node say why its raylet ended; `dmesg -T` "
    "and `last -x` say "
    "whether the machine crashed, restarted, or ran out of memory",
    "the same command continues from the latest checkpoint once the node is back, or another one has joined "
    "the cluster",
    "steps since the latest checkpoint are repeated: {checkpoint.every_steps} (0: it saves only at the end)",
)
RAY_ENDED = (
    "its last words are in gcs_server.out, raylet.out and raylet.err of Ray's logs (below)",
    _PERHAPS_KILLED,
    *(f"  {line}" for line in LESS_HOST_MEMORY),
)
NO_RESOURCES = (
    "the cluster does not have the resources this run requests ({placement.strategy, placement.num_nodes, "
    "placement.devices_per_node}); `megarl plan` shows them, `ray status` what is free",
    "another job may hold them: `ray list actors --filter state=ALIVE`; or a node has left: `ray list nodes`",
)
SLOW_CONSTRUCTION = (
    "its stack, above, says what it was at: a model is read (how fast is its disk?), an engine starts, or "
    "the ranks meet",
    "where that only takes long, raise {trainer.phase_time_limit_s}",
)
SLOW_CALL = (
    "a rank that is idle, or in another call than its peers, is the one they wait for; every rank's stack "
    "is above",
    "all of them in the same collective: look at the network between their nodes (NCCL_DEBUG=INFO, "
    "NCCL_SOCKET_IFNAME)",
    "all of them at work: it is slow, not stuck; raise the limit: {trainer.phase_time_limit_s}",
)
