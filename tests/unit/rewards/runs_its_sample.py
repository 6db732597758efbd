"""A reward function that runs the model's output, which requires a sandbox.

It reads its environment variables when it is loaded, once.
"""

import os

SEEN_AT_LOADING = {name: os.environ.get(name) for name in ("REWARD_SECRET", "REWARD_NAMED")}
COUNTED = {"samples": 0}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    names = {"seen": SEEN_AT_LOADING, "counted": COUNTED, "given": extra_info}
    exec(solution_str, names)
    return {"score": names["score"], "answer": str(names["score"])}
