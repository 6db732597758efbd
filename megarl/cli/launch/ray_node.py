"""One node of a Ray cluster, as a process that ends with its daemons when its standard input closes.

    python -m megarl.cli.launch.ray_node --address IP [--head HOST:PORT] --num-cpus N
                                         [--dashboard-port PORT] [--temp-dir DIR]

The process prints the cluster's address when the node is up. It takes free ports, so several nodes can run on
one host. `ray start` cannot be used here: it rejects loopback addresses, and its daemons keep running when
the process that started it is killed.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import uuid

from megarl.controller.daemons import (
    NodeStartError,
    add_key,
    last_words,
    object_store_bytes,
    read_key,
    start_node,
    start_patiently,
    too_little_shared_memory,
)
from megarl.controller.environment import daemon_settings
from megarl.machine.reaper import descendants, end_held, hold, start_reaper

_LOOK_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megarl.cli.launch.ray_node")
    parser.add_argument("--address", required=True)
    parser.add_argument("--head")
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--dashboard-port", type=int)
    parser.add_argument("--temp-dir")
    parsed = parser.parse_args()
    # Complete the environment before the node starts, because Ray's daemons inherit it.
    add_key(os.environ)
    for name, value in daemon_settings().items():
        os.environ.setdefault(name, value)
    read_key()
    memory = object_store_bytes()
    if warning := too_little_shared_memory(memory):
        _say(f"warning: {parsed.address}: {warning}")

    try:
        node = start_patiently(
            lambda: start_node(
                parsed.address,
                parsed.head,
                num_cpus=parsed.num_cpus,
                object_store_memory=memory,
                dashboard_port=parsed.dashboard_port,
                temp_dir=parsed.temp_dir,
            ),
            _say,
        )
    except NodeStartError as error:
        _say(f"{parsed.address}: {error}")
        return 1

    # Ray's agents notice the end of their raylet only after a minute, and are orphans if it ends first.
    start_reaper(f"ray-node-{uuid.uuid4().hex}", whole_group=False, named=descendants(os.getpid()))
    print(node.gcs_address, flush=True)

    try:
        # The standard input closes when the process that started this one stops the node, or dies.
        while not select.select([sys.stdin], [], [], _LOOK_S)[0]:
            if dead := [str(kind) for kind, _ in node.dead_processes()]:
                _say(
                    f"{', '.join(dead)} of {parsed.address} ended; their logs are in "
                    f"{node.get_logs_dir_path()}"
                )
                for line in last_words(node.get_logs_dir_path()):
                    _say(line)
                return 1
    finally:
        agents = hold(descendants(os.getpid()))  # includes processes started since then
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        end_held(agents)

    return 0


def _say(text: str) -> None:
    print(f"ray_node: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
