"""Runs the commands of a recipe in sequence."""

from __future__ import annotations

import shlex
import signal
import subprocess
from collections.abc import Iterable, Sequence

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_stages(stages: Iterable[Sequence[str]]) -> int:
    """Print and run each command.

    Returns the exit code of the first that fails, as a shell reports it, or 0.
    """
    for stage in stages:
        print("$ " + shlex.join(["python", *stage[1:]]), flush=True)
        if status := _run(stage):
            return status
    return 0


def _run(stage: Sequence[str]) -> int:
    """Run one command in the foreground.

    Signals to this process are forwarded to it, so that a training run can save and shut down in order.
    """
    # With its own process group, the command does not receive a terminal's Ctrl-C twice.
    process = subprocess.Popen(stage, process_group=0)
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    # Signals that are ignored here stay ignored, as under nohup.
    for number in (each for each, handler in before.items() if handler is not signal.SIG_IGN):
        signal.signal(number, lambda number, frame: process.send_signal(number))

    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    return status if status >= 0 else 128 - status
