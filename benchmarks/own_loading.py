"""SGLang's side of benchmarks/weights.py: what its own loader and a copy of memory take in its own process, as limits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from own_means import messages_seconds

from megarl.controller.worker import register
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.sglang import loader
from megarl.weights.wire import Wire, WireAddress
from megarl.workers.engines import build_engine
from megarl.workers.rollout_worker import RolloutWorker

_tensors: list[tuple[str, torch.Tensor]] = []  # of the whole model, in the scheduler's process
_copies: list[torch.Tensor] = []


def run(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's entry, in the place of megarl's loader: one more command."""
    message = json.loads(bytes(named_tensors[0][1].numpy()))
    if message["command"] != "own_loading":
        loader.run(model, named_tensors)
        return
    if not _tensors:
        for name, shape in message["arguments"]["shapes"]:
            _tensors.append((name, torch.randn(shape)))
            _copies.append(torch.zeros(shape))
    start_s = time.perf_counter()
    for (_, tensor), copy in zip(_tensors, _copies, strict=True):
        copy.copy_(tensor)
    copied_s = time.perf_counter()
    model.load_weights(_tensors)
    answer = {"result": [copied_s - start_s, time.perf_counter() - copied_s]}
    (Path(message["answers"]) / f"{message['number']}.{torch.distributed.get_rank()}.json").write_text(json.dumps(answer))


def build_measured_engine(spec: RolloutEngineSpec) -> Any:
    """With `run` as weight loader."""
    from megarl.rollout.sglang import engine, server_args

    server_args.WEIGHT_LOADER = engine.WEIGHT_LOADER = f"{run.__module__}.{run.__name__}"
    return build_engine(spec)


class MeasuredWorker(RolloutWorker):
    @register()
    def limits(self, shapes: list[tuple[str, tuple[int, ...]]]) -> tuple[float, float]:
        """Seconds of a copy of all weights' bytes, and of SGLang's own loading of them, both in its process. Its weights are void
        afterwards."""
        engine: Any = self._engine
        with engine._paused():
            [(copy_s, load_s)] = engine._loader._ask("own_loading", shapes=shapes)
        return copy_s, load_s

    @register()
    def messages_seconds(self, address: WireAddress, nbytes: int, message_bytes: int) -> float:
        """As rank 1 of a group of two."""
        wire = Wire.join(address, 1, torch.device("cpu"))
        try:
            return messages_seconds(wire, 1, nbytes, message_bytes)
        finally:
            wire.close()
