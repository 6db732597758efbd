"""The failure report of a command.

It prints the tracebacks, then one page with the root cause, hints and log locations.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from megarl.checkpoints.run_folder import LATEST_FILE
from megarl.cli.run.context import RunContext
from megarl.config.dotted import given_at
from megarl.config.roles import model_roles
from megarl.config.schema import RunConfig
from megarl.config.values import contents_of
from megarl.controller import hints
from megarl.controller.errors import PhaseTimeoutError, RankFailure, WorkerError
from megarl.machine.errors import LESS_ENGINE_MEMORY, HintedError, RunError, counted, hint_of, written
from megarl.machine.files import existing_folder, write_whole
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, GENERATIONS_FILE, METRICS_FILE
from megarl.tracking.samples import SAMPLES_FOLDER
from megarl.tracking.timeline import TIMELINE_FILE
from megarl.trainers.monitor import Position, phases_by_call

_NUM_LINES = 30
_NUM_MESSAGE_LINES = 10
_NUM_HINT_LINES = 9
_NUM_CHARACTERS = 400  # limit of one line of a message
_WIDTH = 78
_LABEL = 8
_Entry = tuple[str, Sequence[str]]  # a label, and lines
_Call = WorkerError | PhaseTimeoutError  # a call that has failed
_FILES = (CONFIG_FILE, METRICS_FILE, GENERATIONS_FILE, SAMPLES_FOLDER, TIMELINE_FILE)


def print_failure(error: Exception, command: str, context: RunContext | None) -> None:
    """Print the report to standard error, and write `failure.txt` if the run has a folder."""
    # A RunError has the tracebacks of the workers in its message.
    tracebacks = str(error) if isinstance(error, RunError) else "".join(traceback.format_exception(error))
    text = f"{tracebacks.rstrip()}\n\n{last_page(error, command, context)}"
    print(text, file=sys.stderr)

    if context is not None and context.output_dir is not None:
        try:
            write_whole(context.output_dir / FAILURE_FILE, text + "\n")
        except OSError as problem:
            print(f"({context.output_dir / FAILURE_FILE} could not be written: {problem})", file=sys.stderr)


def last_page(error: Exception, command: str, context: RunContext | None) -> str:
    """Return the last page of the report, at most 30 lines."""
    cause = _cause(error)
    call = _failed_call(error)
    entries: list[_Entry] = [("what", cause.message), *_place(call)]
    if when := _when(call, None if context is None else context.position):
        entries.append(("when", [when]))
    if call is not None and call.rows is not None:
        entries.append(("rows", [call.rows]))
    if isinstance(call, WorkerError) and call.others:
        entries.append(("after", [_others(call.others)]))
    if hint := hint_for(cause, None if context is None else context.config):
        entries.append(("try", hint[:_NUM_HINT_LINES]))
    if context is not None:
        entries.append(("logs", _logs(call, context)))
    lines = [f"==== megarl {command} failed ".ljust(_WIDTH, "=")]

    # Format the entries in two columns, with the label on the first line only.
    for label, told in entries:
        for index, line in enumerate(told):
            lines.append(f"{label if index == 0 else '':{_LABEL}}{line}")

    return "\n".join([*lines[: _NUM_LINES - 1], "=" * _WIDTH])


# ---- the first cause


def _cause(error: Exception) -> Cause:
    hint = hint_of(error)
    if isinstance(error, WorkerError):
        text = f"{error.summary}\n{error.remote_traceback}"
        return Cause(_shortened(_own_words(error)), text, hint, error.role, error.method)

    # A hang has no single cause, so show the positions of up to six ranks.
    if isinstance(error, PhaseTimeoutError):
        lines = [str(error).splitlines()[0], *(f"  {report.summary}" for report in error.reports[:6])]
        more = len(error.reports) - 6
        if more > 0:
            lines.append(f"  and {counted(more, 'more rank')}")
        return Cause(lines, str(error), hint, error.role, error.method)

    # The innermost cause has the role and the method; the outer errors add their messages.
    below = error.__cause__
    inner = _cause(below) if isinstance(below, Exception) else None
    text = f"{type(error).__name__}: {error}"
    head, _, rest = str(error).partition("\n\n")
    last = rest.rpartition("\n\n")[2].splitlines()
    told = [*head.splitlines(), *(last if last and not last[0].startswith((" ", "Traceback")) else [])]
    message = _shortened([f"{type(error).__name__}: {told[0] if told else ''}".rstrip(": "), *told[1:]])
    role = error.role if isinstance(error, HintedError) else ""
    if inner is None:
        return Cause(message, text, hint, role)

    return Cause(message, f"{text}\n{inner.text}", hint, inner.role or role, inner.method)


def _own_words(error: WorkerError) -> list[str]:
    """Return the full message of the worker's exception, whose first line is the summary."""
    _, found, rest = error.remote_traceback.rpartition(f"\n{error.summary}")
    return [error.summary, *(rest.splitlines()[1:] if found and error.error_type else [])]


def _shortened(lines: Sequence[str]) -> list[str]:
    shown = [line.rstrip() for line in lines if line.strip()]
    if len(shown) > _NUM_MESSAGE_LINES:
        left = len(shown) - _NUM_MESSAGE_LINES
        shown = [*shown[: _NUM_MESSAGE_LINES - 1], f"({left + 1:,} more lines above)"]
    return [line if len(line) <= _NUM_CHARACTERS else line[: _NUM_CHARACTERS - 4] + " ..." for line in shown]


# ---- where and when


def _failed_call(error: BaseException | None) -> _Call | None:
    """Return the failed call of an error or of one of its causes."""
    while error is not None:
        if isinstance(error, (WorkerError, PhaseTimeoutError)):
            return error
        error = error.__cause__
    return None


def _place(call: _Call | None) -> list[_Entry]:
    if isinstance(call, WorkerError):
        process = f"pid {call.pid}" if call.pid is not None else "pid unknown"
        return [("where", [f"{call.role} rank {call.rank}, node {call.node}, {process}, in {call.method}"])]

    if isinstance(call, PhaseTimeoutError):
        return [("where", [f"{call.role}, in {call.method}"])]
    return []


def _when(call: _Call | None, position: Position | None) -> str:
    position = position or Position()
    phases = [phase for phase in position.phases if phase != "step"]
    of_call = None if call is None else phases_by_call([call.role]).get((call.role, call.method))
    # The call may belong to a phase that runs concurrently with the driver's phase.
    if of_call is not None and of_call not in phases:
        phases.append(of_call)
    step = "" if position.step is None else f"step {position.step}"
    phase = f"phase {' > '.join(phases)}" if phases else ""

    return ", ".join(part for part in (step, phase) if part)


def _others(others: Sequence[RankFailure]) -> str:
    first = sorted((other.role, other.rank) for other in others)[:8]
    ranks = ", ".join(f"{role} rank {rank}" for role, rank in first)
    return f"{len(others)} more failed after it: {ranks}{' ...' if len(others) > 8 else ''}"


def _logs(call: _Call | None, context: RunContext) -> list[str]:
    lines = []
    if isinstance(call, WorkerError) and call.log_path:
        lines.append(f"{call.log_path}: log of this process and its engine, on node {call.node}")

    if context.log_folder:
        nodes = ", ".join(context.nodes[:4]) + (
            f" and {len(context.nodes) - 4} more" if len(context.nodes) > 4 else ""
        )
        lines.append(f"{context.log_folder}: logs of Ray and all workers, on each node ({nodes})")

    if context.output_dir is None:
        return lines
    if files := [name for name in _FILES if (context.output_dir / name).exists()]:
        lines.append(f"{context.output_dir}: {', '.join(files)}")
    lines.append(f"{context.output_dir / FAILURE_FILE}: this page, with the tracebacks")
    checkpoints = context.config.checkpoint_path
    if (checkpoints / LATEST_FILE).is_file():
        lines.append(f"{checkpoints}: checkpoints; the same command resumes from the latest")

    return lines


# ---- hints, filled with the run's values: from the error, or from a table of messages of other programs


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
        # A line with a value that this run does not have would mislead.
        if all(_value(field, cause, config, found) for field in _FIELD.findall(line)):
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
    return given_at(contents_of(config), key)


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
            "checkpoints": config.checkpoint_path,
        }
        places = {**of_run, **places}

    # The folders themselves may not exist yet.
    usages = {f"{name}, {path}": shutil.disk_usage(existing_folder(path)) for name, path in places.items()}
    return "\n".join(
        f"  {place}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
        for place, usage in usages.items()
    )


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
