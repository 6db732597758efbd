"""Driver of a run on several nodes, which a test asks to do one thing after another.

    python -m tests.multinode.driver FOLDER

Each line of standard input names a command; the answer is a line of JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.schema import PPOConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.controller.worker import RayClassWithInitArgs, Worker, register
from megarl.machine.errors import RunError
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.worker.rollout_worker import RolloutWorker
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec

_NO_LIMIT_S = 10_000


class SteadyWorker(Worker):
    @register(blocking=False)
    def wait(self) -> None:
        signal.pause()

    @register()
    def large(self) -> np.ndarray:
        """Return a value that is too large to be inlined in the reply."""
        return np.arange(1_000_000)


class Driver:
    """An actor and a rollout replica on one node, and another replica on a second one."""

    def __init__(self, folder: Path) -> None:
        start_ray(num_cpus=1)
        pools = ResourcePoolManager(
            {"actor": [1], "rollout": [1, 1]},
            {},
            use_gpu=False,
            max_colocate_counts={"actor": 2, "rollout": 2},  # more than the node of the driver has
            nodes={"actor": [0], "rollout": [0, 1]},
        )
        pools.create_resource_pool()
        self._pools = pools.resource_pools
        spec = FakeSpec(folder=folder, manifest=MANIFEST)
        self._replicas = Replicas(
            [ReplicaPlace(part) for part in self._pools["rollout"].split()],
            lambda: FakeEngine(spec),
            restart_limit=9,
            phase_time_limit_s=_NO_LIMIT_S,
        )

        self._actor = RayWorkerGroup(
            self._pools["actor"],
            RayClassWithInitArgs(SteadyWorker),
            role="actor",
            phase_time_limit_s=_NO_LIMIT_S,
        )
        self._actor.ready.get()

    def places(self) -> dict[str, Any]:
        """Return the address of each process's node."""
        groups = self._replicas.groups
        for group in groups:
            group.ready.get()
        return {
            "actor": self._actor.reports()[0].node,
            "replicas": [group.reports()[0].node for group in groups],
            "pids": [group.pids for group in groups],
        }

    def call(self) -> dict[str, Any]:
        """Transfer 8 MB from the actor."""
        [value] = self._actor.call(SteadyWorker.large)
        return {"sum": int(value.sum())}

    def wait(self) -> dict[str, Any]:
        """Wait until the actor is lost."""
        return {"result": self._actor.call(SteadyWorker.wait).get()}

    def collect(self) -> dict[str, Any]:
        """Ask each replica for the version of its weights."""
        groups = self._replicas.groups
        return {"versions": [group.call(RolloutWorker.weight_version) for group in groups]}

    def restart(self) -> dict[str, Any]:
        self._replicas.restart(1, "its last words")
        return self.places()

    def exclude(self) -> dict[str, Any]:
        """Exclude the node of the second replica."""
        pool = self._pools["rollout"]
        pool.excluded.add(self._replicas.groups[1].reports()[0].node)
        moved = [pool.leave_excluded_nodes() for _ in range(2)]
        return {**self.restart(), "moved": moved, "on_excluded": pool.excluded_ranks()}


def answer_to(command: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    begin_s = time.monotonic()
    answer: dict[str, Any] = {"error": None}
    try:
        answer |= command()
    except RunError as error:
        answer["error"] = type(error).__name__
        answer["summary"] = getattr(error, "summary", str(error))
        answer["node"] = getattr(error, "node", None)
        answer["page"] = last_page(error, "train", RunContext(PPOConfig()))
    return {**answer, "seconds": time.monotonic() - begin_s}


def main() -> None:
    driver = Driver(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_to(getattr(driver, line.strip()))), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
