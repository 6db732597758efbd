"""The failure report of a command.

It prints the tracebacks, then one page with the root cause, hints and log locations.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence

from megarl.checkpoints.run_folder import LATEST_FILE
from megarl.cli.run.context import RunContext
from megarl.cli.run.hints import Cause, hint_for
from megarl.controller.errors import PhaseTimeoutError, RankFailure, WorkerError
from megarl.machine.errors import HintedError, RunError, counted, hint_of
from megarl.machine.files import write_whole
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
