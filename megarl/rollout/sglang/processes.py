"""Entry points of SGLang's spawned processes: its own, after what this machine needs."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from typing import Any

import psutil

from megarl.rollout.sglang import last_words


def run_scheduler(server_args: Any, *arguments: Any, **keywords: Any) -> Any:
    """One rank of the model. Given to SGLang as its `run_scheduler_process_func`."""
    _end_alone()
    if server_args.device == "cpu":
        from megarl.rollout.sglang import cpu_adaptations

        cpu_adaptations.install_in_scheduler()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(server_args, *arguments, **keywords)


def run_detokenizer(*arguments: Any, **keywords: Any) -> Any:
    _end_alone()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*arguments, **keywords)


def _end_alone() -> None:
    """A process of SGLang that fails tells its parent by SIGQUIT, which would kill a Ray worker without a word.

    Here it ends itself instead, its error being logged: whoever started the engine finds it dead.
    """
    send_signal = psutil.Process.send_signal

    def send(process: psutil.Process, number: int) -> None:
        if number == signal.SIGQUIT and process.pid == os.getppid():
            last_words.leave(traceback.format_exc())  # it is called while the error is handled
            logging.shutdown()
            os._exit(1)
        send_signal(process, number)

    psutil.Process.send_signal = send
