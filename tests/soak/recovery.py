"""Kill ranks of trained models at random moments: a run must end bitwise like one that lost nothing.

python -m tests.soak.recovery --kind tp2dp2|pp2|ep2|hybrid|ahead --faults 12 --seed 0

Each fault is SIGKILL, for some SIGSTOP, and for some the kernel's kill when memory is exhausted, to a random
rank of a random role, at a random moment of a step. A stopped rank is noticed at the time limit of a call.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    DType,
    KLConfig,
    KLWhere,
    ParallelConfig,
    PPOConfig,
    RecoveryConfig,
    SFTConfig,
    TrackingConfig,
)
from megarl.roles.models import Actor
from megarl.roles.start import PPORoles
from tests.integration.run_outcome import Outcome
from tests.integration.tiny_run import (
    Finished,
    run_ppo,
    run_sft,
    save_inputs,
    save_policy,
    tiny_config,
    tiny_sft_config,
)
from tests.soak import out_of_memory
from tests.soak.save_kills import ahead_config, hybrid_config, ppo_config

LIMIT_S = 45.0  # of a call, after which a stopped rank counts as lost
STEPS_PER_FAULT = 2
_STOPPED_SHARE = 0.1
_MEMORY_SHARE = 0.3  # where control groups can be created
_GRPO = AlgorithmConfig(
    advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
)


def _tp2dp2(inputs: Path, steps: int) -> PPOConfig:
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    return tiny_config(
        inputs, inputs / "run", algorithm=_GRPO, actor={"parallel": parallel}, trainer={"total_steps": steps}
    )


def _pp2(inputs: Path, steps: int) -> PPOConfig:
    config = ppo_config(inputs, DType.bfloat16, steps, 0)
    return replace(config, actor=replace(config.actor, parallel=ParallelConfig(pipeline_parallel_size=2)))


def _ep2(inputs: Path, steps: int) -> SFTConfig:
    save_policy(inputs / "experts", with_experts=True)
    parallel = ParallelConfig(data_parallel_size=2, expert_parallel_size=2)
    return tiny_sft_config(
        inputs,
        inputs / "run",
        model={"path": str(inputs / "experts"), "dtype": DType.bfloat16},
        actor={"parallel": parallel},
        trainer={"total_steps": steps},
    )


KINDS: dict[str, Callable[[Path, int], PPOConfig | SFTConfig]] = {
    "tp2dp2": _tp2dp2,
    "pp2": _pp2,
    "ep2": _ep2,
    "hybrid": lambda inputs, steps: hybrid_config(inputs, DType.bfloat16, steps, 3),
    "ahead": lambda inputs, steps: ahead_config(inputs, DType.bfloat16, steps, 3),
}


class Report(NamedTuple):
    num_faults: int
    num_out_of_memory: int
    num_recoveries: int
    slowest_s: float
    difference: list[str]


def config_of(kind: str, inputs: Path, name: str, num_faults: int) -> Any:
    config = KINDS[kind](inputs, STEPS_PER_FAULT * num_faults + 1)
    trainer = replace(config.trainer, output_dir=str(inputs / name), phase_time_limit_s=LIMIT_S)
    return replace(
        config,
        trainer=trainer,
        recovery=RecoveryConfig(enabled=True, max_restarts=20),
        checkpoint=CheckpointConfig(every_steps=config.checkpoint.every_steps),
        tracking=TrackingConfig(loggers=["jsonl"], samples_every_steps=1),
    )


class Faults:
    """Faults at random moments of every second step."""

    def __init__(self, seed: int, num_faults: int, step_s: float) -> None:
        self._chance = random.Random(seed)
        self._steps = {STEPS_PER_FAULT * (number + 1) for number in range(num_faults)}
        self._step_s = step_s
        self.num_faults = 0
        self.num_out_of_memory = 0

    def look(self, step: int | None, phase: str, roles: PPORoles | Actor) -> None:
        if phase == "step" and step in self._steps:
            self._steps.remove(step)
            threading.Timer(self._chance.uniform(0, self._step_s), self._strike, [roles]).start()

    def _strike(self, roles: PPORoles | Actor) -> None:
        trained = [roles] if isinstance(roles, Actor) else [roles.actor, roles.critic]
        groups: list[Any] = [role.group for role in trained if role]
        pid = self._chance.choice(self._chance.choice(groups).pids)
        kind = self._chance.random()
        how = signal.SIGSTOP if kind < _STOPPED_SHARE else signal.SIGKILL
        try:
            if kind > 1 - _MEMORY_SHARE and out_of_memory.missing() is None:
                is_killed = out_of_memory.exhaust(pid)
                self.num_out_of_memory += is_killed
                self.num_faults += is_killed
                return
            os.kill(pid, how)
            self.num_faults += 1
        except ProcessLookupError:
            pass  # it was just replaced


def soak(kind: str, num_faults: int, seed: int, inputs: Path) -> Report:
    save_inputs(inputs)
    start_s = time.monotonic()
    run: Callable[..., Finished] = run_sft if isinstance(KINDS[kind](inputs, 1), SFTConfig) else run_ppo
    undisturbed = run(config_of(kind, inputs, "undisturbed", num_faults))
    steps = [line["timing_s/step"] for line in undisturbed.metrics if "num_tokens" in line]
    faults = Faults(seed, num_faults, sorted(steps)[len(steps) // 2])
    lost = run(config_of(kind, inputs, "lost", num_faults), look_at_phase=faults.look)
    lost_s = [line.get("recovery/lost_s", 0.0) for line in lost.metrics]
    num_recoveries = sum(line.get("recovery/num_recoveries", 0) for line in lost.metrics)
    report = Report(
        faults.num_faults,
        faults.num_out_of_memory,
        int(num_recoveries),
        max(lost_s),
        Outcome(lost).difference(Outcome(undisturbed)),
    )
    print(f"{kind}, seed {seed}: {report}, {time.monotonic() - start_s:.0f} s", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()

    from megarl.controller.cluster import shutdown, start_ray

    start_ray(num_cpus=12, object_store_mb=256)
    with tempfile.TemporaryDirectory() as folder:
        report = soak(parsed.kind, parsed.faults, parsed.seed, Path(folder))
    shutdown()
    assert not report.difference, report


if __name__ == "__main__":
    main()
