"""Make processes that SGLang's server spawns forked ones. Python imports this module at startup, since it is
on the path of the tests' processes.

The server itself is a fresh process, because it is identified by its process id.
"""

import os
import sys

if "megarl.rollout.sglang.server_process" in sys.orig_argv and "WARM_PROCESSES" in os.environ:
    import multiprocessing

    multiprocessing.set_executable(f"{os.environ['WARM_PROCESSES']}/python-sglang")
