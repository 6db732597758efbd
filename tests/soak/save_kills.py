"""Kill runs at random times during saves: a run whose whole process tree dies while it writes checkpoints
must end like an uninterrupted one.

python -m tests.soak.save_kills --kind sft|ppo|hybrid|ahead --dtype float32|bfloat16 --kills 50 --seed 0

Every step is saved. Each time, at a random moment after a save began, all processes get SIGKILL. Then the
latest checkpoint must exist and be complete to the last checksum, and the run is started again with the same
command. At the end its metrics (except timings), generations, TensorBoard curves, weights and optimizer state
are compared bitwise with those of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.checkpoints.role_folder import check_folder
from megarl.checkpoints.run_folder import BEST_FILE, CheckpointFolder, check_files
from megarl.config.load import dump_config
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CheckpointConfig,
    CorrectionLevel,
    CurriculumConfig,
    CurriculumKind,
    Decay,
    DType,
    KeepBestConfig,
    KLConfig,
    KLControllerConfig,
    KLControllerKind,
    KLWhere,
    MetricMode,
    MicroBatchConfig,
    OnUpdate,
    OptimConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
    SFTConfig,
    TrackingConfig,
)
from megarl.tracking.samples import sample_files
from tests.command import Command
from tests.integration.tiny_run import save_inputs, tiny_config, tiny_sft_config

LOOK_S = 0.002  # a save takes some tenths of a second
# Metrics of clocks rather than computations.
_TIMED = re.compile(r"(timing_s|perf|memory|resharding)/.*|rollout/replica_\d+/tokens_per_s")
_MICRO_BATCH = MicroBatchConfig(max_tokens=64)
_LOGGED = TrackingConfig(
    loggers=["console", "jsonl", "tensorboard"], log_generations=3, samples_every_steps=1
)


def sft_config(inputs: Path, dtype: DType, total_steps: int, every_steps: int) -> SFTConfig:
    return tiny_sft_config(
        inputs,
        inputs / "run",
        model={"dtype": dtype},
        actor={
            "micro_batch": _MICRO_BATCH,
            "optim": OptimConfig(lr=1e-2, warmup_steps=3, decay=Decay.cosine),
        },
        checkpoint=CheckpointConfig(
            every_steps=every_steps, keep_best=KeepBestConfig(metric="val/loss", mode=MetricMode.min)
        ),
        trainer={"total_steps": total_steps, "validate_every_steps": 3},
        tracking=_LOGGED,
    )


def ppo_config(inputs: Path, dtype: DType, total_steps: int, every_steps: int) -> PPOConfig:
    """Configure everything that the driver must remember: an adaptive KL controller, critic warm-up,
    validations."""
    controller = KLControllerConfig(kind=KLControllerKind.adaptive, target=0.02, horizon=160)
    return tiny_config(
        inputs,
        inputs / "run",
        model={"dtype": dtype},
        algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.05, controller=controller)),
        actor={
            "parallel": ParallelConfig(tensor_parallel_size=2),
            "optim": OptimConfig(lr=5e-3, warmup_steps=4, decay=Decay.linear),
        },
        critic={"optim": OptimConfig(lr=1e-2, decay=Decay.cosine)},
        reward={"time_limit_s": 60},
        rollout={"n": 2, "validation": SamplingConfig()},
        checkpoint=CheckpointConfig(
            every_steps=every_steps, keep_best=KeepBestConfig(metric="val/score/mean")
        ),
        trainer={
            "total_steps": total_steps,
            "prompts_per_step": 6,
            "updates_per_step": 2,
            "critic_warmup_steps": 1,
            "validate_every_steps": 3,
        },
        tracking=_LOGGED,
    )


def hybrid_config(inputs: Path, dtype: DType, total_steps: int, every_steps: int) -> PPOConfig:
    """Configure actor and engines on the same devices: when a step ends, the actor's state is offloaded."""
    config = ppo_config(inputs, dtype, total_steps, every_steps)
    return replace(config, placement=PlacementConfig(strategy=PlacementStrategy.hybrid))


def ahead_config(inputs: Path, dtype: DType, total_steps: int, every_steps: int) -> PPOConfig:
    """Configure generation two steps ahead: checkpoints contain samples that are not trained yet.

    A curriculum chooses the prompts, from scores of steps that are trained later than others are drawn.
    """
    advantage = AdvantageConfig(estimator=AdvantageEstimator.grpo)
    correction = RolloutCorrectionConfig(level=CorrectionLevel.token)
    return tiny_config(
        inputs,
        inputs / "run",
        model={"dtype": dtype},
        algorithm=AlgorithmConfig(
            advantage=advantage, kl=KLConfig(where=KLWhere.none), rollout_correction=correction
        ),
        data={"curriculum": CurriculumConfig(kind=CurriculumKind.learnability)},
        reward={"time_limit_s": 60},
        rollout={"n": 2, "validation": SamplingConfig(), "max_staleness": 2, "on_update": OnUpdate.drain},
        checkpoint=CheckpointConfig(
            every_steps=every_steps, keep_best=KeepBestConfig(metric="val/score/mean")
        ),
        trainer={
            "total_steps": total_steps,
            "prompts_per_step": 6,
            "updates_per_step": 2,
            "validate_every_steps": 3,
        },
        tracking=_LOGGED,
    )


CONFIGS: dict[str, Callable[[Path, DType, int, int], SFTConfig | PPOConfig]] = {
    "sft": sft_config,
    "ppo": ppo_config,
    "hybrid": hybrid_config,
    "ahead": ahead_config,
}


@dataclass
class Run:
    """A run in its folder, started as often as necessary."""

    config: SFTConfig | PPOConfig
    folder: Path

    def __post_init__(self) -> None:
        self.output_dir = self.folder / "run"
        self.log = self.folder / "log.txt"
        trainer = replace(self.config.trainer, output_dir=str(self.output_dir))  # type: ignore[type-var]
        dump_config(replace(self.config, trainer=trainer), self.folder / "run.yaml")  # type: ignore[type-var]
        self.checkpoints = CheckpointFolder(self.output_dir / "checkpoints")

    def start(self, *overrides: str) -> Command:
        kind = "sft" if isinstance(self.config, SFTConfig) else "train"
        return Command(["-m", "megarl", kind, str(self.folder / "run.yaml"), *overrides], self.log)

    def finish(self, *overrides: str) -> Outcome:
        """Run to the end."""
        command = self.start(*overrides)
        assert command.status() == 0, command.said()
        return self.outcome()

    def is_saving(self, after_step: int = 0) -> bool:
        """Return whether a checkpoint of a step after `after_step` is being written."""
        return any(
            int(path.name[6:14]) > after_step for path in self.checkpoints.path.glob(".step_*.partial")
        )

    def outcome(self) -> Outcome:
        policy = load_file(self.output_dir / "huggingface" / "model.safetensors")
        latest = self.checkpoints.latest()
        assert latest is not None
        states = {
            path.parent.name: json.loads(path.read_text())["tensors"]
            for path in latest.glob("*/manifest.json")
        }
        generations = self.output_dir / "generations.jsonl"

        return Outcome(
            metrics=[
                untimed(json.loads(line))
                for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()
            ],
            curves=_curves(self.output_dir / "tensorboard"),
            generations=generations.read_text() if generations.exists() else "",
            samples={step: path.read_bytes() for step, path in sample_files(self.output_dir).items()},
            weights={
                name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
                for name, tensor in policy.items()
            },
            states=states,
            latest=latest.name,
            best=(self.checkpoints.path / BEST_FILE).read_text(),
        )


class Outcome(NamedTuple):
    """Final state of a run.

    Attributes:
        best: Contents of `best.json`.
        states: By role and tensor (weights, moments, master weights), the chunks with their checksums.
    """

    metrics: list[dict[str, Any]]
    curves: dict[str, list[tuple[int, float]]]
    generations: str
    samples: dict[int, bytes]
    weights: dict[str, bytes]
    states: dict[str, dict[str, Any]]
    latest: str
    best: str


def assert_same(one: Outcome, other: Outcome) -> None:
    for mine, theirs in zip(one.metrics, other.metrics, strict=True):
        assert mine == theirs
    assert one.curves == other.curves
    assert one.generations == other.generations
    assert one.samples == other.samples
    assert one.weights == other.weights
    assert one.states == other.states
    assert one.latest == other.latest
    assert one.best == other.best


def untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not _TIMED.fullmatch(name)}


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not _TIMED.fullmatch(name)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def kill_in_save(run: Run, chance: random.Random, longest_save_s: float) -> str:
    """Start the run, and kill it a random time after a random save has begun. Returns what existed at that
    moment."""
    left = list(run.checkpoints.path.glob(".step_*"))
    command = run.start()

    # leftovers of the last kill are removed first
    command.wait_for(lambda: not any(path.exists() for path in left), LOOK_S)
    latest = run.checkpoints.latest()
    before = int(latest.name[5:]) if latest else 0
    command.wait_for(lambda: run.is_saving(before + chance.randrange(2)), LOOK_S)
    time.sleep(chance.uniform(0, longest_save_s))
    command.kill_all()

    return _moment(run)


def _moment(run: Run) -> str:
    partial = [
        {path.name for path in folder.rglob("*")} for folder in run.checkpoints.path.glob(".step_*.partial")
    ]
    if not partial:
        return (
            "between saves"
            if not list(run.checkpoints.path.glob(".step_*.removed"))
            else "while removing an old one"
        )

    names = partial[0]
    for name, moment in (
        ("checkpoint.json", "sealed"),
        ("manifest.json", "manifest written"),
        (".metadata", "index written"),
    ):
        if name in names:
            return moment

    return "state copied" if any(name.endswith(".distcp") for name in names) else "begun"


def assert_whole(run: Run, had_one: bool) -> bool:
    """Check that the latest checkpoint is complete to the last byte. It may be missing only if none ever
    existed."""
    latest = run.checkpoints.latest()
    assert latest is not None or not had_one

    if latest is not None:
        best = run.checkpoints.path / BEST_FILE
        for checkpoint in {
            latest,
            best.parent / json.loads(best.read_text())["checkpoint"] if best.exists() else latest,
        }:
            for role in check_files(checkpoint)["roles"]:
                check_folder(checkpoint / role)

    return latest is not None


def soak(
    kind: str, dtype: DType, num_kills: int, seed: int, folder: Path, longest_save_s: float = 0.4
) -> str:
    """Run the test. Raises AssertionError if a checkpoint or the end is wrong."""
    save_inputs(folder)
    config = CONFIGS[kind](folder, dtype, 12 + 2 * num_kills, 1)
    chance = random.Random(seed)
    start_s = time.monotonic()
    for name in ("straight", "killed"):
        (folder / name).mkdir()
    straight = Run(config, folder / "straight").finish()
    run = Run(config, folder / "killed")
    moments = Counter[str]()
    had_one = False

    for number in range(1, num_kills + 1):
        moment = kill_in_save(run, chance, longest_save_s)
        moments[moment] += 1
        had_one = assert_whole(run, had_one)
        latest = run.checkpoints.latest()
        print(
            f"kill {number}: {moment}; latest {latest.name if latest else 'none'}, "
            f"{time.monotonic() - start_s:.0f} s",
            flush=True,
        )

    assert_same(run.finish(), straight)
    return (
        f"{kind} {dtype.value}: {num_kills} kills "
        f"({', '.join(f'{count} x {moment}' for moment, count in moments.most_common())}) in "
        f"{time.monotonic() - start_s:.0f} s; a complete checkpoint was found each time, and the end is "
        f"that of an undisturbed run"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(CONFIGS), default="sft")
    parser.add_argument("--dtype", type=DType, choices=list(DType), default=DType.float32)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(soak(arguments.kind, arguments.dtype, arguments.kills, arguments.seed, Path(scratch)))
