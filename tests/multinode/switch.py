"""An Ethernet switch in a process, which loses and delays frames between given nodes.

    python -m tests.multinode.switch FD ...     # the tap device of each node

Each line of standard input replaces all rules: a JSON list of [source, target, loss, delay_s]. Frames between
other pairs pass. A line "ok" on standard output says that the rules apply.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import select
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

_MOST_BYTES = 70_000
_MULTICAST = 1  # bit of the first byte of an address
_IN_A_ROW = 64


class Rule(NamedTuple):
    """What happens to frames from one node to another: the share that is lost, and the delay of the others."""

    loss: float
    delay_s: float


class Switch:
    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = list(taps)
        self._rules: dict[tuple[int, int], Rule] = {}
        self._node_of: dict[bytes, int] = {}  # by hardware address
        self._delayed: list[tuple[float, int, int, bytes]] = []
        self._order = count()
        self._random = random.Random(7)

    def set_rules(self, rules: Sequence[tuple[int, int, float, float]]) -> None:
        self._rules = {(source, target): Rule(loss, delay_s) for source, target, loss, delay_s in rules}

    def receive(self, source: int) -> None:
        """Forward the frames that a node has sent."""
        for _ in range(_IN_A_ROW):
            try:
                frame = os.read(self._taps[source], _MOST_BYTES)
            except BlockingIOError:
                return
            target, sender = frame[:6], frame[6:12]
            self._node_of[sender] = source
            known = None if target[0] & _MULTICAST else self._node_of.get(target)
            for node in range(len(self._taps)) if known is None else (known,):
                if node != source:
                    self._forward(source, node, frame)

    def _forward(self, source: int, target: int, frame: bytes) -> None:
        rule = self._rules.get((source, target))
        if rule is None:
            self._send(target, frame)
        elif self._random.random() >= rule.loss:
            due_s = time.monotonic() + rule.delay_s
            heapq.heappush(self._delayed, (due_s, next(self._order), target, frame))

    def send_due(self) -> float:
        """Send delayed frames that are due, and return the seconds until the next one."""
        while self._delayed:
            wait_s = self._delayed[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            _, _, target, frame = heapq.heappop(self._delayed)
            self._send(target, frame)
        return 60.0

    def _send(self, target: int, frame: bytes) -> None:
        try:
            os.write(self._taps[target], frame)
        except (BlockingIOError, OSError):  # a full queue, or a device that is down, loses frames
            return


def main() -> None:
    taps = [int(number) for number in sys.argv[1:]]
    switch = Switch(taps)
    poll = select.epoll()
    for descriptor in taps:
        os.set_blocking(descriptor, False)
        poll.register(descriptor, select.EPOLLIN)
    control = sys.stdin.fileno()
    poll.register(control, select.EPOLLIN)
    sources = {descriptor: node for node, descriptor in enumerate(taps)}

    while True:
        for descriptor, _ in poll.poll(switch.send_due()):
            if descriptor in sources:
                switch.receive(sources[descriptor])
                continue
            line = sys.stdin.readline()
            if not line:
                return  # the test has ended
            switch.set_rules(json.loads(line))
            print("ok", flush=True)


if __name__ == "__main__":
    main()
