"""Commands for a run of another process: `megarl status`, `scale` and `stop`.

`megarl status` reads only the run's `status.json`, on any machine that sees the folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from megarl.cli.run.context import cause_of, how_to_resume_in, result_of
from megarl.cli.tables.console import output_console, print_line, table
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.machine.errors import counted
from megarl.machine.folder_kinds import is_run, no_run
from megarl.machine.folder_lock import Owner, owner_of
from megarl.plan.placement.dataflow import OffloadPlan
from megarl.plan.placement.plan import plan_placement
from megarl.tracking.run_files import CONFIG_FILE, FAILURE_FILE, MOST_REPLICAS, ask_for
from megarl.tracking.status import (
    ENDED,
    EVERY_S,
    INTERRUPTED,
    RUNNING,
    STOPPED,
    RunStatus,
    StatusRecord,
    read_status,
)

_LATE = 4  # number of missing writes after which a run is considered lost
_WATCH_S = 1.0


def run(run_dir: str, watch: bool = False) -> None:
    """Print the status once or, with `watch`, after each update until the run ends, in place on a terminal.

    Raises:
        StatusError: There is no status.
    """
    folder = Path(run_dir)
    console = output_console()
    record = read_status(folder)
    records = _until_it_ends(folder, record) if watch else iter([record])

    with (
        Live(console=console, auto_refresh=False, transient=True)
        if watch and console.is_terminal
        else nullcontext() as live
    ):
        for record in records:
            if live is None:
                console.print(shown(folder, record))
            else:
                live.update(shown(folder, record), refresh=True)

    if not is_running(record):
        print_line(console, last_words(folder, record))


def _until_it_ends(folder: Path, record: StatusRecord) -> Iterator[StatusRecord]:
    """Yield the current status and each later one, until the run has ended."""
    yield record
    while is_running(record):
        time.sleep(_WATCH_S)
        before = record
        record = read_status(folder)
        if record != before or not is_running(record):
            yield record


def is_running(record: StatusRecord) -> bool:
    return record.run.state == RUNNING and not _is_lost(record)


def _is_lost(record: StatusRecord) -> bool:
    """Whether the status is that of a running run whose process no longer exists."""
    return record.run.state == RUNNING and _age_s(record) > EVERY_S * _LATE and record.is_alive is False


def _age_s(record: StatusRecord) -> float:
    return max(0.0, time.time() - record.written_at)


def last_words(folder: Path, record: StatusRecord) -> str:
    """Describe in one line how a run ended, what is saved, and how to continue."""
    status = record.run
    ago = f"{duration(_age_s(record))} ago"
    where = (
        "before its first step" if status.step is None else f"in step {status.step} of {status.total_steps}"
    )
    report = f"`megarl report {folder}` shows it"

    if status.state == ENDED:
        # A run that was started again after its last step has trained none.
        steps = "it had no step left" if status.step is None else f"after step {status.step}"
        how = f"the run is complete, {ago}, {steps}"
        return "; ".join(part for part in (f"{folder}: {how}", result_of(folder), report) if part)

    # A killed process cannot update its status, which still reports a running run.
    if status.state == RUNNING:
        how = f"its process {record.pid} on {record.host} is gone, {ago}, {where}"
    elif status.state == STOPPED:
        how = f"the run was stopped and saved, {ago}, {where}"
    elif status.state == INTERRUPTED:
        how = f"the run was interrupted, {ago}, {where}"
    else:
        cause = cause_of(folder)
        how = (
            f"the run has failed, {ago}, {where}{f': {cause}' if cause else ''} (full report: "
            f"{folder / FAILURE_FILE})"
        )

    return f"{folder}: {how}; {how_to_resume_in(folder)}; {report}"


def shown(folder: Path, record: StatusRecord) -> RenderableType:
    """Return the status as text and tables; empty if the run has ended."""
    if not is_running(record):
        return Group()
    status = record.run
    age_s = _age_s(record)
    late = age_s > EVERY_S * _LATE
    alive = {
        True: "its process is alive",
        None: f"its process {record.pid} on {record.host} is not visible from this machine",
    }
    lines = [
        Text(f"{folder}: {_place(status)}, weights {status.weight_version}", style="bold"),
        Text(f"prompts: {', '.join(f'{number:,} {state}' for state, number in status.groups.items())}"),
        Text(
            f"{status.tokens_per_s:,.0f} tokens/s; idle: trainer {status.trainer_idle:.0%}, engines "
            f"{status.engines_idle:.0%}"
        ),
    ]

    # A status that is no longer written may come from a process that hangs.
    if late:
        lines.append(
            Text(
                f"last written {duration(age_s)} ago instead of every {EVERY_S:g} s; "
                f"{alive[record.is_alive or None]}",
                "yellow",
            )
        )

    if status.num_recoveries:
        excluded = ", ".join(status.excluded_nodes)
        lines.append(
            Text(
                f"{counted(status.num_recoveries, 'recovery')}, {duration(status.recovery_lost_s)} lost, "
                f"goodput {status.goodput:.1%}{f'; excluded nodes: {excluded}' if excluded else ''}"
            )
        )
    if status.stalled is not None:
        lines.append(Text(status.stalled, style="yellow"))
    return Group(*lines, _replicas(status), *([_oldest(status)] if status.oldest else []))


def _place(status: RunStatus) -> str:
    inner = [phase for phase in status.phases if phase != "step"]
    phase = (
        f", {inner[-1]} for {duration(status.phase_s)}"
        if inner
        else ", training"
        if status.step is not None
        else ""
    )
    step = "before the first step" if status.step is None else f"step {status.step} of {status.total_steps}"
    ahead = f" (up to {counted(status.max_staleness, 'step')} ahead)" if status.max_staleness else ""

    return f"{step}{phase}{ahead}"


def _replicas(status: RunStatus) -> RenderableType:
    return table(
        f"Replicas; {counted(status.num_restarts, 'restart')}",
        ("replica", "state", "requests", "tokens/s", "last sample"),
        [
            (
                str(number),
                replica.state,
                f"{replica.in_flight:,}",
                f"{replica.tokens_per_s:,.0f}",
                f"{duration(replica.silent_s)} ago" if replica.in_flight else "-",
            )
            for number, replica in enumerate(status.replicas)
        ],
    )


def _oldest(status: RunStatus) -> RenderableType:
    return table(
        "Oldest pending prompts",
        ("prompt", "missing samples", "state", "for"),
        [
            (group.uid or "-", f"{group.missing:,}", group.where, duration(group.seconds))
            for group in status.oldest
        ],
    )


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- megarl scale


def scale(run_dir: str, num_replicas: int) -> None:
    """Request the number of replicas. Raises ValueError, StatusError or ConfigError if that is impossible."""
    folder = Path(run_dir)
    if not 1 <= num_replicas <= MOST_REPLICAS:
        raise ValueError(f"--replicas {num_replicas}: must be in [1, {MOST_REPLICAS}]")
    record = read_status(folder)

    if not is_running(record):
        raise ValueError(
            f"{last_words(folder, record)}. To resume with {counted(num_replicas, 'replica')}: "
            f"rollout.num_replicas={num_replicas}"
        )

    config = load_config(PPOConfig, folder / CONFIG_FILE)
    # Engines that share devices with training are fixed by the placement.
    if OffloadPlan(plan_placement(config)).engines_move:
        raise ValueError(
            f"{folder}: with placement.strategy={config.placement.strategy.value} the engines share devices "
            "with other roles, so the number of replicas is fixed; split_collocate and stand_alone give "
            "them separate devices"
        )

    ask_for(folder, num_replicas)  # also if the status shows that number, because it is seconds old
    print(
        f"{folder}: requested {counted(num_replicas, 'replica')} instead of {len(record.run.replicas)}; the "
        f"run applies this between two steps, and new replicas receive weights before their first request. "
        f"Follow it with: megarl status {folder} --watch"
    )


# ---- megarl stop


def stop(run_dir: str) -> None:
    """Send SIGTERM to the process of a run.

    Raises:
        ValueError: No run uses the folder, or its process cannot be reached from here.
    """
    folder = Path(run_dir)
    owner = owner_of(folder)
    # A run that has just started has a lock, and no other files yet.
    if owner is None and not is_run(folder):
        raise ValueError(no_run(folder))
    if owner is None:
        raise ValueError(f"{folder}: no run uses this folder now; `megarl status {folder}` shows its end")

    runs = owner.still_runs(Owner.here(), is_locked=False)
    if runs is False:
        raise ValueError(
            f"{folder}: its {owner.describe()}, has ended without a trace; {how_to_resume_in(folder)}"
        )
    if runs is None:
        raise ValueError(
            f"{folder}: its {owner.describe()}, is on another machine or in another container; run "
            f"`megarl stop {folder}` there, or `kill -TERM {owner.pid}`"
        )
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:
        raise ValueError(f"{folder}: its {owner.describe()}, has just ended") from None
    except PermissionError:
        raise ValueError(
            f"{folder}: its {owner.describe()}, belongs to another user; ask that user to stop it"
        ) from None

    print(
        f"{folder}: asked its {owner.describe()}, to end after its step and a checkpoint. Do not repeat this "
        f"to hurry it: a second time, it ends immediately. Follow it with: megarl status {folder} --watch"
    )
