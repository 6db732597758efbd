"""Process of SGLang's HTTP server: `python -m megarl.rollout.sglang.server_process`, started by server.py.

Its settings, including the API key, are sent as one line of JSON on standard input, so that no process list
shows them. When standard input ends, its parent is gone, and it ends too. When it serves, it writes one line
of JSON to the given file descriptor.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

from megarl.machine.garbage import without_collections
from megarl.machine.ports import hold_port
from megarl.machine.reaper import descendants, end_held, hold
from megarl.rollout.sglang import environment, processes
from megarl.rollout.sglang.backend import leave_last_words

_POLL_S = 0.05


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    # From now on the end of standard input means that the parent is gone.
    threading.Thread(target=_end_with_starter, daemon=True).start()

    try:
        _serve(settings)
    except BaseException:  # the boundary of this process: its end is reported to the parent
        leave_last_words(traceback.format_exc())
        raise
    finally:
        _kill_descendants()


def _serve(settings: dict[str, Any]) -> None:
    server_args = settings["server_args"]
    environment.prepare_for(server_args)

    with without_collections():
        if server_args["device"] == "cpu":
            from megarl.rollout.sglang import cpu_adaptations

            cpu_adaptations.install_in_arguments()

        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs

    host = settings["host"]

    # the server's port, and the one where its ranks meet (in_process.py); reserved until this process ends
    held = [hold_port(host, settings["port"]), hold_port(host)]
    port, ranks_port = (each.getsockname()[1] for each in held)

    def ready() -> None:
        _wait_until_listening(host, port)
        with os.fdopen(settings["ready_fd"], "w") as pipe:
            pipe.write(json.dumps({"port": port}) + "\n")

    launch_server(
        ServerArgs(
            **{
                "nccl_port": ranks_port,
                **server_args,
                "host": host,
                "port": port,
                "api_key": settings["api_key"],
                "log_level_http": "warning",
                "skip_server_warmup": True,
            }
        ),
        run_scheduler_process_func=processes.run_scheduler,
        run_detokenizer_process_func=processes.run_detokenizer,
        launch_callback=ready,
    )


def _wait_until_listening(host: str, port: int) -> None:
    """Wait until the server listens.

    SGLang calls back when its model is ready, sometimes before its socket is. The parent limits the time.
    """
    while True:
        try:
            socket.create_connection((host, port)).close()
        except ConnectionRefusedError:
            time.sleep(_POLL_S)
        else:
            return


def _end_with_starter() -> None:
    while sys.stdin.readline():
        pass
    _kill_descendants()
    os._exit(0)


def _kill_descendants() -> None:
    end_held(hold(descendants(os.getpid())))


if __name__ == "__main__":
    main()
