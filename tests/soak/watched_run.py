"""Driver of a reinforcement learning run that says where it is.

    python -m tests.soak.watched_run CONFIG

It trains like `megarl train`. Each line of standard input asks for a moment (Wanted), and the answer is a line
of JSON (Moment) when it has come. SIGUSR1 writes the stacks of all threads to standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from megarl.cli.run.context import run_context_of
from megarl.cli.run.train import open_ppo
from megarl.config.schema import PPOConfig
from megarl.controller.group import RayWorkerGroup
from megarl.doctor.examined_config import load_for_run
from megarl.trainers.monitor import phases_by_call
from megarl.trainers.ppo import PPOTrainer

_LOOK_S = 0.005


class Wanted(NamedTuple):
    """A moment of a run.

    Attributes:
        phase: A phase of the driver or of a rank.
        first: The first step that may be meant.
        last: The last step; any later moment will do.
        delay_s: Time after the phase was first seen.
    """

    phase: str
    first: int
    last: int
    delay_s: float


class RankMoment(NamedTuple):
    """What a rank of a model is doing.

    Attributes:
        process: The roles of its process, joined by "+".
        node: The address of its node.
        pid: Its pid on this node.
        phase: Its phase, or the method that it runs; None if it is idle.
    """

    process: str
    rank: int
    node: str
    pid: int
    phase: str | None


class Moment(NamedTuple):
    """Where a run is.

    Attributes:
        step: The current step; None before the first, and between two.
        phase: The driver's innermost phase.
    """

    step: int | None
    phase: str | None
    ranks: list[RankMoment]

    def has(self, phase: str) -> bool:
        return phase == self.phase or any(phase == rank.phase for rank in self.ranks)


class Watch:
    """Answers questions about a run in a thread."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._position = trainer.monitor.position
        roles = trainer.roles
        models = (roles.actor, *roles.scorers.values(), roles.critic)
        self._processes = list(dict.fromkeys(role.group.processes for role in models if role))
        self._phases = phases_by_call()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        for line in sys.stdin:
            wanted = Wanted(*json.loads(line))
            while not self._is_it(self._now(), wanted):
                time.sleep(_LOOK_S)
            time.sleep(wanted.delay_s)
            print(json.dumps(self._now()), flush=True)

    def _is_it(self, moment: Moment, wanted: Wanted) -> bool:
        step = moment.step
        return step is not None and (
            step > wanted.last or (step >= wanted.first and moment.has(wanted.phase))
        )

    def _now(self) -> Moment:
        now = self._position.now()
        return Moment(now.step, now.phase, [rank for each in self._processes for rank in self._ranks(each)])

    def _ranks(self, processes: RayWorkerGroup) -> list[RankMoment]:
        return [
            RankMoment(
                report.role,
                report.rank,
                report.node,
                report.activity.location.pid,
                self._phase(report.role, report.activity.method),
            )
            for report in processes.reports()
            if report.activity is not None
        ]

    def _phase(self, roles: str, method: str | None) -> str | None:
        names = (self._phases.get((role, method or "")) for role in roles.split("+"))
        return next(filter(None, names), method)


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    config = load_for_run(PPOConfig, sys.argv[1])
    print(json.dumps({"pid": os.getpid()}), flush=True)
    with run_context_of(config) as context, open_ppo(config, context, None) as (_, trainer):
        Watch(trainer)
        with trainer.running():
            trainer.fit()
        folder = Path(config.trainer.output_dir) / "huggingface"
        trainer.recovery.retry(lambda: trainer.roles.actor.save_hf(folder, config.model.path))


if __name__ == "__main__":
    main()
