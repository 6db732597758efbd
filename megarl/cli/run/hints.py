"""What to try after a failure: the hint of the error, or of a table of other programs' messages, with the
numbers of the run."""

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
from megarl.config.roles import REWARD_MODEL
from megarl.config.schema import RunConfig
from megarl.controller import hints
from megarl.machine.wording import counted
from megarl.rollout.interface import LESS_ENGINE_MEMORY


class Cause(NamedTuple):
    """A failure, as the last page shows it.

    Attributes:
        message: The lines that are shown.
        text: All that was said, with the traceback.
        hint: The hint of the error, with its fields not yet filled.
        role: The role of the call that failed, empty for what the driver did. Roles that share a process are
            joined by "+".
        method: The method of that call.
    """

    message: Sequence[str]
    text: str
    hint: Sequence[str] = ()
    role: str = ""
    method: str = ""


class ForeignFailure(NamedTuple):
    """A failure that CUDA, the operating system or Ray report, which is known by its text.

    Attributes:
        text: A pattern to search for in all that was said. Its named groups are fields of the hint.
        hint: What to do about it.
        call: A pattern that "role.method" of the failed call must begin with.
    """

    text: str
    hint: Sequence[str]
    call: str = ""


def hint_for(cause: Cause, config: RunConfig | None) -> list[str]:
    """Return what to try, a line each, empty where nothing is known.

    A message of CUDA, the system or Ray is more specific than the error of ours that it caused, so it comes
    first.

    Args:
        cause: The failure.
        config: The configuration of the run, None for a command that has none.
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
    """Replace each `{field}` by its value, and drop the lines with a field that this run does not have.

    A field is the name of a fact, a group of the pattern that was found, or one or more keys of the
    configuration, of which those that are set are shown as `key=value`. `role.` at the beginning of a key
    stands for the section of the role that failed.
    """
    lines: list[str] = []
    for line in hint:
        values = [_value(field, cause, config, found) for field in _FIELD.findall(line)]
        # A line with a value that this run does not have would mislead.
        if all(values):
            remaining = iter(values)
            text = _FIELD.sub(lambda _, remaining=remaining: next(remaining), line)  # type: ignore[misc]
            lines += text.split("\n")

    return lines


def _value(field: str, cause: Cause, config: RunConfig | None, found: Mapping[str, str | None]) -> str:
    if field in found:
        return found[field] or field.upper()
    if field in FACTS:
        return FACTS[field](config)
    section = _section(cause.role)
    keys = [re.sub(r"^role\.", f"{section}.", key) for key in field.split(", ")]

    return ", ".join(f"{key}={value}" for key in keys if (value := _setting(config, key)) is not None)


def _setting(config: RunConfig | None, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.value if isinstance(value, Enum) else value


def _section(role: str) -> str:
    """Return the section of the configuration for a role, or for the first of several in one process."""
    first = role.split("+")[0]
    return {REWARD_MODEL: "reward.model", "critic": "critic"}.get(first, "actor")


# ---- facts


def _samples_per_step(config: RunConfig | None) -> str:
    return "" if config is None else counted(config.samples_per_step, "sample")


def _free_memory(config: RunConfig | None) -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB"


def _engine_share(config: RunConfig | None) -> str:
    engine = None if config is None else config.rollout_engine
    key = None if engine is None else engine.needs.memory_key
    if key is None:
        return ""
    share = _setting(config, key)
    return f"{key}: it is the engine's default" if share is None else f"{key}={share}"


def _logit_chunk(config: RunConfig | None) -> str:
    key = "engine.log_prob_chunk_tokens"
    if config is None:
        return ""
    tokens = _setting(config, key)
    return f"{key} is 1024 by default" if tokens is None else f"{key}={tokens}"


def _free_disk(config: RunConfig | None) -> str:
    """Return a line for each folder that a run writes to, with the room that is left there."""
    places = {"/dev/shm": Path("/dev/shm"), "temporary files, and Ray's": Path(tempfile.gettempdir())}
    if config is not None:
        of_run = {
            "trainer.output_dir": Path(config.trainer.output_dir),
            "the checkpoints": checkpoint_path(config),
        }
        places = {**of_run, **places}

    lines = []
    for name, path in places.items():
        # The folder may not have been created yet; the disk is that of the nearest one above it.
        existing = next((part for part in (path, *path.absolute().parents) if part.exists()), None)
        if existing is not None:
            usage = shutil.disk_usage(existing)
            lines.append(f"  {name}, {path}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free")

    return "\n".join(lines)


def _load(config: RunConfig | None) -> str:
    return f"{psutil.cpu_count()} cores, load {psutil.getloadavg()[0]:.1f}"


def _ray_folder(config: RunConfig | None) -> str:
    return os.environ.get("RAY_TMPDIR", "/tmp")


def _ray_folder_free(config: RunConfig | None) -> str:
    folder = Path(_ray_folder(config))
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return f"{free / 2**30:.1f} GiB free"


FACTS: Mapping[str, Callable[[RunConfig | None], str]] = {
    "samples_per_step": _samples_per_step,
    "free_memory": _free_memory,
    "engine_share": _engine_share,
    "logit_chunk": _logit_chunk,
    "free_disk": _free_disk,
    "load": _load,
    "ray_folder": _ray_folder,
    "ray_folder_free": _ray_folder_free,
}


# ---- messages of CUDA, the system and Ray

_DEVICE_MEMORY = (
    "less at a time: {role.micro_batch.max_tokens, role.micro_batch.sequences}; try half",
    "activations: {role.recompute}; full keeps the fewest and takes about a third more time",
    "more devices for the model: {role.parallel.tensor_parallel_size, role.parallel.context_parallel_size, "
    "role.parallel.pipeline_parallel_size, role.parallel.data_parallel_size}; the optimizer's state is cut "
    "over "
    "data_parallel_size as well",
    "logits: {logit_chunk}; try half",
    "roles that share its devices: {placement.strategy}; `megarl plan` prints the memory of each device",
)
_GPU_FULL = (
    "CUDA out of memory|CUDA error: out of "
    "memory|CUBLAS_STATUS_ALLOC_FAILED|torch\\.(cuda\\.)?OutOfMemoryError"
)

# The first that is found is taken: what is certain before what is likely.
FOREIGN_FAILURES = (
    ForeignFailure(_GPU_FULL, LESS_ENGINE_MEMORY, call=r"rollout\."),
    ForeignFailure(
        _GPU_FULL,
        ("sending weights: {resharding.bucket_mb}; try half", *_DEVICE_MEMORY),
        call=r"[^.]+\..*(push|weight)",
    ),
    ForeignFailure(_GPU_FULL, _DEVICE_MEMORY, call=r"[^.]+\."),
    ForeignFailure(
        _GPU_FULL, ("the GPU is full: use a device with more memory, or smaller parts", *_DEVICE_MEMORY)
    ),
    ForeignFailure(r"memory monitor ended the process|node running low on memory", hints.MEMORY_MONITOR),
    ForeignFailure(
        r"can't allocate memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b", hints.HOST_MEMORY
    ),
    ForeignFailure(
        r"No space left on device|Disk quota exceeded|OutOfDiskError",
        (
            "make room where it is full; of the driver's node:",
            "{free_disk}",
            "fewer checkpoints: {checkpoint.keep, checkpoint.save_hf, checkpoint.every_steps}; elsewhere: "
            "checkpoint.dir",
        ),
    ),
    ForeignFailure(
        # the port stands before the words, behind them, or nowhere
        r"(?s)^(?=.*(?:Address already in use|EADDRINUSE))(?:.*?(?:port[ =:]+|:)(?P<port>\d{4,5})\b)?",
        (
            "another process listens there: `ss -ltnp | grep {port}` on the node says which; end it, if it "
            "is a leftover of a run",
            "megarl itself asks the system for free ports; a port given by hand is in RAY_ADDRESS or "
            "MASTER_PORT: give another",
        ),
    ),
    ForeignFailure(
        r"ActorUnschedulableError|ActorPlacementGroupRemoved|placement group .* (removed|infeasible)",
        hints.NO_RESOURCES,
    ),
    ForeignFailure(
        r"node timed out during startup",
        (
            "Ray gives its own processes 30 s to start, whatever is set. The same command again often "
            "succeeds: their files are in "
            "memory by now",
            "a busy machine ({load}): `ps -C raylet,gcs_server -o pid,etime,user` shows other runs and "
            "leftovers; `ray stop` ends "
            "yours, also those at work",
            "a slow or full disk: Ray works in {ray_folder} ({ray_folder_free}); RAY_TMPDIR=FOLDER for a "
            "local one with room",
            "in Ray's words: raylet.err and gcs_server.err in {ray_folder}/ray/session_latest/logs",
            "or start Ray by itself, as often as it needs: `ray start --head`, then RAY_ADDRESS=auto and "
            "the same command",
        ),
    ),
)
