"""Times work on a device, as independently of other load on the machine as possible.

The fastest of several repeats counts. On a CPU, the processor seconds of a repeat count.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from megarl.machine.usage import Stopwatch

_REPEATS = 5
_LEAST_S = 0.01  # of a repeat, so that the resolution of clocks does not matter
_MOST_CALLS = 1000


def seconds_per_call(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call in the fastest repeat, of as many calls as take ten milliseconds."""
    # The first call may compile or allocate; the second one finds the number of calls.
    work()
    once = _seconds(work, 1, device)
    num_calls = min(_MOST_CALLS, max(1, round(_LEAST_S / max(once, 1e-7))))
    return min(_seconds(work, num_calls, device) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object], num_calls: int, device: torch.device) -> float:
    if device.type == "cpu":
        begin = processor_s()
        for _ in range(num_calls):
            work()
        return (processor_s() - begin) / num_calls

    stopwatch = Stopwatch(device)
    with stopwatch:
        for _ in range(num_calls):
            work()
    return stopwatch.seconds() / num_calls


def processor_s() -> float:
    """Return the processor seconds of this process so far, shared by its threads."""
    return time.process_time() / torch.get_num_threads()
