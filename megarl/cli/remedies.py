"""What is known to help against which failure: a table from how a failure shows itself to advice with the numbers of the run."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.config.derive import checkpoint_path, samples_per_step
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.machine.wording import counted

RunConfig = PPOConfig | SFTConfig
_ROLLOUT = "rollout"


class Cause(NamedTuple):
    """A failure as the table looks at it. kind: module and name of the exception's class; empty where a process died.
    message: what is shown of it. text: all that was said. role, method: of the call that failed; empty for what the driver did."""

    kind: str
    message: Sequence[str]
    text: str
    role: str = ""
    method: str = ""


class Remedy(NamedTuple):
    applies: Callable[[Cause], bool]
    advise: Callable[[Cause, RunConfig | None], list[str]]


def remedy_for(cause: Cause, config: RunConfig | None) -> list[str]:
    """Lines; none where nothing is known. config: None where a command has none."""
    return next((remedy.advise(cause, config) for remedy in REMEDIES if remedy.applies(cause)), [])


# ---- how failures are known


def _says(pattern: str) -> Callable[[Cause], bool]:
    return lambda cause: re.search(pattern, cause.text) is not None


def _is(*names: str) -> Callable[[Cause], bool]:
    """By the exception's class, or that of the one that it was raised from."""
    return lambda cause: cause.kind.rpartition(".")[2] in names or any(f"{name}: " in cause.text for name in names)


# ---- advice


def _settings(config: RunConfig | None, *keys: str) -> list[str]:
    """`key=value` of those that the configuration has, as they are now."""
    found = []
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
        if value is not None:
            found.append(f"{key}={value.value if isinstance(value, Enum) else value}")
    return found


def _now(config: RunConfig | None, *keys: str) -> str:
    return ", ".join(_settings(config, *keys))


def _device_memory(cause: Cause, config: RunConfig | None) -> list[str]:
    if config is None:
        return ["the GPU is full: give the command a device with more memory, or smaller parts"]
    if cause.role == _ROLLOUT and isinstance(config, PPOConfig):
        return _engine_memory(config)
    section = _section(cause.role)
    lines = [f"less at a time: {_now(config, f'{section}.micro_batch.max_tokens', f'{section}.micro_batch.sequences')}; try half"]
    if recompute := _settings(config, f"{section}.recompute"):
        lines.append(f"activations: {recompute[0]}; full keeps the fewest and takes about a third more time")
    sizes = [f"{section}.parallel.{size}_parallel_size" for size in ("tensor", "context", "pipeline", "data")]
    lines.append(f"more devices for the model: {_now(config, *sizes)}; the optimizer's state is cut over data_parallel_size as well")
    lines.append(f"logits: {_now(config, 'engine.log_prob_chunk_tokens') or 'engine.log_prob_chunk_tokens is 1024 by default'}; try half")
    if isinstance(config, PPOConfig):
        lines.append(f"who shares its devices: {_now(config, 'placement.strategy')}; `megarl plan` prints the memory of each device")
    if "push" in cause.method or "weight" in cause.method:
        lines.insert(0, f"sending weights: {_now(config, 'resharding.bucket_mb')}; try half")
    return lines


def _engine_memory(config: PPOConfig) -> list[str]:
    lines = [f"sequences at a time: {_now(config, 'rollout.max_concurrency')}; try half"]
    if (share_key := config.rollout.engine.needs.memory_key) is not None:
        share = _now(config, share_key) or "it is the engine's default"
        lines.append(f"the engine's share of the device, {share_key}: {share}; try 0.1 less")
    lines.append(f"more devices a replica: {_now(config, 'rollout.tensor_parallel_size')}")
    lines.append(f"weights on their way: {_now(config, 'resharding.bucket_mb')}")
    return [*lines, f"who shares its devices: {_now(config, 'placement.strategy')}"]


def _section(role: str) -> str:
    """Of the configuration, for a role, or the first of several in one process."""
    first = role.split("+")[0]
    return {REWARD_MODEL: "reward.model"}.get(first, first if first in ("critic",) else "actor")


def _host_memory(cause: Cause, config: RunConfig | None) -> list[str]:
    memory = psutil.virtual_memory()
    lines = [
        "it is the node's memory, not a GPU's: `free -g` there. The driver's node has "
        f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free now"
    ]
    if config is None:
        return lines
    lines.append(f"what a step holds: {counted(samples_per_step(config), 'sample')} a step ({_now(config, *_PER_STEP)}); fewer, or shorter")
    if isinstance(config, PPOConfig):
        lines.append(f"processes: {_now(config, 'rollout.num_replicas', 'reward.num_processes')}; fewer")
        lines.append(f"roles that take turns wait in it: {_now(config, 'placement.strategy')}; with stand_alone none does")
    lines.append(f"saving copies the state first: {_now(config, 'checkpoint.asynchronous')}; false writes it without a copy")
    return lines


_PER_STEP = (
    "trainer.prompts_per_step",
    "rollout.n",
    "trainer.samples_per_step",
    "data.max_response_length",
    "data.max_length",
)


def _died(cause: Cause, config: RunConfig | None) -> list[str]:
    return [
        "whoever killed it left no word. Was it the kernel, for memory? `dmesg -T | grep -i 'killed process'` on its node; if so:",
        *(f"  {line}" for line in _host_memory(cause, config)[1:]),
        "a crash in a library: the end of its log (below), and `dmesg` for a segfault or an Xid of a GPU",
    ]


def _oom_killed(cause: Cause, config: RunConfig | None) -> list[str]:
    return [*_host_memory(cause, config), "`dmesg -T | grep -i 'killed process'` names the process that the kernel ended and its size"]


def _exited(cause: Cause, config: RunConfig | None) -> list[str]:
    return [
        "the end of its log (below) shows what it was doing; for a crash, `dmesg -T` on its node also has segfaults and a GPU's Xid",
        "a signal or an exit code of its own means that the node's memory did not end it: look at whoever sent the signal, "
        "or at code that calls exit (rewards, tools, environments, libraries)",
        "the same command continues from the latest checkpoint",
    ]


def _node_lost(cause: Cause, config: RunConfig | None) -> list[str]:
    lines = [
        "is the node up, and is the network between it and the driver? `ray list nodes`, and `ping` from another node",
        "if it is up: raylet.out and raylet.err of Ray's logs on that node say why its raylet ended; `dmesg -T` and `last -x` say "
        "whether the machine crashed, restarted, or ran out of memory",
        "the same command continues from the latest checkpoint once the node is back, or another one has joined the cluster",
    ]
    if every := _settings(config, "checkpoint.every_steps"):
        lines.append(f"steps since the latest checkpoint are repeated: {every[0]} (0: it saves only at the end)")
    return lines


def _monitored(cause: Cause, config: RunConfig | None) -> list[str]:
    threshold = "Ray ends processes when a node has used 95 % of its memory (RAY_memory_usage_threshold, set before Ray starts)"
    return [*_host_memory(cause, config), threshold]


def _disk(cause: Cause, config: RunConfig | None) -> list[str]:
    places = {"/dev/shm": Path("/dev/shm"), "temporary files, and Ray's": Path(tempfile.gettempdir())}
    if config is not None:
        places = {"trainer.output_dir": Path(config.trainer.output_dir), "the checkpoints": checkpoint_path(config), **places}
    lines = ["make room where it is full; of the driver's node:"]
    for name, path in places.items():
        existing = next((part for part in (path, *path.absolute().parents) if part.exists()), None)
        if existing is not None:
            usage = shutil.disk_usage(existing)
            lines.append(f"  {name}, {path}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free")
    if config is not None:
        kept = _now(config, "checkpoint.keep", "checkpoint.save_hf", "checkpoint.every_steps")
        lines.append(f"fewer checkpoints: {kept}; elsewhere: checkpoint.dir")
    return lines


def _port(cause: Cause, config: RunConfig | None) -> list[str]:
    port = re.search(r"(?:port[ =:]+|:)(\d{4,5})\b", cause.text)
    number = port.group(1) if port else "PORT"
    return [
        f"another process listens there: `ss -ltnp | grep {number}` on the node says which; end it, if it is a leftover of a run",
        "megarl itself asks the system for free ports; a port given by hand is in RAY_ADDRESS or MASTER_PORT: give another",
    ]


def _unwritten(cause: Cause, config: RunConfig | None) -> list[str]:
    return [
        "fix the folder and run the same command: it resumes from the latest complete checkpoint",
        f"or save elsewhere: {_now(config, 'checkpoint.dir', 'trainer.output_dir')}",
    ]


def _checkpoint(cause: Cause, config: RunConfig | None) -> list[str]:
    lines = ["see above for what is wrong and which older checkpoints are complete; none of them is used automatically"]
    if config is not None:
        lines.append(f"resume from an older one: the same command with checkpoint.resume=PATH (now {_now(config, 'checkpoint.resume')})")
    return [*lines, "`megarl convert verify` compares a checkpoint's weights with another's"]


def _reward(cause: Cause, config: RunConfig | None) -> list[str]:
    return [
        "fix the function, and try it on the data without training: `megarl score CONFIG ROWS.parquet`",
        f"or let some samples fail, scored as 0: {_now(config, 'reward.max_error_rate', 'reward.time_limit_s')}",
    ]


def _diverged(cause: Cause, config: RunConfig | None) -> list[str]:
    optim = f"{_section(cause.role)}.optim"
    return [
        f"smaller updates: {_now(config, f'{optim}.lr', f'{optim}.warmup_steps', f'{optim}.clip_grad')}; try a tenth of lr",
        "look at the last steps of metrics.jsonl: grad_norm, approx_kl, ratio_max and scores grow before a loss breaks",
        "no update was made: the weights are those of the step before, and the checkpoints are good",
    ]


def _slow(cause: Cause, config: RunConfig | None) -> list[str]:
    if cause.method == "__init__":
        return [
            "its stack, above, says what it was at: a model is read (how fast is its disk?), an engine starts, or the ranks meet",
            f"where that only takes long, raise {_now(config, 'trainer.phase_time_limit_s')}",
        ]
    return [
        "a rank that is idle, or in another call than its peers, is the one they wait for; every rank's stack is above",
        "all of them in the same collective: look at the network between their nodes (NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME)",
        f"all of them at work: it is slow, not stuck; raise the limit: {_now(config, 'trainer.phase_time_limit_s')}",
    ]


def _engine(cause: Cause, config: RunConfig | None) -> list[str]:
    lines = ["the engine's last words are above; if it ran out of memory:"]
    if isinstance(config, PPOConfig):
        lines += [f"  {line}" for line in _engine_memory(config)]
        lines.append(f"where it comes and goes, allow more restarts: {_now(config, 'rollout.restart_limit', 'rollout.health_limit_s')}")
    return lines


def _ray_ended(cause: Cause, config: RunConfig | None) -> list[str]:
    return [
        "its last words are in gcs_server.out, raylet.out and raylet.err of Ray's logs (below)",
        "whoever killed it may have left no word. Was it the kernel, for memory? `dmesg -T | grep -i 'killed process'`; if so:",
        *(f"  {line}" for line in _host_memory(cause, config)[1:]),
    ]


def _resources(cause: Cause, config: RunConfig | None) -> list[str]:
    strategy = _now(config, "placement.strategy", "placement.num_nodes", "placement.devices_per_node")
    return [
        f"the cluster does not have the resources this run requests ({strategy}); `megarl plan` shows them, `ray status` what is free",
        "another job may hold it: `ray list actors --filter state=ALIVE`; or a node has left: `ray list nodes`",
    ]


def _node_start(cause: Cause, config: RunConfig | None) -> list[str]:
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp"))
    free = shutil.disk_usage(folder).free / 2**30 if folder.exists() else 0.0
    return [
        "Ray gives its own processes 30 s to start, whatever is set. The same command again often does: their files are in memory by now",
        f"a busy machine ({psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}): `ps -C raylet,gcs_server -o pid,etime,user` "
        "shows other runs and leftovers; `ray stop` ends yours, also those at work",
        f"a slow or full disk: Ray works in {folder} ({free:.1f} GiB free); RAY_TMPDIR=FOLDER for a local one with room",
        f"in Ray's words: raylet.err and gcs_server.err in {folder}/ray/session_latest/logs",
        "or start Ray by itself, as often as it needs: `ray start --head`, then RAY_ADDRESS=auto and the same command",
    ]


_DEVICE_MEMORY = r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|torch\.(cuda\.)?OutOfMemoryError"
_HOST_MEMORY = r"can't allocate memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b"
_NO_RESOURCES = r"InsufficientResourcesError|ActorUnschedulableError|ActorPlacementGroupRemoved|placement group .* (removed|infeasible)"

# The first that applies is taken: what is certain before what is likely.
REMEDIES: tuple[Remedy, ...] = (
    Remedy(_says(_DEVICE_MEMORY), _device_memory),
    Remedy(_says(r"memory monitor ended the process|node running low on memory"), _monitored),
    Remedy(_says(r"^(\S+NodeLostError: )?node .* is lost: |^a value that was kept on node"), _node_lost),
    Remedy(_says(r"^the process ended; the kernel's OOM killer"), _oom_killed),
    Remedy(_says(r"^the process (was ended by|crashed|ended with|cannot be reached)"), _exited),
    Remedy(_says(_HOST_MEMORY), _host_memory),
    Remedy(_says(r"No space left on device|Disk quota exceeded|OutOfDiskError"), _disk),
    Remedy(_says(r"Address already in use|EADDRINUSE"), _port),
    Remedy(_says(r"the checkpoint of step \d+ cannot be written|: cannot be written: "), _unwritten),
    Remedy(_is("CheckpointError"), _checkpoint),
    Remedy(_is("RewardError", "RewardFunctionError"), _reward),
    Remedy(_is("TrainingDivergedError"), _diverged),
    Remedy(_is("PhaseTimeoutError"), _slow),
    Remedy(_is("RayEndedError"), _ray_ended),
    Remedy(_is("RestartLimitError", "EngineDeadError"), _engine),
    Remedy(_says(_NO_RESOURCES), _resources),
    Remedy(_says(r"node timed out during startup"), _node_start),
    Remedy(lambda cause: "the process ended" in cause.text and not cause.kind, _died),
)
