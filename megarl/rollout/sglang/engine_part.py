"""The part of an SGLang engine on a node other than its first: schedulers only, which serve no requests.

The first node's scheduler passes every request of SGLang on to them, also those that pause, load weights and
release memory.
"""

from __future__ import annotations

import threading

from megarl.rollout.interface import EnginePart, RolloutEngineSpec
from megarl.rollout.nodes import EngineNode, FirstNode
from megarl.rollout.sglang.backend import LoopThread
from megarl.rollout.sglang.in_process import InProcessBackend
from megarl.rollout.sglang.server_args import START_LIMIT_S, build_server_args, node_args

_POLL_S = 0.5


class SGLangEnginePart(EnginePart):
    """The schedulers of one node.

    Raises EngineDeadError with SGLang's last output if they do not start.
    """

    def __init__(self, spec: RolloutEngineSpec, node: EngineNode) -> None:
        self._first = FirstNode(node, START_LIMIT_S)
        self._backend = InProcessBackend(build_server_args(spec) | node_args(node, self._first.ranks_port))
        self._loop = LoopThread(self._backend.start)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="engine-part", daemon=True).start()

    def _watch(self) -> None:
        """Report the end of a scheduler to the first node, whose own ones may not notice it."""
        while not self._closed.wait(_POLL_S):
            if (ended := self._backend.dead_process()) is not None:
                self._first.report(ended)
                return

    def process_ids(self) -> list[int]:
        return self._backend.process_ids()

    def close(self) -> None:
        self._closed.set()
        self._first.close()
        self._loop.stop()
        self._backend.stop()
