"""SGLang's Engine in this process.

Its tokenizer manager runs in our event loop, its schedulers in processes that it spawns.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import threading
import time
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from typing import Any

from megarl.machine.background import LoopThread
from megarl.machine.errors import EngineDeadError
from megarl.machine.garbage import without_collections
from megarl.machine.ports import hold_port
from megarl.rollout.interface import EnginePart, RolloutEngineSpec
from megarl.rollout.nodes import EngineNode, FirstNode
from megarl.rollout.sglang import environment, processes
from megarl.rollout.sglang.backend import Backend, CallRefusedError, LastWords
from megarl.rollout.sglang.server_args import START_LIMIT_S, build_server_args, node_args

# Calls that both modes offer under one name: a path of the server, and a method of the tokenizer manager in
# this process. The values are the classes of their requests in SGLang's io_struct.
_REQUESTS = {
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "load_lora_adapter_from_tensors": "LoadLoRAAdapterFromTensorsReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
_END_LIMIT_S = 10.0
_WATCH_S = 0.5
_LOOK_S = 1.0  # interval at which it is looked whether SGLang has received anything


class InProcessBackend(Backend):
    def __init__(self, server_args: dict[str, Any]) -> None:
        self._server_args = server_args
        self._children: list[BaseProcess] = []
        self._progress_s = time.monotonic()  # when the manager received something last

    def start(self) -> None:
        environment.prepare_for(self._server_args)
        self._last_words = LastWords()

        # SGLang would choose a port for its ranks seconds before they listen on it; on a busy machine,
        # another process could take it.
        self.held_port = hold_port("127.0.0.1")
        before = set(multiprocessing.active_children())

        try:
            self._engine = _make_engine({"nccl_port": self.held_port.getsockname()[1], **self._server_args})
        except (
            RuntimeError
        ) as error:  # raised by SGLang when one of its processes ends; their output shows the cause
            self._children = [child for child in multiprocessing.active_children() if child not in before]
            words = self._last_words.read()
            self.stop()
            raise EngineDeadError(f"SGLang did not start: {words or error}") from error

        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self._manager = self._engine.tokenizer_manager

        # SGLang would end this whole process by a signal when one of the engine's processes ends;
        # `dead_process` reports that instead. Only the first node of an engine has a manager.
        if self._manager is not None:
            self._manager._subprocess_watchdog.stop()
        atexit.unregister(self._engine.shutdown)  # kills every child of this process, not only its own
        atexit.register(self.stop)

    async def open(self) -> None:
        self._manager.auto_create_handle_loop()
        self._looking = asyncio.create_task(self._look_for_progress())

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return await anext(self._manager.generate_request(GenerateReqInput(**payload), None))

    async def call(self, endpoint: str, payload: dict[str, Any]) -> None:
        import sglang.srt.managers.io_struct as requests

        method: Callable[[Any], Any] = getattr(self._manager, endpoint)
        answer = await method(getattr(requests, _REQUESTS[endpoint])(**payload))
        # Some methods return success and message instead of raising.
        if isinstance(answer, tuple) and not answer[0]:
            raise CallRefusedError(f"{endpoint}: {answer[1]}")
        if not getattr(answer, "success", True):
            raise CallRefusedError(f"{endpoint}: {answer.error_message}")

    async def flush_cache(self) -> bool:
        return (await self._manager.flush_cache()).success

    async def abort(self, names: Collection[str] | None) -> None:
        if names is None:
            self._manager.abort_request(abort_all=True)
        for name in names or ():
            self._manager.abort_request(rid=name)

    async def _look_for_progress(self) -> None:
        """Record when the manager receives something, until it is canceled."""
        last = None
        while True:
            # SGLang reads the wall clock, which may be set at any time, so only a change of its value counts.
            received = self._manager.last_receive_tstamp
            if received != last:
                last = received
                self._progress_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)

    async def is_responsive(self, limit_s: float) -> bool:
        return time.monotonic() - self._progress_s < limit_s

    def dead_process(self) -> str | None:
        for child in self._children:
            if not child.is_alive():
                return self._last_words.append_to(f"process {child.pid} ended with code {child.exitcode}")
        return None

    def process_ids(self) -> list[int]:
        return [child.pid for child in self._children if child.pid is not None]

    async def close(self) -> None:
        self._looking.cancel()

    def stop(self) -> None:
        atexit.unregister(self.stop)
        # Kill all before waiting for any, so that the waits do not add up.
        for child in self._children:
            child.kill()
        for child in self._children:
            child.join(_END_LIMIT_S)
        self.held_port.close()
        self._last_words.close()


def _make_engine(server_args: dict[str, Any]) -> Any:
    with without_collections():
        from sglang.srt.entrypoints.engine import Engine

        # The arguments are validated when the engine is created, so extend their choices first.
        if server_args["device"] == "cpu":
            from megarl.rollout.sglang import cpu_adaptations

            cpu_adaptations.install_in_arguments()

    class AdaptedEngine(Engine):
        run_scheduler_process_func = staticmethod(processes.run_scheduler)
        run_detokenizer_process_func = staticmethod(processes.run_detokenizer)

    return AdaptedEngine(**server_args)


class SGLangEnginePart(EnginePart):
    """The part of an engine on a node other than its first: schedulers only, which serve no requests.

    The first node's scheduler passes every request of SGLang on to them, also those that pause, load weights
    and release memory. Raises EngineDeadError with SGLang's last output if they do not start.
    """

    def __init__(self, spec: RolloutEngineSpec, node: EngineNode) -> None:
        self._first = FirstNode(node, START_LIMIT_S)
        self._backend = InProcessBackend(build_server_args(spec) | node_args(node, self._first.ranks_port))
        self._loop = LoopThread("sglang", self._backend.start)
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="engine-part", daemon=True).start()

    def _watch(self) -> None:
        """Report the end of a scheduler to the first node, whose own ones may not notice it."""
        while not self._closed.wait(_WATCH_S):
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
