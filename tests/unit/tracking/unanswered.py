"""Run that logs to services that accept connections and never respond: python -m
tests.unit.tracking.unanswered OUTPUT_DIR

It prints the seconds that logging took, then the seconds that closing took.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from megarl.tracking import services
from megarl.tracking.loggers import Tracker
from megarl.tracking.tracked_run import TrackedRun

if __name__ == "__main__":
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{silent.getsockname()[1]}"
    os.environ |= {
        "WANDB_BASE_URL": address,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_MODE": "online",
        "MLFLOW_TRACKING_URI": address,
    }
    services.CLOSE_LIMIT_S = 1.0
    tracker = Tracker(["wandb", "mlflow", "jsonl"], TrackedRun(output_dir=Path(sys.argv[1])))
    started_s = time.monotonic()
    for step in range(1, 101):
        tracker.log({"critic/score/mean": 0.5}, step)
    tracker.flush()
    print(time.monotonic() - started_s)
    started_s = time.monotonic()
    tracker.close()
    print(time.monotonic() - started_s, flush=True)
