"""Inference engine without a model: real weights, samples computed from them by a hash, and faults on
demand."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.machine.errors import EngineDeadError
from megarl.rehearse.simulation.engines import FinishReason, SimulatedGeneration
from megarl.rollout.interface import (
    EndedRequest,
    EngineLifecycle,
    GenerationRequest,
    LifecycleState,
    RolloutEngine,
    check_request,
)
from megarl.weights.checkpoint_index import read_checkpoint_index
from megarl.weights.checksum import checksum
from megarl.weights.manifest import manifest_of_folder
from megarl.weights.plan import TensorSlices, whole_slices
from megarl.weights.safetensors_file import OpenFiles
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError
from megarl.weights.transports.interface import EngineLink, WeightReceiver

MANIFEST: Manifest = {
    "embedding": TensorMeta((40, 8), torch.float32),
    "norm": TensorMeta((8,), torch.float32),
}
LAST_WORDS = "these are the fake engine's last words"


class What(Enum):
    die = "die"  # report that the engine is dead
    raise_error = "raise_error"  # an error that no restart can fix
    hang = "hang"
    kill_process = "kill_process"  # its own process, which is the worker's
    kill_child = "kill_child"  # a process that it started
    lie_checksum = "lie_checksum"
    lie_doubled = "lie_doubled"
    lie_lost = "lie_lost"
    lie_unknown = "lie_unknown"
    lie_version = "lie_version"
    lie_too_long = "lie_too_long"
    lie_log_probs = "lie_log_probs"


class Misdeed(NamedTuple):
    """Fault `what` at the `call`-th call (from 1) of `method`, by the first engine that gets there, once."""

    method: str
    call: int
    what: What


@dataclass(frozen=True, kw_only=True)
class FakeSpec:
    """Specification of a fake engine.

    Attributes:
        folder: Folder of the record of calls, shared by all replicas.
        samples_per_collect: Speed of the engine, with delay_s.
        num_processes: Number of processes that it starts.
    """

    folder: Path
    manifest: Manifest
    vocab_size: int = 40
    max_length: int = 64
    max_concurrency: int = 64
    samples_per_collect: int = 4
    delay_s: float = 0.0
    num_processes: int = 0
    end_token_ids: tuple[int, ...] = ()
    script: tuple[Misdeed, ...] = ()


def recorded_calls(folder: Path) -> list[dict[str, Any]]:
    """Return `pid`, `method` and `detail` of all calls of all engines, in order."""
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def plain_sample(token_ids: list[int], log_probs: list[float], reason: FinishReason, version: int) -> Sample:
    """Return a sample written by a single version of the weights."""
    return _written(token_ids, log_probs, reason)._replace(spans=(VersionSpan(version, len(token_ids)),))


def random_weights(manifest: Manifest, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(meta.shape, generator=generator).to(meta.dtype) for name, meta in manifest.items()
    }


class FakeEngine(RolloutEngine):
    def __init__(self, spec: FakeSpec) -> None:
        self._spec = spec
        self._counts: Counter[str] = Counter()
        self._weights = {
            name: torch.zeros(meta.shape, dtype=meta.dtype) for name, meta in spec.manifest.items()
        }
        self._lifecycle = EngineLifecycle()
        self._receiver = WeightReceiver(torch.device("cpu"))
        self._generation = SimulatedGeneration(
            now_s=lambda: 0.0, length_of=_most_tokens, write=self._write, token_s=0.0
        )
        self._children = [subprocess.Popen(["sleep", "1000"]) for _ in range(spec.num_processes)]
        self._record("__init__")

    def _record(self, method: str, detail: object = None) -> What | None:
        """Record a call, and return the fault that the script requests now."""
        self._counts[method] += 1
        line = json.dumps({"pid": os.getpid(), "method": method, "detail": detail}) + "\n"
        descriptor = os.open(self._spec.folder / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

        for number, misdeed in enumerate(self._spec.script):
            if misdeed.method == method and misdeed.call <= self._counts[method] and self._claim(number):
                return self._do(misdeed.what)

        return None

    def _claim(self, number: int) -> bool:
        try:
            (self._spec.folder / f"misdeed_{number}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _do(self, what: What) -> What | None:
        if what is What.die:
            raise EngineDeadError(LAST_WORDS)
        if what is What.raise_error:
            raise KeyError("no such layer")
        if what is What.hang:
            time.sleep(10_000)

        if what is What.kill_process:
            print(LAST_WORDS, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        if what is What.kill_child:
            self._children[0].kill()
            self._children[0].wait()

        return what

    def _check_children(self) -> None:
        ended = [child.pid for child in self._children if child.poll() is not None]
        if ended:
            raise EngineDeadError(f"{LAST_WORDS}: the processes {ended} have ended")

    # ---- generation

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._lifecycle.require_ready()
        self._check_children()
        self._record("submit", [request.request_id for request in requests])
        for request in requests:
            check_request(request, self._spec.vocab_size, self._spec.max_length)
        self._generation.submit(requests)

    def collect(self, wait_s: float) -> Sequence[EndedRequest]:
        self._lifecycle.require_ready()
        self._check_children()
        lie = self._record("collect")
        time.sleep(self._spec.delay_s)
        ended = self._generation.collect(self._spec.samples_per_collect)
        finished = [(number, _drafted(sample)) for number, sample in ended if isinstance(sample, Sample)]

        return finished if lie is None or not finished else _falsified(finished, lie)

    def _write(self, request: GenerationRequest, most: int) -> Sample:
        """Return tokens that depend on the prompt, the seed and the weights."""
        sampling = request.sampling
        stops = set() if sampling.ignore_eos else {*sampling.stop_token_ids, *self._spec.end_token_ids}
        seed = sampling.seed if sampling.temperature else None
        numbers = _numbers(
            repr((request.prompt, seed, float(sampling.temperature), sorted(self._checksums().items())))
        )
        tokens: list[int] = []
        log_probs: list[float] = []

        while len(tokens) < most:
            token = next(numbers) % self._spec.vocab_size
            if token in stops and len(tokens) < sampling.min_new_tokens:
                continue
            tokens.append(token)
            log_probs.append(-(next(numbers) % 1000) / 256)
            if token in stops:
                return _written(tokens, log_probs, "stop")

        return _written(tokens, log_probs, "length")

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self._record("abort", None if request_ids is None else sorted(request_ids))
        self._generation.abort(request_ids)

    def interrupt(self) -> None:
        self._record("interrupt")

    # ---- weights

    @property
    def weight_version(self) -> int | None:
        return self._lifecycle.weight_version

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        self._record("needed_slices")
        if dict(manifest) != dict(self._spec.manifest):
            differing = sorted(
                name
                for name in {*manifest, *self._spec.manifest}
                if manifest.get(name) != self._spec.manifest.get(name)
            )
            raise WeightTransferError(
                f"{len(differing)} tensors do not fit the engine's model: {', '.join(differing)}"
            )

        return [self._slices]

    @property
    def _slices(self) -> TensorSlices:
        return whole_slices({name: tuple(tensor.shape) for name, tensor in self._weights.items()})

    def join_weights(self, links: Sequence[EngineLink]) -> None:
        self._record("join_weights")
        (link,) = links
        self._receiver.join(
            link, self._slices, lambda part: [self._weights[part.name][part.tensor_slice.index]]
        )

    def leave_weights(self) -> None:
        self._record("leave_weights")
        self._receiver.leave()

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        self.needed_slices(manifest)
        self._record("begin_weight_update")
        self._lifecycle.begin(manifest, is_partial=first_round > 0)
        self._first_round = first_round

    def receive_weights(self, folder: str | None = None) -> None:
        self._record("receive_weights")
        self._lifecycle.require_update()
        self._receiver.begin(first_round=self._first_round, folder=folder)
        while not self._receiver.receive():
            pass
        self._lifecycle.complete()

    def load_folder(self, folder: Path) -> None:
        self._record("load_folder")
        self._lifecycle.record(manifest_of_folder(folder))
        with OpenFiles() as files:
            for name, stored in read_checkpoint_index(folder).items():
                self._weights[name].copy_(files[stored.file].get_tensor(name))

    def end_weight_update(self, version: int) -> None:
        self._record("end_weight_update", version)
        self._lifecycle.end(version)
        self._generation.update(version)

    def checksums(self) -> dict[str, int]:
        self._lifecycle.require_ready()
        lie = self._record("checksums")
        sums = self._checksums()
        return {
            name: value + (lie is What.lie_checksum and name == min(sums)) for name, value in sums.items()
        }

    def _checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self._weights.items()}

    # ---- memory and shutdown

    def sleep(self) -> None:
        self._record("sleep")
        self._lifecycle.require(
            "sleep",
            LifecycleState.EMPTY,
            LifecycleState.UPDATING,
            LifecycleState.READY,
            LifecycleState.ASLEEP,
        )
        self._generation.abort()
        self._lifecycle.leave(LifecycleState.ASLEEP)

    def wake(self) -> None:
        self._record("wake")
        if self._lifecycle.must_wake():
            self._lifecycle.leave(LifecycleState.EMPTY)

    def wake_cache(self) -> None:
        self._record("wake_cache")

    def process_ids(self) -> list[int]:
        return [child.pid for child in self._children]

    def close(self) -> None:
        self._record("close")
        for child in self._children:
            child.kill()
            child.wait()
        self._lifecycle.leave(LifecycleState.CLOSED)


def _most_tokens(request: GenerationRequest) -> int:
    return request.sampling.max_new_tokens


def _drafted(sample: Sample) -> Sample:
    """Return a sample as if drafts gave two tokens at a time."""
    return sample._replace(num_verifications=-(-len(sample.token_ids) // 2))


def _written(token_ids: list[int], log_probs: list[float], reason: FinishReason) -> Sample:
    return Sample(
        np.array(token_ids, dtype=np.int32), np.array(log_probs, dtype=np.float32), reason, spans=()
    )


def _numbers(text: str) -> Iterator[int]:
    """Yield an endless sequence, which is the same for the same text."""
    for number in range(2**63):
        yield int.from_bytes(hashlib.blake2b(f"{number} {text}".encode(), digest_size=6).digest(), "little")


def _falsified(finished: list[tuple[int, Sample]], lie: What) -> list[tuple[int, Sample]]:
    first, *others = finished
    number, sample = first
    count = 100 * len(sample.token_ids)
    if lie is What.lie_doubled:
        return [first, *finished]
    if lie is What.lie_lost:
        return others
    if lie is What.lie_unknown:
        return [(10**9, sample), *others]
    changed = {
        What.lie_version: sample._replace(spans=(VersionSpan(sample.spans[0].version - 1, 1), *sample.spans)),
        What.lie_too_long: sample._replace(
            token_ids=np.tile(sample.token_ids, 100),
            log_probs=np.tile(sample.log_probs, 100),
            spans=(sample.spans[0]._replace(end=count),),
        ),
        What.lie_log_probs: sample._replace(log_probs=sample.log_probs[1:]),
    }

    return [(number, changed[lie]), *others] if lie in changed else finished
