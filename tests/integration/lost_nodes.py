"""Kill processes and a node of a two-node cluster, and print as JSON what the driver is told about each.

Ray has one cluster per process, so this is a separate program: `python -m tests.integration.lost_nodes`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.schema import PPOConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.environment import daemon_settings
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec
from tests.integration.started_cluster import started_cluster

# A raylet that has ended is noticed after about two seconds. These are limits of Ray's daemons, none of which
# is slow here: they are polled, and respond, in threads of their own.
NOTICED_SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_timeout_ms": "20000",
}


class MortalWorker(Worker):
    @register()
    def pid(self) -> int:
        return os.getpid()

    @register(blocking=False)
    def end(self, how: str) -> None:
        """End this process by the signal of this name."""
        signal.raise_signal(getattr(signal, how))

    @register(blocking=False)
    def wait(self) -> None:
        signal.pause()

    @register(blocking=False)
    def large(self) -> np.ndarray:
        """Return a value that is too large to be inlined in the reply, so that it stays on this node until it
        is fetched."""
        return np.zeros(1_000_000)


def told(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        call()
    except RunError as error:
        kind = getattr(error, "kind", None)
        summary = getattr(error, "summary", str(error).splitlines()[0])
        page = last_page(error, "train", RunContext(PPOConfig()))
        return {
            "error": type(error).__name__,
            "kind": None if kind is None else kind.name,
            "summary": summary,
            "page": page,
        }
    return {"error": None}


def main() -> None:
    os.environ.update({**daemon_settings(), **NOTICED_SOON})
    # The head has no CPU, so that no other node can take the place of the lost one.
    cluster, (node,) = started_cluster({"num_cpus": 0}, {"num_cpus": 7})
    os.environ["RAY_ADDRESS"] = cluster.address
    start_ray(num_cpus=1)
    results: dict[str, Any] = {}
    folder = tempfile.mkdtemp()

    try:
        pools = ResourcePoolManager(
            {"pool": [2], "rollout": [1]}, {}, use_gpu=False, nodes={"pool": [0], "rollout": [0]}
        )
        pools.create_resource_pool()
        pool = pools.resource_pools["pool"]

        def end(group: RayWorkerGroup, how: str) -> None:
            """End a process. After SIGTERM it may answer calls until it has ended."""
            group.call_rank(1, MortalWorker.end, how).get()
            while True:
                group.call(MortalWorker.pid)

        def started() -> RayWorkerGroup:
            group = RayWorkerGroup(
                pool, RayClassWithInitArgs(MortalWorker), role="actor", phase_time_limit_s=10_000
            )
            group.call(MortalWorker.pid)
            return group

        for how in ("SIGKILL", "SIGTERM", "SIGSEGV"):
            group = started()
            results[how] = told(partial(end, group, how))
            group.shutdown()

        spec = FakeSpec(folder=Path(folder), manifest=MANIFEST)
        [place] = pools.resource_pools["rollout"].split()
        replicas = Replicas(
            [ReplicaPlace(place)], lambda: FakeEngine(spec), restart_limit=3, phase_time_limit_s=10_000
        )
        replicas.groups[0].ready.get()
        group = started()
        large = group.call(MortalWorker.large)
        for call in large.calls:
            call.fetch()
        waiting = group.call(MortalWorker.wait)
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        results["node"] = told(waiting.get)
        results["result"] = told(large.get)
        results["start"] = told(started)
        results["replica"] = told(lambda: replicas.restart(0, "its last words"))
    finally:
        shutdown()
        cluster.shutdown()
        shutil.rmtree(folder)

    print(json.dumps(results))


if __name__ == "__main__":
    main()
