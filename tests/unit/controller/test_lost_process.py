"""What is said of a process that is gone, by the words that Ray and the kernel use."""

import pytest
from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayError

from megarl.controller.lost_process import UNKNOWN, why_lost

DIED = "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tip: 10.0.0.7\n"
WORKER_DIED = f"{DIED}The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
COMMON_CAUSES = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the "
    "OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed unexpectedly due to SIGSEGV"
)
NODE_DIED = (
    f"{DIED}The actor died because its node has died. Node Id: 186d\n"
    "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
)
TERMINATED = "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM."
OUT_OF_MEMORY = "Task was killed: memory on the node was 9.6GB used / 10.0GB limit, by a SIGSEGV-like end"


LOST = "node 10.0.0.7 is lost: health check failed due to missing too many heartbeats"
SEGFAULT = "step 3\n*** SIGSEGV received at time=17 ***"
UNREACHABLE = "the process cannot be reached: the connection to it broke, and its node is still part of the cluster"
KEPT = "a value that was kept on node 10.0.0.9 is lost: the process or the node that kept it is gone"
MONITOR = "Ray's memory monitor ended the process: its node is running out of memory (9.6GB of 10.0GB used)"


def died(text: str) -> RayActorError:
    return RayActorError(error_msg=text)


@pytest.mark.parametrize(
    ("error", "log", "oom_kills", "expected"),
    [
        (died(NODE_DIED), "", 0, LOST),
        (died(NODE_DIED), "*** SIGTERM received", 3, LOST),
        (NodeDiedError("the node it was running on is dead or unavailable."), "", 0, "node 10.0.0.9 is lost: it no longer answers"),
        (died(WORKER_DIED + COMMON_CAUSES), "", 0, UNKNOWN),
        (died(WORKER_DIED + COMMON_CAUSES), SEGFAULT, 0, "the process crashed (SIGSEGV)"),
        (died(WORKER_DIED + COMMON_CAUSES), "Fatal Python error: Bus error\n", 0, "the process crashed (Bus error)"),
        (
            died(WORKER_DIED + COMMON_CAUSES),
            "",
            2,
            "the process ended; the kernel's OOM killer has ended 2 processes of its node during this run",
        ),
        (died(WORKER_DIED + TERMINATED), "", 0, "the process was ended by SIGTERM"),
        (died(WORKER_DIED + "Worker exits with an exit code 3."), "", 0, "the process ended with exit code 3"),
        (ActorUnavailableError("rpc error", None), "", 1, UNREACHABLE),
        (ObjectLostError("ab", b"", ""), "", 0, KEPT),
        (OutOfMemoryError(OUT_OF_MEMORY), "", 1, MONITOR),
    ],
)
def test_the_cause_is_told_apart(error: RayError, log: str, oom_kills: int, expected: str) -> None:
    assert why_lost(error, "10.0.0.9", log, oom_kills) == expected
