"""Random kills while generation runs ahead of training: no prompt may be lost or come twice, and no sample may be older than the bound.

python -m tests.soak.ahead_kills --engine fake|hf|sglang --kills 30 --seed 0

As tests/soak/kills.py, with pushes in the middle of samples; every third kill hits a process that scores. The trainer only pushes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OnUpdate, RewardConfig, RewardFunctionConfig, SamplingConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.data.loader import BatchLoader
from megarl.roles.ahead import GenerationAhead
from megarl.roles.groups_ahead import GroupRules
from megarl.roles.reward import Reward
from megarl.rollout.ledger import AdmissionLedger
from megarl.workers.reward import RewardWorker
from tests.integration.tiny_run import save_policy
from tests.rollout_replicas import started_rollout
from tests.soak.kills import NUM_REPLICAS, Killer, make_subject

PROMPTS, SAMPLING, MAX_STALENESS = 4, SamplingConfig(n=4), 2
TRAINING_S = 0.1
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0 + len(solution_str)\n"


class Rows:
    """Prompts of one to eight tokens."""

    fingerprint = "rows"

    def __len__(self) -> int:
        return 10_000

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows([[4 + index % 30] * (1 + index % 8) for index in indices], torch.int32, on_left=True)
        size = len(indices)
        arrays = {"data_source": ["rows"] * size, "reward_model": [{"ground_truth": ""}] * size, "extra_info": [{}] * size}
        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids), **arrays})


@dataclass
class KillerOfBoth(Killer):
    """scoring: the group of the reward."""

    scoring: RoleGroup | None = None

    def _kill_one(self) -> None:
        if self.scoring is None or self.victims.total() % 3 != 2:
            super()._kill_one()
            return
        try:
            os.kill(self.chance.choice(psutil.Process(self.scoring.pids[0]).children()).pid, signal.SIGKILL)
        except (IndexError, psutil.NoSuchProcess, ProcessLookupError):
            return
        self.victims["a process that scores"] += 1


@contextmanager
def started_reward(folder: Path) -> Iterator[Reward]:
    save_policy(folder / "policy")
    (folder / "reward.py").write_text(FUNCTION)
    # A sample whose process is killed scores 0; two, for one of them may be starting.
    config = RewardConfig(functions=[RewardFunctionConfig(path=str(folder / "reward.py"))], max_error_rate=1.0, num_processes=2)
    pool = RayResourcePool([1], use_gpu=False, name="reward")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(RewardWorker, config, str(folder / "policy"), False), role="reward")
    try:
        yield Reward(group)
    finally:
        group.shutdown()
        pool.release()


def run(engine: str, num_kills: int, seed: int, folder: Path) -> str:
    """Raises AssertionError where a prompt or a sample is wrong. Needs a Ray that runs."""
    (folder / "model").mkdir()
    subject, start_s, oldest = make_subject(engine, folder / "model"), time.monotonic(), 0
    with (
        started_reward(folder) as reward,
        started_rollout(subject.build_engine, NUM_REPLICAS, max_concurrency=8, restart_limit=10_000) as rollout,
    ):
        rollout.send(subject.weights, 1)
        loader, expected = (BatchLoader(Rows(), PROMPTS, shuffle=True, seed=seed) for _ in range(2))
        ahead = GenerationAhead(rollout, rollout.weights, loader, reward, GroupRules(SAMPLING), OnUpdate.go_on, _ledger)
        killer = KillerOfBoth(rollout, num_kills, subject.pause_s, random.Random(seed), scoring=reward.group)
        try:
            with killer.at_work():
                for step in itertools.count(1):
                    prompts = next(ahead)
                    batch = ahead.generate(prompts, SAMPLING, step)
                    scores = reward.finish(batch).get().non_tensor_batch["score"]
                    wanted = next(expected).non_tensor_batch["uid"]
                    assert batch.non_tensor_batch["uid"].tolist() == [uid for uid in wanted for _ in range(SAMPLING.n)]
                    assert all(score >= 0 for score in scores)
                    version, versions = rollout.weights.version, batch.ragged["token_versions"].values
                    oldest = max(oldest, version - int(versions.min()))
                    assert version - MAX_STALENESS <= versions.min() <= versions.max() <= version
                    if killer.is_done:
                        break
                    time.sleep(TRAINING_S)
                    rollout.send(subject.weights, version + 1)
        finally:
            ahead.close()
    victims = ", ".join(f"{count} x {name}" for name, count in sorted(killer.victims.items()))
    return f"{num_kills} kills ({victims}) in {time.monotonic() - start_s:.0f} s, {step} steps: each prompt once, in order; oldest {oldest}"


def _ledger(version: int) -> AdmissionLedger:
    return AdmissionLedger(
        max_staleness=MAX_STALENESS,
        prompts_per_step=PROMPTS,
        total_steps=10_000,
        next_step=1,
        version=version,
        step_pushes=lambda step: True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["fake", "hf", "sglang"], default="fake")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a warning for each restart
    start_ray(num_cpus=NUM_REPLICAS + 1, object_store_mb=100)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"{arguments.engine}: {run(arguments.engine, arguments.kills, arguments.seed, Path(scratch))}")
    left = shutdown()
    print(f"processes left behind: {left or 'none'}")
