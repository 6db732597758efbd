"""Engine in a Ray actor, for tests. Imports no transformers: in that process SGLang must come first."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayTaskError

from megarl.rollout.interface import EndedRequest, GenerationRequest, RolloutEngine, RolloutEngineSpec
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import Manifest
from megarl.weights.transports.interface import EngineLink


class EngineHolder:
    """Ray actor with an engine."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self._engine = SGLangEngine(spec)

    def call(self, name: str, arguments: Sequence[Any]) -> Any:
        attribute = attrgetter(name)(self._engine)
        return attribute(*arguments) if callable(attribute) else attribute

    def set_wall_clock(self, seconds: float) -> None:
        """Let SGLang in this process read a wall clock that stands still."""
        from sglang.srt.managers import tokenizer_manager

        tokenizer_manager.real_time = lambda: seconds

    def is_responsive(self, limit_s: float) -> bool:
        return asyncio.run(self._engine.backend.is_responsive(limit_s))


class RemoteEngine(RolloutEngine):
    """Client of an engine in a Ray actor. Its errors are raised here."""

    def __init__(self, spec: RolloutEngineSpec) -> None:
        self.actor = ray.remote(num_cpus=1)(EngineHolder).remote(spec)
        self.ask("process_ids")

    def ask(self, name: str, *arguments: Any) -> Any:
        try:
            return ray.get(self.actor.call.remote(name, arguments))
        except RayTaskError as error:
            raise error.cause from None

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.ask("submit", requests)

    def collect(self, wait_s: float) -> list[EndedRequest]:
        return self.ask("collect", wait_s)

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self.ask("abort", request_ids)

    def interrupt(self) -> None:
        """Has no effect here: the actor runs one call after the other."""

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        return self.ask("needed_slices", manifest)

    def join_weights(self, links: Sequence[EngineLink]) -> None:
        self.ask("join_weights", links)

    def leave_weights(self) -> None:
        self.ask("leave_weights")

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        self.ask("begin_weight_update", manifest, first_round)

    def receive_weights(self, folder: str | None = None) -> None:
        self.ask("receive_weights", folder)

    def load_folder(self, folder: Path) -> None:
        self.ask("load_folder", folder)

    def end_weight_update(self, version: int) -> None:
        self.ask("end_weight_update", version)

    def checksums(self) -> dict[str, int]:
        return self.ask("checksums")

    def sleep(self) -> None:
        self.ask("sleep")

    def wake(self) -> None:
        self.ask("wake")

    def wake_cache(self) -> None:
        self.ask("wake_cache")

    @property
    def weight_version(self) -> int | None:
        return self.ask("weight_version")

    def process_ids(self) -> list[int]:
        return self.ask("process_ids")

    def close(self) -> None:
        self.ask("close")
        ray.kill(self.actor)
