"""Run the schedule of asynchronous training with real Ray processes that sleep, compared with virtual time.

python -m benchmarks.sleeping_rollout [--steps 8]

Engines sleep for as long as their samples take, and so does the trainer. Sleeping takes no processor time, so
any machine will do.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from math import ceil, exp
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OnUpdate, SamplingConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.resource_pool import RayResourcePool
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.rehearse.simulation.run import Script, SimulatedRun, Simulation
from megarl.roles.offload_schedule import OffloadSchedule
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import FolderWeights, RolloutWeights
from megarl.rollout.driver.sample_rows import GroupRules
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.interface import EndedRequest, GenerationRequest, RolloutEngine
from megarl.rollout.staleness import StalenessController
from megarl.weights.checkpoint_index import SINGLE_FILE
from megarl.weights.plan import TensorSlices
from megarl.weights.tensors import Manifest
from megarl.weights.transports.interface import EngineLink

PROMPTS = 8
SAMPLES = 8
ENGINES = 2
SLOTS = 8  # per engine
TOKEN_S = 0.002
PUSH_S = 0.1
# The distribution of benchmarks/async_rollout.py, with a lower limit
MEDIAN = 200
LONGEST = 2000
SIGMA = 1.0
WITHIN_PROMPT = 0.7
SAMPLING = SamplingConfig(n=SAMPLES)
SCHEDULES = ((0, OnUpdate.continue_), (1, OnUpdate.drain), (1, OnUpdate.continue_), (2, OnUpdate.continue_))


def length_of(request: GenerationRequest) -> int:
    """Return the tokens of a sample: log-normal, drawn from the number of its prompt and its seed."""
    of_prompt, own = (
        np.random.default_rng(seed).normal() for seed in (request.prompt[0], request.sampling.seed)
    )
    spread = WITHIN_PROMPT**0.5 * of_prompt + (1 - WITHIN_PROMPT) ** 0.5 * own
    return max(1, min(LONGEST, round(MEDIAN * exp(SIGMA * spread))))


class _Writing(NamedTuple):
    length: int
    end_s: float
    spans: tuple[VersionSpan, ...]  # by older weights


class SleepingEngine(RolloutEngine):
    """An engine that generates a token of each sample in the same time, and pauses during a weight sync."""

    def __init__(self) -> None:
        self._writing: dict[int, _Writing] = {}
        self._version: int | None = None
        self._update_s = 0.0
        self._word = threading.Event()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        now_s = time.monotonic()
        for request in requests:
            length = length_of(request)
            self._writing[request.request_id] = _Writing(length, now_s + length * TOKEN_S, ())

    def collect(self, wait_s: float) -> list[EndedRequest]:
        first_s = min((one.end_s for one in self._writing.values()), default=float("inf"))
        self._word.wait(max(0.0, min(wait_s, first_s - time.monotonic())))
        self._word.clear()
        now_s = time.monotonic()
        ended = [number for number, one in self._writing.items() if one.end_s <= now_s]
        return [(number, self._sample(self._writing.pop(number))) for number in ended]

    def _sample(self, one: _Writing) -> Sample:
        assert self._version is not None
        spans = (*one.spans, VersionSpan(self._version, one.length))
        return Sample(
            np.full(one.length, 5, dtype=np.int32),
            np.full(one.length, -1.0, dtype=np.float32),
            "length",
            spans,
        )

    def interrupt(self) -> None:
        self._word.set()

    def abort(self, request_ids: Collection[int] | None = None) -> None:
        self._writing = {
            number: one
            for number, one in self._writing.items()
            if request_ids is not None and number not in request_ids
        }

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        self._update_s = time.monotonic()

    def load_folder(self, folder: Path) -> None:
        time.sleep(PUSH_S)

    def end_weight_update(self, version: int) -> None:
        pause_s = time.monotonic() - self._update_s
        for number, one in self._writing.items():
            written = min(one.length - 1, one.length - ceil((one.end_s - self._update_s) / TOKEN_S))
            spans = one.spans
            if self._version is not None and written > (spans[-1].end if spans else 0):
                spans = (*spans, VersionSpan(self._version, written))
            self._writing[number] = one._replace(end_s=one.end_s + pause_s, spans=spans)

        self._version = version

    @property
    def weight_version(self) -> int | None:
        return self._version

    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        return [{}]

    def join_weights(self, links: Sequence[EngineLink]) -> None: ...

    def leave_weights(self) -> None: ...

    def receive_weights(self, folder: str | None = None) -> None: ...

    def checksums(self) -> dict[str, int]:
        return {}

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def wake_cache(self) -> None: ...

    def process_ids(self) -> list[int]:
        return []

    def close(self) -> None: ...


class _Rows:
    identity = RowIdentity("numbers")

    def __len__(self) -> int:
        return 10_000

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows([[index] for index in indices], torch.int32, on_left=True)
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids)})


class _Unscored:
    """A reward that gives no scores."""

    may_begin = False
    scores_rounds = False

    def begin(self, groups: DataProto) -> None: ...

    def scored(self) -> dict[str, list[float]]:
        return {}

    def score_round(self, groups: DataProto) -> dict[str, list[float]]:
        return {}


class Real(NamedTuple):
    """The outcome of a run with real processes.

    Attributes:
        lengths: Of the samples of each prompt.
    """

    step_s: float
    waiting: float
    lengths: list[list[int]]


@contextmanager
def _rollout() -> Generator[tuple[Rollout, RolloutWeights]]:
    pool = RayResourcePool([ENGINES], use_gpu=False, name="rollout")
    replicas = Replicas(
        [ReplicaPlace(part) for part in pool.split()], SleepingEngine, restart_limit=0, phase_time_limit_s=600
    )
    folder = tempfile.TemporaryDirectory(prefix="megarl-sleeping-")
    save_file({"weight": torch.zeros(1)}, Path(folder.name) / SINGLE_FILE)
    weights = RolloutWeights(FolderWeights(Path(folder.name)), replicas, OffloadSchedule())
    scheduler = RequestScheduler(
        replicas,
        weights.readmit,
        max_concurrency=SLOTS,
        answer_limit_s=600,
        sample_limit_s=600,
        can_readmit=weights.can_readmit,
    )
    rules = TokenRules(pad_token_id=0, stop_token_ids=(), max_response_length=LONGEST)

    try:
        yield Rollout(scheduler, weights, rules, seed=0), weights
    finally:
        replicas.shutdown()
        pool.release()
        folder.cleanup()


def run(
    rollout: Rollout,
    weights: RolloutWeights,
    steps: int,
    training_s: float,
    max_staleness: int,
    on_update: OnUpdate,
) -> Real:
    """Run the trainer's loop, with sleep instead of the roles that train."""
    loader = BatchLoader(_Rows(), PROMPTS, shuffle=False, seed=0)
    buffered = _buffered(rollout, weights, loader, steps, max_staleness, on_update)
    weights.push()
    waiting_s = 0.0
    lengths = []
    start_s = time.monotonic()

    for step in range(1, steps + 1):
        asked_s = time.monotonic()
        batch = buffered.generate(next(buffered), SAMPLING, step)
        waiting_s += time.monotonic() - asked_s
        lengths += batch.ragged["responses"].lengths.view(PROMPTS, SAMPLES).tolist()
        time.sleep(training_s)
        weights.push()

    seconds = time.monotonic() - start_s
    buffered.close()
    return Real(seconds / steps, waiting_s / seconds, lengths)


def _buffered(
    rollout: Rollout,
    weights: RolloutWeights,
    loader: BatchLoader,
    steps: int,
    max_staleness: int,
    on_update: OnUpdate,
) -> StepRollout:
    make_staleness: Callable[[int], StalenessController] = partial(
        lambda version: StalenessController(
            max_staleness=max_staleness,
            prompts_per_step=PROMPTS,
            total_steps=steps,
            next_step=1,
            version=version,
            step_pushes=lambda step: True,
        )
    )
    return StepRollout(rollout, weights, loader, _Unscored(), GroupRules(SAMPLING), on_update, make_staleness)


def virtual(
    lengths: list[list[int]], steps: int, training_s: float, max_staleness: int, on_update: OnUpdate
) -> SimulatedRun:
    script = Script(
        lengths=lengths,
        prompts_per_step=PROMPTS,
        total_steps=steps,
        max_staleness=max_staleness,
        on_update=on_update,
        num_engines=ENGINES,
        slots=SLOTS,
        token_s=TOKEN_S,
        training_s=training_s,
        push_s=PUSH_S,
    )
    return Simulation(script).run()


def main(steps: int) -> None:
    start_ray(num_cpus=ENGINES)
    try:
        with _rollout() as (rollout, weights):
            _compare(rollout, weights, steps)
    finally:
        shutdown()


def _compare(rollout: Rollout, weights: RolloutWeights, steps: int) -> None:
    first = run(rollout, weights, steps, 0.0, 0, OnUpdate.continue_)
    tokens = sum(map(sum, first.lengths))
    training_s = (
        tokens / steps / (ENGINES * SLOTS) * TOKEN_S
    )  # as long as all slots need if they are always in use
    mean = tokens / steps / PROMPTS / SAMPLES
    print(
        f"{steps} steps of {PROMPTS} x {SAMPLES} samples, {mean:.0f} tokens each; training {training_s:.2f} s"
    )
    print(
        "max_staleness  on_update   step, s: real   virtual   apart   steps per time: real   virtual   "
        "trainer waits: real   virtual"
    )
    synchronous: tuple[float, float] | None = None

    for max_staleness, on_update in SCHEDULES:
        real = run(rollout, weights, steps, training_s, max_staleness, on_update)
        assert real.lengths == first.lengths, "other samples were trained, or in a different order"
        simulated = virtual(real.lengths, steps, training_s, max_staleness, on_update)
        synchronous = synchronous or (real.step_s, simulated.step_s)
        update = on_update.value if max_staleness else "-"
        times = f"{real.step_s:13.2f}  {simulated.step_s:8.2f}  {real.step_s / simulated.step_s - 1:6.1%}"
        gains = f"{synchronous[0] / real.step_s:19.2f}x  {synchronous[1] / simulated.step_s:7.2f}x"
        print(
            f"{max_staleness:13}  {update:9}  {times}  {gains}  {real.waiting:18.0%}  "
            f"{simulated.waiting:8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="of each schedule")
    main(parser.parse_args().steps)
