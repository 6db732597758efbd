"""Worker that Ray's memory monitor kills, by a threshold that any machine exceeds: python -m
tests.integration.memory_monitor

It prints the failure page that a run would end with.
"""

from __future__ import annotations

import os
import time

from megarl.cli.run.context import RunContext
from megarl.cli.run.failure_report import last_page
from megarl.config.schema import PPOConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.errors import WorkerError
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, Worker


class SlowWorker(Worker):
    def __init__(self) -> None:
        time.sleep(60)


if __name__ == "__main__":
    os.environ |= {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    start_ray(num_cpus=1, object_store_mb=100)
    group = RayWorkerGroup(
        RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(SlowWorker), role="actor"
    )
    try:
        group.ready.get(timeout=50)
    except WorkerError as error:
        print(last_page(error, "train", RunContext(PPOConfig())))
    shutdown()
