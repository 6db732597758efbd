"""Kill random processes while generation runs ahead of training: no prompt may be lost or repeated, and no
sample may be too old.

python -m tests.soak.async_kills --engine fake|hf|sglang --kills 30 --seed 0

Like tests/soak/kills.py, with weight syncs in the middle of samples. The victims alternate between a replica,
a scoring process, and the driver. The driver is restarted with one replica more or less, and resumes from
what it saved after its last step. The trainer only syncs weights.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OnUpdate, RewardConfig, RewardFunctionConfig, SamplingConfig
from megarl.controller.cluster import shutdown, start_ray
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.restarts import RestartBudget
from megarl.controller.worker import RayClassWithInitArgs
from megarl.data.loader import BatchLoader
from megarl.data.tables import RowIdentity
from megarl.machine.files import write_whole
from megarl.rewards.judge_servers import JudgeServers
from megarl.rewards.restarted_group import RestartedGroup
from megarl.rewards.reward_worker import RewardWorker
from megarl.rewards.role import Reward
from megarl.rollout.driver.sample_rows import GroupRules, from_bytes, to_bytes
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.rollout.staleness import StalenessController
from tests.command import Command
from tests.integration.tiny_run import save_policy
from tests.processes import gone_within
from tests.rollout_replicas import StartedRollout, started_rollout
from tests.soak.kills import NUM_REPLICAS, Killer, make_subject

PROMPTS = 4
SAMPLING = SamplingConfig(n=4)
MAX_STALENESS = 2
TRAINING_S = 0.1
SHORTEST_PAUSE_S = 1.0  # between two kills, on average, so that a driver makes steps
LIFE_S = 600.0  # limit for a driver, on a busy machine, to see three kills, the last of which is its own
GONE_S = 30.0
FUNCTION = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0 + "
    "len(solution_str)\n"
)


class Rows:
    """Data set of prompts of one to eight tokens."""

    identity = RowIdentity("rows")

    def __len__(self) -> int:
        return 10_000

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        prompts = RaggedTensor.of_rows(
            [[4 + index % 30] * (1 + index % 8) for index in indices], torch.int32, on_left=True
        )
        size = len(indices)
        arrays = {
            "data_source": ["rows"] * size,
            "reward_model": [{"ground_truth": ""}] * size,
            "extra_info": [{}] * size,
        }

        return DataProto.from_dict({"prompts": prompts}, {"uid": list(uids), **arrays})


@dataclass
class KillerOfAll(Killer):
    """Killer of replicas, scoring processes and the driver.

    Args:
        scoring: Group of the reward.
        victims_file: Keeps the victims for the next driver.
    """

    scoring: RoleGroup | None = None
    victims_file: Path | None = None

    def kill_one(self) -> None:
        assert self.scoring is not None
        assert self.victims_file is not None
        before = self.victims.total()

        if before % 3 == 0:
            super().kill_one()
        elif before % 3 == 1:
            try:
                os.kill(
                    self.chance.choice(psutil.Process(self.scoring.pids[0]).children()).pid, signal.SIGKILL
                )
            except (IndexError, psutil.NoSuchProcess, ProcessLookupError):
                return
            self.victims["a process that scores"] += 1
        else:
            self.victims["the driver"] += 1

        write_whole(self.victims_file, json.dumps(self.victims))
        if before % 3 == 2:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def started_reward(folder: Path) -> Iterator[Reward]:
    save_policy(folder / "policy")
    (folder / "reward.py").write_text(FUNCTION)

    # A sample whose process is killed scores 0. Kill two, because one of them may be starting.
    config = RewardConfig(
        functions=[RewardFunctionConfig(path=str(folder / "reward.py"))], max_error_rate=1.0, num_processes=2
    )
    pool = RayResourcePool([1], use_gpu=False, name="reward")
    group = RayWorkerGroup(
        pool, RayClassWithInitArgs(RewardWorker, config, str(folder / "policy"), False), role="reward"
    )

    try:
        yield Reward(RestartedGroup(group, RestartBudget(0), JudgeServers({})))
    finally:
        group.shutdown()
        pool.release()


class RunFolder:
    """Files that a driver leaves for the next one and for the final check: the steps, and what the last of
    them saved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.victims_file = path / "victims.json"
        self._steps = path / "steps.jsonl"
        self._saved = path / "saved.json"

    def victims(self) -> Counter[str]:
        return Counter(json.loads(self.victims_file.read_text()) if self.victims_file.exists() else {})

    def trained(self, step: int, uids: list[str], oldest: int) -> None:
        with self._steps.open("a") as file:
            file.write(json.dumps({"step": step, "uids": uids, "oldest": oldest}) + "\n")

    def save(self, step: int, version: int, async_rollout: StepRollout) -> None:
        groups = async_rollout.finished_groups()
        samples = base64.b64encode(to_bytes(groups)).decode() if groups else None
        write_whole(
            self._saved,
            json.dumps(
                {"step": step, "version": version, "data": async_rollout.state_dict(), "samples": samples}
            ),
        )

    def restore(self, async_rollout: StepRollout, saved: dict[str, Any]) -> None:
        async_rollout.load_state_dict(saved["data"])
        if saved["samples"]:
            async_rollout.restore(from_bytes(base64.b64decode(saved["samples"])))

    def saved(self) -> dict[str, Any] | None:
        return json.loads(self._saved.read_text()) if self._saved.exists() else None

    def steps(self) -> dict[int, dict[str, Any]]:
        """Return the steps. Steps trained after the last save of a killed driver were repeated by the next
        one, which counts."""
        lines = [json.loads(line) for line in self._steps.read_text().splitlines()]
        return {line["step"]: line for line in lines}


def drive(engine: str, num_kills: int, seed: int, folder: RunFolder) -> None:
    """Run one driver. Raises AssertionError if a sample is wrong. Needs a running Ray."""
    (folder.path / "model").mkdir(exist_ok=True)
    subject = make_subject(engine, folder.path / "model")
    victims = folder.victims()
    num_replicas = NUM_REPLICAS + victims["the driver"] % 2

    with (
        started_reward(folder.path) as reward,
        started_rollout(
            subject.build_engine, num_replicas, max_concurrency=8, restart_limit=10_000
        ) as rollout,
    ):
        saved = folder.saved() or {"step": 0, "version": 1}
        rollout.send(subject.weights, saved["version"])
        loader = BatchLoader(Rows(), PROMPTS, shuffle=True, seed=seed)
        ledger_after = saved["step"]
        async_rollout = StepRollout(
            rollout,
            rollout.weights,
            loader,
            reward,
            GroupRules(SAMPLING),
            OnUpdate.continue_,
            lambda version: _staleness(version, ledger_after),
        )
        if saved["step"]:
            folder.restore(async_rollout, saved)
        chance = random.Random(f"{seed} {victims.total()}")
        killer = KillerOfAll(
            rollout,
            num_kills,
            max(subject.pause_s, SHORTEST_PAUSE_S),
            chance,
            victims=victims,
            scoring=reward.group,
            victims_file=folder.victims_file,
        )
        try:
            with killer.at_work():
                _train(subject.weights, rollout, async_rollout, reward, killer, folder, saved["step"])
        finally:
            async_rollout.close()


def _train(
    weights: dict[str, torch.Tensor],
    rollout: StartedRollout,
    async_rollout: StepRollout,
    reward: Reward,
    killer: Killer,
    folder: RunFolder,
    done: int,
) -> None:
    for step in itertools.count(done + 1):
        prompts = next(async_rollout)
        batch = async_rollout.generate(prompts, SAMPLING, step)
        scores = reward.finish(batch).get().non_tensor_batch["score"]
        assert all(score >= 0 for score in scores)
        version = rollout.weights.version
        versions = batch.ragged["token_versions"].values
        assert version - MAX_STALENESS <= versions.min() <= versions.max() <= version
        uids = batch.non_tensor_batch["uid"].tolist()
        assert uids == [uid for uid in uids[:: SAMPLING.n] for _ in range(SAMPLING.n)]
        folder.trained(step, uids[:: SAMPLING.n], version - int(versions.min()))
        if killer.is_done:
            break
        time.sleep(TRAINING_S)
        rollout.send(weights, version + 1)
        folder.save(step, version + 1, async_rollout)


def run(engine: str, num_kills: int, seed: int, folder: Path) -> str:
    """Run the test. Raises AssertionError if a prompt or a sample is wrong, or something takes too long."""
    start_s = time.monotonic()
    run_folder = RunFolder(folder)
    arguments = [
        "-m",
        "tests.soak.async_kills",
        "--engine",
        engine,
        "--kills",
        str(num_kills),
        "--seed",
        str(seed),
        "--drive",
        str(folder),
    ]
    status = None

    while status != 0:
        command = Command(arguments, folder / "driver.log")
        before = run_folder.victims().total()
        try:
            status = command.status(LIFE_S)
            assert status in (0, 128 + signal.SIGKILL), command.said()
            assert gone_within(command.processes(), GONE_S) == []
            assert run_folder.victims().total() > before or status == 0, command.said()
        finally:
            command.kill_all()

    steps = run_folder.steps()
    victims = run_folder.victims()
    expected = BatchLoader(Rows(), PROMPTS, shuffle=True, seed=seed)
    assert sorted(steps) == list(range(1, len(steps) + 1))
    for step in sorted(steps):
        assert steps[step]["uids"] == next(expected).non_tensor_batch["uid"].tolist()
    said = ", ".join(f"{count} x {name}" for name, count in sorted(victims.items()))
    oldest = max(line["oldest"] for line in steps.values())
    assert oldest <= MAX_STALENESS
    seconds = time.monotonic() - start_s

    return (
        f"{num_kills} kills ({said}) in {seconds:.0f} s, {len(steps)} steps: each prompt once, in order; "
        f"oldest {oldest}"
    )


def _staleness(version: int, done: int) -> StalenessController:
    return StalenessController(
        max_staleness=MAX_STALENESS,
        prompts_per_step=PROMPTS,
        total_steps=10_000,
        next_step=done + 1,
        version=version,
        step_pushes=lambda step: True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=["fake", "hf", "sglang"], default="fake")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", type=Path, help="be the driver, in this folder")
    arguments = parser.parse_args()
    if arguments.drive is None:
        with tempfile.TemporaryDirectory() as scratch:
            print(
                f"{arguments.engine}: {run(arguments.engine, arguments.kills, arguments.seed, Path(scratch))}"
            )
    else:
        logging.disable(logging.WARNING)  # one warning per restart
        start_ray(num_cpus=NUM_REPLICAS + 2, object_store_mb=100)
        drive(arguments.engine, arguments.kills, arguments.seed, RunFolder(arguments.drive))
        assert shutdown() == []
