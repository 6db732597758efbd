"""Hints after a failure, filled with the run's values.

They come from the error, or from a table of messages from other programs.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.config.paths import checkpoint_path
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.controller import hints
from megarl.machine.errors import LESS_ENGINE_MEMORY, counted, written
from megarl.machine.files import existing_folder


class Cause(NamedTuple):
    """The cause of a failure.

    Attributes:
        message: The lines that are shown.
        text: The full message with the traceback.
        hint: The hint of the error, with its fields not yet filled.
        role: The role of the call that failed; empty for a failure in the driver. Roles that share a process
            are joined by "+".
    """

    message: Sequence[str]
    text: str
    hint: Sequence[str] = ()
    role: str = ""
    method: str = ""


class ForeignFailure(NamedTuple):
    """A failure reported by CUDA, the operating system or Ray, which is recognized by its text.

    Attributes:
        text: A pattern to search for in the full message. Its named groups are fields of the hint.
        call: A pattern that must match the beginning of "role.method" of the failed call.
    """

    text: str
    hint: Sequence[str]
    call: str = ""


def hint_for(cause: Cause, config: RunConfig | None) -> list[str]:
    """Return the hint lines for a failure; empty if there are none.

    Messages of CUDA, the system or Ray take precedence, because they are more specific than the megarl error
    that they cause.

    Args:
        config: The configuration of the run; None for a command without one.
    """
    call = f"{cause.role}.{cause.method}"
    # The patterns are tried in order; the first one that matches gives the hint.
    for foreign in FOREIGN_FAILURES:
        found = re.search(foreign.text, cause.text) if re.match(foreign.call, call) else None
        if found is not None:
            return _filled(foreign.hint, cause, config, found.groupdict())

    return _filled(cause.hint, cause, config, {})


# ---- fields

_FIELD = re.compile(r"\{([^{}]+)\}")


def _filled(
    hint: Sequence[str], cause: Cause, config: RunConfig | None, found: Mapping[str, str | None]
) -> list[str]:
    """Replace each `{field}` with its value, and drop lines with a field that this run does not have.

    A field is the name of a fact, a group of the matched pattern, or one or more configuration keys. Keys
    that are set are shown with their values, as `key (now value)`. `role.` at the beginning of a key stands
    for the section of the failed role. `key unless value` leaves out a key that has the value already.
    """
    lines: list[str] = []
    for line in hint:
        values = [_value(field, cause, config, found) for field in _FIELD.findall(line)]
        # A line with a value that this run does not have would mislead.
        if all(values):
            lines += _FIELD.sub(lambda field: _value(field[1], cause, config, found), line).split("\n")

    return lines


def _value(field: str, cause: Cause, config: RunConfig | None, found: Mapping[str, str | None]) -> str:
    if field in found:
        return found[field] or field.upper()
    if field in FACTS:
        return FACTS[field](config)
    section = _section(cause.role, config)
    shown = []
    for each in field.split(", "):
        name, _, best = each.partition(" unless ")
        key = re.sub(r"^role\.", f"{section}.", name)
        value = _setting(config, key)
        # The value is what the user would change, so it is not written like an override to copy.
        if value is not None and written(value) != best:
            shown.append(f"{key} (now {written(value)})")
    return ", ".join(shown)


def _setting(config: RunConfig | None, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.value if isinstance(value, Enum) else value


def _section(role: str, config: RunConfig | None) -> str:
    """Return the configuration section of a role, or of the first of several roles in one process."""
    first = role.split("+")[0]
    keys = {} if config is None else {each.name: each.parallel_key for each in model_roles(config)}
    return keys.get(first, "actor.parallel").removesuffix(".parallel")


# ---- facts


def _free_memory(config: RunConfig | None) -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB"


def _engine_share(config: RunConfig | None) -> str:
    engine = None if config is None else config.rollout_engine
    key = None if engine is None else engine.needs.memory_key
    if key is None:
        return ""
    share = _setting(config, key)
    return f"{key} (the engine's default)" if share is None else f"{key} (now {written(share)})"


def _logit_chunk(config: RunConfig | None) -> str:
    key = "engine.log_prob_chunk_tokens"
    if config is None:
        return ""
    tokens = _setting(config, key)
    return f"{key} is 1024 by default" if tokens is None else f"{key} (now {tokens})"


def _free_disk(config: RunConfig | None) -> str:
    """Return a line for each folder that a run writes to, with the free space of its disk."""
    places = {"/dev/shm": Path("/dev/shm"), "temporary files and Ray": Path(tempfile.gettempdir())}
    if config is not None:
        of_run = {
            "trainer.output_dir": Path(config.trainer.output_dir),
            "checkpoints": checkpoint_path(config),
        }
        places = {**of_run, **places}

    lines = []
    for name, path in places.items():
        usage = shutil.disk_usage(existing_folder(path))  # the folder itself may not exist yet
        lines.append(f"  {name}, {path}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free")

    return "\n".join(lines)


def _ray_folder(config: RunConfig | None) -> str:
    return os.environ.get("RAY_TMPDIR", "/tmp")


def _ray_folder_free(config: RunConfig | None) -> str:
    folder = Path(_ray_folder(config))
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return f"{free / 2**30:.1f} GiB free"


FACTS: Mapping[str, Callable[[RunConfig | None], str]] = {
    "samples_per_step": lambda config: "" if config is None else counted(config.samples_per_step, "sample"),
    "free_memory": _free_memory,
    "engine_share": _engine_share,
    "logit_chunk": _logit_chunk,
    "free_disk": _free_disk,
    "load": lambda _: f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}",
    "ray_folder": _ray_folder,
    "ray_folder_free": _ray_folder_free,
}


# ---- messages of CUDA, the system and Ray

_DEVICE_MEMORY = (
    "reduce the micro-batch: {role.micro_batch.max_tokens, role.micro_batch.sequences unless 1}; try half",
    "recompute activations: {role.recompute unless full}; full saves the most memory and takes about a third "
    "more time",
    "use more devices for the model: {role.parallel.tensor_parallel_size, "
    "role.parallel.context_parallel_size, role.parallel.pipeline_parallel_size, "
    "role.parallel.data_parallel_size}; the optimizer state is sharded over data_parallel_size too",
    "reduce the logits: {logit_chunk}; try half",
    "share devices with fewer roles: {placement.strategy unless stand_alone}; `megarl check --plan` shows "
    "the memory of devices",
    "`megarl check` with a lower placement.device_memory_gb prints changes with which the plan fits",
)
_GPU_FULL = (
    "CUDA out of memory|CUDA error: out of "
    "memory|CUBLAS_STATUS_ALLOC_FAILED|torch\\.(cuda\\.)?OutOfMemoryError"
)

# The first match applies, so specific patterns come before general ones.
FOREIGN_FAILURES = (
    ForeignFailure(_GPU_FULL, LESS_ENGINE_MEMORY, call=r"rollout\."),
    ForeignFailure(
        _GPU_FULL,
        ("reduce the buckets of the weight sync: {resharding.bucket_mb}; try half", *_DEVICE_MEMORY),
        call=r"[^.]+\..*(push|weight)",
    ),
    ForeignFailure(_GPU_FULL, _DEVICE_MEMORY, call=r"[^.]+\."),
    ForeignFailure(
        _GPU_FULL, ("the GPU is full; use a device with more memory, or reduce memory:", *_DEVICE_MEMORY)
    ),
    ForeignFailure(
        r"(CUDA [Ee]rror: |Triton Error \[CUDA\]: )(?!device-side assert|invalid |no kernel image)"
        r"|CUBLAS_STATUS_EXECUTION_FAILED|CUDNN_STATUS_EXECUTION_FAILED",
        hints.GPU_FAILED,
    ),
    ForeignFailure(r"memory monitor ended the process|node running low on memory", hints.MEMORY_MONITOR),
    ForeignFailure(
        r"can't allocate memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b", hints.HOST_MEMORY
    ),
    ForeignFailure(
        r"No space left on device|Disk quota exceeded|OutOfDiskError",
        (
            "free space on the full disk; disks of the driver's node:",
            "{free_disk}",
            "keep fewer checkpoints: {checkpoint.keep, checkpoint.save_hf, checkpoint.every_steps}; or move "
            "them: checkpoint.dir",
        ),
    ),
    ForeignFailure(
        # The port comes before or after the words, or is missing.
        r"(?s)^(?=.*(?:Address already in use|EADDRINUSE))(?:.*?(?:port[ =:]+|:)(?P<port>\d{4,5})\b)?",
        (
            "another process uses this port: find it with `ss -ltnp | grep {port}` on the node, and end it "
            "if it is left over from a run",
            "megarl asks the system for free ports; a port that you chose is in RAY_ADDRESS or MASTER_PORT: "
            "use another one",
        ),
    ),
    ForeignFailure(
        r"ActorUnschedulableError|ActorPlacementGroupRemoved|placement group .* (removed|infeasible)",
        hints.NO_RESOURCES,
    ),
    ForeignFailure(
        r"node timed out during startup",
        (
            "Ray gives its processes a fixed 30 s to start. Run the same command again: it often succeeds, "
            "because the files are cached by then",
            "if the machine is busy ({load}): `ps -C raylet,gcs_server -o pid,etime,user` lists other runs "
            "and leftover processes; `ray stop` ends all of yours, including active ones",
            "if the disk is slow or full: Ray writes to {ray_folder} ({ray_folder_free}); set "
            "RAY_TMPDIR=FOLDER to a local disk with free space",
            "for Ray's own messages, see raylet.err and gcs_server.err in "
            "{ray_folder}/ray/session_latest/logs",
            "or start Ray separately with `ray start --head`, then run the same command with "
            "RAY_ADDRESS=auto",
        ),
    ),
)
