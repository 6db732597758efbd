"""Measure SGLang's own loader and a memory copy in SGLang's process, as limits for benchmarks/weights.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_means import messages_seconds

from megarl.controller.worker import register
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.sglang import loader
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.p2p import P2PAddress, P2PGroup
from megarl.weights.tensors import Manifest

_tensors: list[tuple[str, torch.Tensor]] = []  # of the whole model, in the scheduler's process
_copies: list[torch.Tensor] = []
_processor_s: list[float] = []  # of each of megarl's commands so far, in the scheduler's process


class PlanningSeconds(NamedTuple):
    """Processor seconds of planning where tensors go.

    Attributes:
        own: SGLang's own loading of all tensors.
        first: The first plan.
        later: Preparation of a later weight sync with the same tensors.
        after_sleep: The same after the engine has slept.
        checksums: Reading all tensors back.
    """

    own: float
    first: float
    later: float
    after_sleep: float
    checksums: float


def run(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry point, which replaces megarl's loader and adds one command."""
    message = json.loads(bytes(named_tensors[0][1].numpy()))
    if message["command"] == "processor_seconds":
        _answer(message, _processor_s)
        return

    if message["command"] != "own_loading":
        start_s = time.process_time()
        loader.run(model, named_tensors)
        _processor_s.append(time.process_time() - start_s)
        return

    if not _tensors:
        for name, shape in message["arguments"]["shapes"]:
            _tensors.append((name, torch.randn(shape)))
            _copies.append(torch.zeros(shape))

    start_s = time.perf_counter()
    for (_, tensor), copy in zip(_tensors, _copies, strict=True):
        copy.copy_(tensor)
    copied_s = time.perf_counter()
    copied_processor_s = time.process_time()
    model.load_weights(_tensors)
    _answer(
        message,
        [copied_s - start_s, time.perf_counter() - copied_s, time.process_time() - copied_processor_s],
    )


def _answer(message: dict[str, Any], result: list[float]) -> None:
    path = Path(message["answers"]) / f"{message['number']}.{torch.distributed.get_rank()}.json"
    path.write_text(json.dumps({"result": result}))


def build_measured_engine(spec: RolloutEngineSpec) -> Any:
    """Build an engine with `run` as its weight loader."""
    from megarl.rollout.sglang import engine, server_args

    server_args.WEIGHT_LOADER = engine.WEIGHT_LOADER = f"{run.__module__}.{run.__name__}"
    return build_engine(spec)


class MeasuredWorker(RolloutWorker):
    @register()
    def limits(self, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[float, float]:
        """Return the seconds of a copy of all weights' bytes, and of SGLang's own loading of them, both in its process.

        The engine's weights are invalid afterwards.
        """
        engine: Any = self._engine
        with engine._paused():
            [(copy_s, load_s, _)] = engine._loader._ask("own_loading", shapes=shapes)
        return copy_s, load_s

    @register()
    def planning_seconds(self, manifest: Manifest) -> PlanningSeconds:
        engine: Any = self._engine

        def measure(action: Callable[[], object]) -> float:
            """Return the processor seconds of this process and of the commands of `action` in the scheduler's."""
            with engine._paused():
                [before] = engine._loader._ask("processor_seconds")
            start_s = time.process_time()
            action()
            own_s = time.process_time() - start_s
            with engine._paused():
                [after] = engine._loader._ask("processor_seconds")

            return own_s + sum(after[len(before) :])

        def checksums() -> None:
            with engine._paused():
                engine._loader.checksums()

        with engine._paused():
            engine._loader._ask("meet")  # initialization is not part of a plan
            shapes = [(name, meta.shape) for name, meta in manifest.items()]
            [(_, _, own_s)] = engine._loader._ask("own_loading", shapes=shapes)

        first_s = measure(lambda: engine.needed_slices(manifest))
        later_s = measure(lambda: engine.begin_weight_update(manifest))
        engine.sleep()
        engine.wake()
        after_sleep_s = measure(lambda: engine.begin_weight_update(manifest))

        return PlanningSeconds(own_s, first_s, later_s, after_sleep_s, measure(checksums))

    @register()
    def messages_seconds(self, address: P2PAddress, nbytes: int, message_bytes: int) -> float:
        """Measure as rank 1 of a group of two."""
        p2p = P2PGroup.join(address, 1, torch.device("cpu"))
        try:
            return messages_seconds(p2p, 1, nbytes, message_bytes)
        finally:
            p2p.close()
