"""Driver for test_failures.py: it starts a worker with a child and a grandchild, prints the processes, and
then waits or ends.

python driver_to_kill.py wait|end
"""

import json
import subprocess
import sys

import psutil

from megarl.controller.cluster import start_ray
from megarl.controller.group import RayWorkerGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from tests.unit.controller.workers import EchoWorker

if __name__ == "__main__":
    start_ray(num_cpus=1, object_store_mb=100)
    group = RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(EchoWorker))
    of_workers = [pid for pids in group.call(EchoWorker.start_children) for pid in pids]
    of_driver = subprocess.Popen(["sleep", "600"], start_new_session=True).pid
    below = [process.pid for process in psutil.Process().children(recursive=True)]
    workers = [one["pid"] for one in group.call(EchoWorker.about)]
    print(json.dumps({"pids": sorted({*below, *workers, *of_workers, of_driver})}), flush=True)
    if sys.argv[1] == "wait":
        group.call(EchoWorker.sleep, 600).get()
