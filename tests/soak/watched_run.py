"""Driver of a reinforcement learning run that reports its progress on request.

    python -m tests.soak.watched_run CONFIG

It trains like `megarl train`. Each line of standard input asks for a moment (Wanted). The answers are two lines
of JSON (Moment): the ranks when its first step has begun, and where they are when the moment has come. SIGUSR1
writes the stacks of all threads to standard error.
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
from megarl.doctor.checks import load_for_run
from megarl.trainers.monitor import phases_by_call
from megarl.trainers.ppo import PPOTrainer

_LOOK_S = 0.005
_PHASES_OF_DRIVER = ("gen", "update_weights", "testing", "save_checkpoint")


class Wanted(NamedTuple):
    """A moment of a run.

    Attributes:
        phase: A phase of the driver or of a rank.
        first: The first step that may be meant.
        last: The last step; any later moment will do.
        delay_s: Time from when the phase was seen until the answer.
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
            while not self._is_step(wanted.first):
                time.sleep(_LOOK_S)
            _say(self._now(with_ranks=True))
            _say(self._reached(wanted))

    def _is_step(self, number: int) -> bool:
        step, _ = self._position.now()
        return step is not None and step >= number

    def _reached(self, wanted: Wanted) -> Moment:
        """Wait for a moment. Ranks are asked for their own phases only, because asking is slow."""
        is_of_rank = wanted.phase not in _PHASES_OF_DRIVER
        while True:
            now = self._now(with_ranks=is_of_rank)
            phases = [now.phase, *(rank.phase for rank in now.ranks)]
            if wanted.phase in phases or self._is_step(wanted.last + 1):
                time.sleep(wanted.delay_s)
                return now
            time.sleep(_LOOK_S)

    def _now(self, with_ranks: bool) -> Moment:
        step, phase = self._position.now()
        processes = self._processes if with_ranks else ()
        return Moment(step, phase, [rank for each in processes for rank in self._ranks(each)])

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


def _say(moment: Moment) -> None:
    print(json.dumps(moment), flush=True)


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
