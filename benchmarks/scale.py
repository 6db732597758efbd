"""Measure what a step of a large batch costs the driver: processor time, memory, and the bytes that it sends.

    python -m benchmarks.scale [--parts 64 16 4] [--of grpo ppo]

The batch is a part of 1,024 prompts x 16 samples: prompts of 2,048 tokens, and responses of log-normal
length, on average 8,192 tokens and at most 32,768. Every size runs in its own process, in which the training
loop makes two steps (`PPOTrainer.train_step`, with the real roles, advantages and metrics). The second step
counts: in the first, a virtual machine receives much of its memory from its host, which took fifteen times as
long as using it. The first is shown as well.

Other processes are replaced by stubs: samples and results of workers already exist in shared memory, as in
Ray's object store. Messages are serialized as Ray does it and copied there, into memory that already exists
and is not counted as the driver's (Ray allocates its store once and reuses freed parts). The benchmark
therefore measures only the driver's own work, in processor seconds of one thread, and the increase of its own
memory (RssAnon) without the object store.

sent / needed is the bytes of the messages to each role's replicas, relative to the bytes that it reads (int32
ids, float32 values, and a prompt once for each replica that has a sample of it). The whole batch is
extrapolated linearly from the two largest parts.
"""

from __future__ import annotations

import argparse
import json
import mmap
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.agents.trajectory import Sample, VersionSpan
from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.batch.ragged import RaggedTensor
from megarl.config.load import load_config
from megarl.config.roles import role_named
from megarl.config.schema import MicroBatchConfig, ParallelConfig, PPOConfig
from megarl.controller.futures import RemoteFuture
from megarl.controller.restarts import RestartBudget
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.rewards.judge_servers import JudgeServers
from megarl.rewards.restarted_group import RestartedGroup
from megarl.rewards.role import Reward
from megarl.roles import megatron_role
from megarl.roles.megatron_role import MiniBatchPlan
from megarl.roles.models import ABSENT, Actor, Critic, Scorer
from megarl.roles.start import PPORoles
from megarl.rollout.driver.sample_rows import StepGroups, sample_rows, with_prompts
from megarl.rollout.driver.scheduler import SchedulerTotals
from megarl.trainers.monitor import Position
from megarl.trainers.ppo import PPOTrainer

NUM_PROMPTS = 1024
NUM_SAMPLES = 16
PROMPT_TOKENS = 2048
MEAN_TOKENS = 8192
MOST_TOKENS = 32768
SIGMA = 0.8
STEPS = 2
REPLICAS = 8
MICRO_BATCH_TOKENS = PROMPT_TOKENS + MOST_TOKENS
LARGEST_GB = {"grpo": 4.0, "ppo": 7.0}
LONGEST_S = 10.0
MOST_SENT = 1.1
_CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


class ObjectStore:
    """Shared memory in place of Ray's object store.

    Attributes:
        away_s: Processor time that is not the driver's.
    """

    def __init__(self) -> None:
        self.away_s = 0.0
        self._free: list[mmap.mmap] = []
        self.sent: dict[str, int] = defaultdict(int)
        self.needed: dict[str, int] = defaultdict(int)

    @contextmanager
    def elsewhere(self) -> Generator[None]:
        begin_s = time.process_time()
        before_s = self.away_s
        yield
        self.away_s = before_s + time.process_time() - begin_s  # nested time away is part of it

    def array(self, count: int, dtype: Any) -> np.ndarray:
        """Return existing memory: Ray allocates its store once and reuses what is freed."""
        with self.elsewhere():
            size = max(1, count * np.dtype(dtype).itemsize)
            fits = [memory for memory in self._free if size <= len(memory) <= 2 * size]
            if fits:
                self._free.remove(memory := min(fits, key=len))
            else:
                memory = mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            whole = np.frombuffer(memory, np.uint8)
            weakref.finalize(whole, self._free.append, memory)
            return whole[:size].view(dtype)[:count]

    def send(self, role: str, part: DataProto) -> DataProto:
        """Copy a part into the store and return it as the receiver sees it."""
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
        stored = []

        for buffer in buffers:
            target = self.array(len(buffer.raw()), np.uint8)
            target[:] = np.frombuffer(buffer.raw(), np.uint8)
            stored.append(target)

        with self.elsewhere():
            self.sent[role] += len(stream) + sum(map(len, stored))
            self.needed[role] += _needed(part)
            return pickle.loads(stream, buffers=stored)

    def like(self, column: RaggedTensor) -> RaggedTensor:
        values = torch.from_numpy(self.array(column.num_tokens, np.float32)).fill_(-0.5)
        return RaggedTensor(values, column.lengths.cumsum(0) - column.lengths, column.lengths)


def _needed(part: DataProto) -> int:
    """Return the bytes that a role reads. Masks follow from the lengths, and a shared prompt counts once."""
    total = 0
    for key, column in part.ragged.items():
        if key == "prompts":
            total += 4 * sum(dict(zip(column.starts.tolist(), column.lengths.tolist(), strict=True)).values())
        elif key != "response_mask":
            total += 4 * column.num_tokens

    return total


class Ready(RemoteFuture):
    """A result that already exists."""

    calls = ()

    def __init__(self, result: Any) -> None:
        self._result = result

    def get(self, timeout: float | None = None) -> Any:
        return self._result


class Group:
    """The workers of a role, which take no time."""

    def __init__(self, store: ObjectStore, role: str) -> None:
        self._store = store
        self._role = role

    def call(self, method: Any, parts: Sequence[DataProto] | DataProto, *arguments: Any) -> Ready:
        if isinstance(parts, DataProto):
            return self._scored(self._store.send(self._role, parts))
        return Ready(
            [self._answer(method.name, self._store.send(self._role, part), arguments) for part in parts]
        )

    def _answer(self, method: str, part: DataProto, arguments: Sequence[Any]) -> Any:
        with self._store.elsewhere():
            responses = part.ragged["responses"]
            if method == "values":
                return DataProto.from_dict({"values": self._store.like(responses)})
            scores = DataProto.from_dict({"log_probs": self._store.like(responses)})
            if method == "log_probs":
                return scores.union(
                    DataProto.from_dict({key: self._store.like(responses) for key in arguments[0]})
                )
            metrics = {"loss": Metric.sum(0.0)}
            entropy = DataProto.from_dict({"entropy": self._store.like(responses)})
            return (metrics, scores.union(entropy)) if method == "update_scored" else metrics

    def _scored(self, batch: DataProto) -> Ready:
        with self._store.elsewhere():
            scores = np.random.default_rng(1).integers(0, 2, len(batch)).astype(float)
            tensors = {"score_parts": torch.from_numpy(scores).float()[:, None]}
            return Ready(DataProto.from_dict(tensors, {"score": scores.tolist()}, {"reward/error_rate": 0.0}))


class Generating:
    """The rollout with existing samples, which the real one makes into a batch."""

    def __init__(self, store: ObjectStore, lengths: np.ndarray) -> None:
        self.samples = []
        for length in lengths.tolist():
            ids = store.array(length, np.int32)
            log_probs = store.array(length, np.float32)
            ids[:] = 7
            log_probs[:] = -0.6
            self.samples.append(Sample(ids, log_probs, "stop", (VersionSpan(1, length),)))

    def assemble(self, prompts: DataProto, rows: DataProto, version: int) -> DataProto:
        return with_prompts(prompts, rows, version, pad_token_id=0)

    def drain_metrics(self) -> dict[str, float]:
        return {}

    @property
    def scheduler(self) -> Generating:
        return self

    def totals(self) -> SchedulerTotals:
        return SchedulerTotals([0], 0, 0, [0.0], 0, 0.0, 0.0)


class Weights:
    actor_version = 1

    def await_actor(self) -> None: ...

    def push(self) -> None: ...

    def drain_metrics(self) -> dict[str, float]:
        return {}


class Phases:
    position = Position()

    def phase(self, name: str) -> Any:
        return nullcontext()


def response_lengths(num_rows: int) -> np.ndarray:
    draws = np.random.default_rng(0).lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, num_rows)
    return np.clip(draws, 1, MOST_TOKENS).astype(np.int64)


def make_prompts(num_prompts: int) -> DataProto:
    rows = [np.full(PROMPT_TOKENS, number, np.int32) for number in range(num_prompts)]
    arrays: dict[str, list] = {
        "uid": [str(number) for number in range(num_prompts)],
        "messages": [[]] * num_prompts,
        "data_source": ["sums"] * num_prompts,
        "reward_model": [{"ground_truth": "7"}] * num_prompts,
        "extra_info": [{}] * num_prompts,
    }
    return DataProto.from_dict({"prompts": RaggedTensor.of_rows(rows, torch.int32, on_left=True)}, arrays)


def make_trainer(algorithm: str, store: ObjectStore, lengths: np.ndarray) -> PPOTrainer:
    overrides = [
        f"algorithm={algorithm}",
        f"rollout.n={NUM_SAMPLES}",
        f"data.max_response_length={MOST_TOKENS}",
    ]
    config = load_config(PPOConfig, str(_CONFIG), [*overrides, "tracking.samples_every_steps=0"])
    parallel = ParallelConfig(data_parallel_size=REPLICAS)
    micro_batch = MicroBatchConfig(max_tokens=MICRO_BATCH_TOKENS)
    updates = MiniBatchPlan(updates_per_step=1, epochs_per_batch=1, seed=0)
    reward: Any = Group(store, "reward")
    roles = PPORoles(
        actor=Actor(
            Group(store, "actor"),  # pyrefly: ignore[bad-argument-type]
            parallel,
            micro_batch,
            None,  # pyrefly: ignore[bad-argument-type]
            updates,
            algorithm=config.algorithm,
            share_prompts=True,
        ),
        scorers={
            "reference": Scorer(
                role_named("reference"),
                Group(store, "reference"),  # pyrefly: ignore[bad-argument-type]
                parallel,
                micro_batch,
                share_prompts=True,
            )
        },
        critic=Critic(
            Group(store, "critic"),  # pyrefly: ignore[bad-argument-type]
            parallel,
            micro_batch,
            updates,
            config.algorithm.value_loss,
            share_prompts=True,
        )
        if algorithm == "ppo"
        else ABSENT,
        rollout=Generating(store, lengths),  # pyrefly: ignore[bad-argument-type]
        reward=Reward(RestartedGroup(reward, RestartBudget(0), JudgeServers({}))),
        weights=Weights(),  # pyrefly: ignore[bad-argument-type]
    )

    # The benchmark gives the prompts of each step itself: the loader is not read.
    loader = BatchLoader(Unread(), config.trainer.prompts_per_step, shuffle=False, seed=0)
    return PPOTrainer(config, roles, loader, None, Phases(), None)  # pyrefly: ignore[bad-argument-type]


class Unread:
    """A data set of which nothing is read."""

    identity = RowIdentity("nothing")

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        raise NotImplementedError


class Peak:
    """The peak of this process's own memory in bytes."""

    def __enter__(self) -> Peak:
        self._ended = threading.Event()
        self.before = self.most = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.005):
            self.most = max(self.most, self._now())

    @staticmethod
    def _now() -> int:
        line = next(
            line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
        )
        return int(line.split()[1]) * 1024


def measure(algorithm: str, part: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    num_prompts = NUM_PROMPTS // part
    lengths = response_lengths(num_prompts * NUM_SAMPLES)
    store = ObjectStore()
    trainer = make_trainer(algorithm, store, lengths)
    samples: Any = trainer.roles.rollout
    groups = StepGroups(
        make_prompts(num_prompts),
        DataProto.concat([sample_rows(group) for group in batched(samples.samples, NUM_SAMPLES)]),
        [1] * num_prompts,
        [True] * num_prompts,
    )
    spent_s = []

    with Peak() as peak:
        for step in range(1, STEPS + 1):
            megatron_role._plan.cache_clear()  # samples of different steps have different lengths
            begin_s = time.process_time()
            before_s = store.away_s
            trainer.train_step(groups, step)
            spent_s.append(time.process_time() - begin_s - (store.away_s - before_s))

    return {
        "tokens": int(lengths.sum()),
        "first": spent_s[0],
        "seconds": spent_s[-1],
        "gb": (peak.most - peak.before) / 1e9,
        "sent": {role: store.sent[role] / store.needed[role] for role in store.sent},
    }


def compare(algorithm: str, parts: Sequence[int]) -> list[str]:
    """Print the table and return the limits that are exceeded."""
    missed = []
    results = []
    print(
        f"{algorithm}: {'samples':>9} {'tokens, M':>10} {'driver, s':>10} {'first step':>11} "
        f"{'memory, GB':>11}  sent / needed"
    )

    for part in parts:
        command = [sys.executable, "-m", "benchmarks.scale", "--measure", algorithm, str(part)]
        result = json.loads(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        )
        results.append(result)
        sent = ", ".join(f"{role} {ratio:.3f}" for role, ratio in result["sent"].items())
        size = f"{NUM_PROMPTS * NUM_SAMPLES // part:>{len(algorithm) + 11}} {result['tokens'] / 1e6:>10.1f}"
        print(
            f"{size} {result['seconds']:>10.2f} {result['first']:>11.2f} {result['gb']:>11.2f}  {sent}",
            flush=True,
        )
        missed += [
            f"{algorithm}: bytes to the {role}" for role, ratio in result["sent"].items() if ratio > MOST_SENT
        ]

    if parts[-1] == 1:
        seconds = results[-1]["seconds"]
        size_gb = results[-1]["gb"]
    else:
        (before, last), tokens = results[-2:], int(response_lengths(NUM_PROMPTS * NUM_SAMPLES).sum())
        seconds, size_gb = (
            last[key]
            + (last[key] - before[key]) / (last["tokens"] - before["tokens"]) * (tokens - last["tokens"])
            for key in ("seconds", "gb")
        )

    limits = (("driver, s", seconds, LONGEST_S), ("memory, GB", size_gb, LARGEST_GB[algorithm]))
    for name, value, limit in limits:
        how = "measured" if parts[-1] == 1 else "extrapolated"
        print(f"  the whole batch, {how}: {name} {value:.2f}, {value / limit:.2f} of the limit {limit:g}")
        missed += [f"{algorithm}: {name}"] if value > limit else []

    return missed


def main() -> int:
    """Run the benchmark and return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=int,
        nargs="+",
        default=[64, 16, 4],
        help="parts of the batch, the largest last; 1: all of it (30 GB)",
    )
    parser.add_argument("--of", choices=list(LARGEST_GB), nargs="+", default=list(LARGEST_GB))
    parser.add_argument("--measure", nargs=2, metavar=("ALGORITHM", "PART"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], int(arguments.measure[1]))))
        return 0

    missed = [line for algorithm in arguments.of for line in compare(algorithm, arguments.parts)]
    print(f"limits missed: {', '.join(missed)}" if missed else "no limit is exceeded")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
