"""Python imports this at its start, as it is on the path of what the tests start: processes that SGLang's
server spawns are forked.

The server itself is a fresh process, as it is known by its process id.
"""

import os
import sys

if "megarl.rollout.sglang.server_process" in sys.orig_argv and "WARM_PROCESSES" in os.environ:
    import multiprocessing

    multiprocessing.set_executable(f"{os.environ['WARM_PROCESSES']}/python-sglang")
