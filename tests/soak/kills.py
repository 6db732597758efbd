"""Kill processes of rollout replicas at random times: no sample may be lost, repeated or changed.

python -m tests.soak.kills --engine fake|hf|sglang --kills 50 --seed 0

A thread kills with SIGKILL a random process of a random replica (its Ray worker, or one that its engine has
started) at random times: during generation, weight sync, and startup. Meanwhile, batches are generated. Each
must equal that of an undisturbed run with the same seeds, and the replicas' checksums must match the weights
that were sent.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from megarl.agents.trajectory import Sample
from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, RolloutEngineKind
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.errors import WorkerError
from megarl.controller.group import is_dead
from megarl.rollout.driver.rollout import Rollout
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import GenerationRequest, RolloutEngine, RolloutEngineSpec, SamplingParameters
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.checksum import checksum
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec, random_weights
from tests.rollout_replicas import started_rollout
from tests.unit.rollout.models import random_model

NUM_REPLICAS = 2
_SPARED_AT_START = 0.7  # otherwise most kills would hit processes that have not yet begun to work
# a repeated sample is batched with others, so its sums are rounded differently
LOG_PROB_TOLERANCE = 1e-4


class Subject(NamedTuple):
    """An engine to kill. `pause_s` is the average time between two kills, on the order of its startup
    time."""

    build_engine: Callable[[], RolloutEngine]
    weights: dict[str, torch.Tensor]
    num_requests: int
    pause_s: float


def make_subject(engine: str, folder: Path) -> Subject:
    if engine == "fake":
        spec = FakeSpec(folder=folder, manifest=MANIFEST, num_processes=2, delay_s=0.1)
        return Subject(
            partial(FakeEngine, spec), random_weights(MANIFEST, seed=0), num_requests=64, pause_s=0.3
        )

    model = random_model()
    model.config.architectures = [type(model).__name__]  # as when saving the whole model; SGLang needs it
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    rollout = RolloutConfig(engine=RolloutEngineKind(engine), max_concurrency=16)
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folder), dtype=DType.float32), rollout=rollout, device=Device.cpu
    )
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    pause_s = 20.0 if engine == "sglang" else 6.0

    return Subject(partial(build_engine, spec), weights, num_requests=256, pause_s=pause_s)


def make_requests(count: int, seed: int) -> list[GenerationRequest]:
    chance = random.Random(seed)
    return [
        GenerationRequest(
            number,
            [chance.randrange(4, 40) for _ in range(chance.randrange(1, 9))],
            SamplingParameters(max_new_tokens=12, seed=chance.randrange(2**31), stop_token_ids=(1, 2, 3)),
        )
        for number in range(count)
    ]


@dataclass
class Killer:
    """Kills until `num_kills` are done. It pauses while `lock` is held."""

    rollout: Rollout
    num_kills: int
    pause_s: float
    chance: random.Random
    lock: threading.Lock = field(default_factory=threading.Lock)
    victims: Counter[str] = field(default_factory=Counter)

    @property
    def is_done(self) -> bool:
        return self.victims.total() >= self.num_kills

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        yield
        thread.join()

    def _run(self) -> None:
        while not self.is_done:
            time.sleep(self.chance.expovariate(1 / self.pause_s))
            with self.lock:
                self.kill_one()

    def kill_one(self) -> None:
        """Kill one process. Does nothing if the replica has no such process, or dies in the meantime."""
        replica = self.chance.choice(self.rollout.replicas)
        if not replica.pids and self.chance.random() < _SPARED_AT_START:
            return

        # it may be starting
        pids = replica.pids or [
            one.activity.location.pid for one in replica.reports() if one.activity is not None
        ]
        try:
            worker = psutil.Process(pids[0])
            # Alternate: on a busy machine, whose workers are often starting and have no children, only these
            # would be hit otherwise.
            wants_child = self.victims.total() % 2 == 1
            victim = self.chance.choice(worker.children(recursive=True)) if wants_child else worker
            name = "the worker" if victim == worker else f"a child ({victim.name()[:20]})"
            os.kill(victim.pid, signal.SIGKILL)
        except (IndexError, psutil.NoSuchProcess, ProcessLookupError):
            return

        self.victims[name] += 1


class Report(NamedTuple):
    num_batches: int
    num_samples: int
    num_checksums: int
    victims: dict[str, int]
    num_restarts: int
    num_resent: int
    seconds: float

    def __str__(self) -> str:
        victims = ", ".join(f"{count} x {name}" for name, count in sorted(self.victims.items()))
        return (
            f"{sum(self.victims.values())} kills ({victims}) in {self.seconds:.0f} s: {self.num_restarts} "
            f"restarts, {self.num_resent} "
            f"requests sent again; {self.num_batches} batches with {self.num_samples} samples, all there "
            f"once and as undisturbed; "
            f"checksums of {self.num_checksums} replicas matched"
        )


def run(engine: str, num_kills: int, seed: int, folder: Path) -> Report:
    """Run the test. Raises AssertionError if a sample or a checksum is wrong. Needs a running Ray."""
    subject = make_subject(engine, folder)
    requests = make_requests(subject.num_requests, seed)
    start_s = time.monotonic()

    with started_rollout(
        subject.build_engine, NUM_REPLICAS, max_concurrency=16, restart_limit=10_000
    ) as rollout:
        rollout.send(subject.weights, 1)
        expected = _by_id(rollout.stream(requests), requests)
        sums = {name: checksum(tensor) for name, tensor in subject.weights.items()}
        killer = Killer(rollout, num_kills, subject.pause_s, random.Random(seed))
        num_batches = num_checksums = 0
        totals: Counter[str] = Counter()
        with killer.at_work():
            while not killer.is_done:
                if num_batches % 3 == 2:  # weights are synced between batches, and kills hit that as well
                    rollout.send(subject.weights, 1 + num_batches)
                _compare(_by_id(rollout.stream(requests), requests), expected)
                num_batches += 1
                with killer.lock:
                    num_checksums += _check_weights(rollout, sums)
                totals.update(
                    {name: int(value) for name, value in rollout.drain_metrics().items() if "num_" in name}
                )
                print(
                    f"batch {num_batches}: {killer.victims.total()} of {num_kills} kills, "
                    f"{time.monotonic() - start_s:.0f} s",
                    flush=True,
                )
        rollout.send(subject.weights, 1 + num_batches)  # detects whoever died last
        num_checksums += _check_weights(rollout, sums)
        totals.update({name: int(value) for name, value in rollout.drain_metrics().items() if "num_" in name})
        return Report(
            num_batches=num_batches,
            num_samples=num_batches * len(requests),
            num_checksums=num_checksums,
            victims=dict(killer.victims),
            num_restarts=totals["rollout/num_restarts"],
            num_resent=totals["rollout/num_resent"],
            seconds=time.monotonic() - start_s,
        )


def _by_id(stream: Iterator[tuple[int, Sample]], requests: list[GenerationRequest]) -> dict[int, Sample]:
    finished = list(stream)
    assert Counter(number for number, _ in finished) == Counter(request.request_id for request in requests)
    return dict(finished)


def _check_weights(rollout: Rollout, expected: dict[str, int]) -> int:
    """Check the live replicas, and return their number; others died after their last sample, or are
    starting."""
    count = 0
    for number, replica in enumerate(rollout.replicas):
        if number in rollout._replicas.starting:
            continue
        try:
            assert replica.call(RolloutWorker.checksums) == expected, number
        except WorkerError as error:
            if not is_dead(error):
                raise
        else:
            count += 1

    return count


def _compare(found: dict[int, Sample], expected: dict[int, Sample]) -> None:
    for request_id, wanted in expected.items():
        got = found[request_id]
        assert (got.token_ids.tolist(), got.finish_reason) == (
            wanted.token_ids.tolist(),
            wanted.finish_reason,
        ), request_id
        torch.testing.assert_close(
            torch.tensor(got.log_probs), torch.tensor(wanted.log_probs), atol=LOG_PROB_TOLERANCE, rtol=0
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["fake", "hf", "sglang"], default="fake")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # one warning per restart
    start_ray(num_cpus=NUM_REPLICAS, object_store_mb=100)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"{arguments.engine}: {run(arguments.engine, arguments.kills, arguments.seed, Path(scratch))}")
    left = shutdown()
    print(f"processes left behind: {left or 'none'}")
