"""A reward file that covers all outcomes of a function. `solution_str` selects the outcome."""

import json
import os
import re
import signal
import subprocess
import sys
import time


def compute_score(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "right":
            return 1.0
        case "equal":
            return ground_truth == extra_info.get("answer")
        case "dict":
            return {"score": 0.5, "format": 1, "note": "kept out"}
        case "raise":
            return 1 / 0
        case "exit":
            sys.exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(1000)
        case "sleep with children":
            for number in range(2):  # one in this process's group, one in its own session
                child = subprocess.Popen(["sleep", "1000"], start_new_session=bool(number))
                with open(extra_info["pids"], "a") as file:
                    file.write(f"{child.pid}\n")
            time.sleep(1000)
        case "hang in C":
            return re.match(r"(a+)+b", "a" * 64)
        case "nan":
            return float("nan")
        case "text":
            return "1.0"
        case "no score":
            return {"points": 1}
        case "process":
            return os.getpid()
        case "torch":
            return "torch" in sys.modules
    return 0


def length(solution_str, **kwargs):
    return len(solution_str)


def keys_of(solution_str, **kwargs):
    """Return the keys that the sample specifies as JSON."""
    return {"score": 1.0, **json.loads(solution_str)}


def takes_too_few(solution_str):
    return 0.0


async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 0.0


not_a_function = 5
