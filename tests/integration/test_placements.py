"""Test the same run in every placement: roles that time-share devices compute the same run as on separate
devices."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    ExpertsConfig,
    KLConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    ReshardingConfig,
    RolloutEngineKind,
    RoutingReplay,
    Verify,
)
from megarl.roles.start import PPORoles
from megarl.rollout.worker.rollout_worker import RolloutWorker
from tests.integration.meeting import meeting_in_step
from tests.integration.tiny_run import Finished, run_ppo, save_inputs, save_policy, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 5
TOLERANCE = 1e-6
# rounding, which depends on what an engine batches together
ENGINE_AND_TRAINER = "training/rollout_"
# Actor and critic time-share devices, and so do the reference and the engines.
CUSTOM = PlacementConfig(
    strategy=PlacementStrategy.custom,
    roles={"actor": "trained", "critic": "trained", "reference": "frozen", "rollout": "frozen"},
    pools={"trained": [2], "frozen": [2]},
)
SHARING_WITH_ENGINES = {
    PlacementStrategy.hybrid: {"memory/actor", "memory/rollout"},
    PlacementStrategy.fully_collocate: {"memory/actor", "memory/critic", "memory/rollout"},
    PlacementStrategy.custom: {"memory/reference", "memory/rollout"},
}
NOT_COMPARED = (
    "timing_s/",
    "perf/",
    "memory/",
    "rollout/",
    "rollout_correction/",
    "resharding/",
    ENGINE_AND_TRAINER,
)
# Router metrics, by the first step that has them.
ROUTERS = {
    "critic/moe/expert_share/max": 1,
    **{f"actor/moe/{name}": 2 for name in ("expert_share/max", "aux_loss", "z_loss")},
}
AGREEMENT = 1e-4  # between engine and trainer, on the log-probs of the same tokens


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def config(
    inputs: Path,
    output_dir: Path,
    strategy: PlacementStrategy,
    engine: RolloutEngineKind = RolloutEngineKind.hf,
) -> PPOConfig:
    """Configure one critic warm-up step and four steps that train both models, with validation after every
    second and the last."""
    return tiny_config(
        inputs,
        output_dir,
        algorithm=AlgorithmConfig(kl=KLConfig(coefficient=0.05)),
        actor={"parallel": ParallelConfig(tensor_parallel_size=2)},
        rollout={"engine": engine, "num_replicas": 2},
        placement=CUSTOM if strategy is PlacementStrategy.custom else PlacementConfig(strategy=strategy),
        resharding=ReshardingConfig(verify=Verify.always),
        trainer={
            "updates_per_step": 2,
            "total_steps": STEPS,
            "critic_warmup_steps": 1,
            "validate_every_steps": 2,
        },
        tracking={"log_generations": 3},
    )


@pytest.fixture(scope="module")
def split(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    settings = config(inputs, tmp_path_factory.mktemp("split"), PlacementStrategy.split_collocate)
    with pytest.MonkeyPatch.context() as monkeypatch:
        return run_ppo(settings, meeting_in_step(2, tmp_path_factory.mktemp("meeting"), monkeypatch))


def assert_agreement(line: dict[str, float]) -> None:
    """Check the log-prob agreement. Step 0 has no training samples."""
    differences = [value for key, value in line.items() if key.startswith(ENGINE_AND_TRAINER)]
    assert len(differences) == (4 if line["step"] else 0)
    assert all(value < AGREEMENT for value in differences)


def assert_same_run(finished: Finished, expected: Finished) -> None:
    assert len(finished.metrics) == len(expected.metrics) == STEPS + 1
    for line, other in zip(finished.metrics, expected.metrics, strict=True):
        compared, others = (
            {key: value for key, value in each.items() if not key.startswith(NOT_COMPARED)}
            for each in (line, other)
        )
        assert compared == pytest.approx(others, rel=TOLERANCE, abs=1e-9), line["step"]
        assert_agreement(line)

    weights, others = (load_file(run.policy / "model.safetensors") for run in (finished, expected))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=TOLERANCE, atol=1e-9)


def updates(run: Finished) -> list[tuple[float, float, str]]:
    """Return (start, end, role) of the ranks' calls in the two updates after the warm-up, from the timeline
    that users open."""
    events = json.loads((run.output_dir / "timeline.json").read_text())["traceEvents"]
    named = [event for event in events if event["name"] == "update" and event["args"]["step"] > 1]
    assert {event["args"]["role"] for event in named} == {"critic", "actor"}
    return sorted((event["ts"], event["ts"] + event["dur"], event["args"]["role"]) for event in named)


def overlap(run: Finished) -> bool:
    found = updates(run)
    return any(
        start < other_end and other_start < end and role != other
        for start, end, role in found
        for other_start, other_end, other in found
    )


def test_actor_and_critic_train_at_the_same_time_where_they_share_no_device(split: Finished) -> None:
    assert overlap(split)


@pytest.mark.parametrize(
    "strategy",
    [
        PlacementStrategy.hybrid,
        PlacementStrategy.fully_collocate,
        PlacementStrategy.stand_alone,
        PlacementStrategy.custom,
    ],
)
def test_it_is_the_same_run(
    strategy: PlacementStrategy,
    split: Finished,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_the_same_time = strategy in (PlacementStrategy.hybrid, PlacementStrategy.stand_alone)
    settings = config(inputs, tmp_path / "run", strategy)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    finished = (
        run_ppo(settings, meeting_in_step(2, meeting, monkeypatch)) if at_the_same_time else run_ppo(settings)
    )
    assert_same_run(finished, split)
    assert overlap(finished) == at_the_same_time
    measured = {
        key.split("_rss")[0] for line in finished.metrics[2:] for key in line if key.startswith("memory/")
    }
    assert measured == SHARING_WITH_ENGINES.get(strategy, set())
    for line in finished.metrics[2:]:  # in the first, the trainer has not been offloaded yet
        assert all(0.05 < value < 10 for key, value in line.items() if key.startswith("memory/"))


class Killer:
    """Kill an engine between steps, while the trainer's weights are offloaded."""

    def __init__(self, steps: tuple[int, ...], replica: int) -> None:
        self._steps = steps
        self._replica = replica

    def __call__(self, step: int, roles: PPORoles) -> None:
        if step in self._steps:
            os.kill(roles.rollout.replicas[self._replica].call(RolloutWorker.process_ids)[0], signal.SIGKILL)


def test_an_engine_that_is_killed_gets_weights_from_a_trainer_that_is_away(
    split: Finished, inputs: Path, tmp_path: Path
) -> None:
    """Kills follow a step that put the engines to sleep, and one that synced weights to them."""
    hybrid = run_ppo(config(inputs, tmp_path, PlacementStrategy.hybrid), Killer((2, 3), replica=1))
    assert_same_run(hybrid, split)
    assert sum(line["rollout/num_restarts"] for line in hybrid.metrics[1:]) == 2


def test_sglang_takes_turns_too(inputs: Path, tmp_path: Path) -> None:
    """One run of nine with the default seed had one different sample. The likely but unproven cause: timing
    decides which requests SGLang batches together and thus how logits round, and a sample was at the edge."""
    runs = []

    # the full matrix is in tests/soak/placements.py
    for strategy in (PlacementStrategy.split_collocate, PlacementStrategy.fully_collocate):
        settings = config(inputs, tmp_path / strategy.value, strategy, RolloutEngineKind.sglang)
        rollout = dataclasses.replace(settings.rollout, num_replicas=1)
        trainer = dataclasses.replace(settings.trainer, seed=1)
        runs.append(run_ppo(dataclasses.replace(settings, rollout=rollout, trainer=trainer)))

    assert_same_run(*runs)


def test_experts_and_a_cool_temperature(inputs: Path, tmp_path: Path) -> None:
    """Train a policy with experts: they are distributed over the actor's two ranks, which split each row by
    context parallelism, over the critic's two tensor-parallel ranks and over SGLang's ranks.

    After every weight sync the engine's weights are bitwise identical to the actor's, and both agree on
    log-probs, at another temperature than the runs above. The actor routes tokens to the experts that SGLang
    chose. tests/soak/experts.py checks that it learns.
    """
    save_policy(tmp_path / "experts", with_experts=True, num_layers=2)
    settings = config(inputs, tmp_path / "run", PlacementStrategy.split_collocate, RolloutEngineKind.sglang)
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, path=str(tmp_path / "experts")),
        actor=dataclasses.replace(
            settings.actor,
            parallel=ParallelConfig(context_parallel_size=2, expert_parallel_size=2),
            experts=ExpertsConfig(aux_loss_coefficient=1e-2, z_loss_coefficient=1e-3),
        ),
        critic=dataclasses.replace(
            settings.critic,
            parallel=ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2),
            experts=ExpertsConfig(freeze_router=True),
        ),
        rollout=dataclasses.replace(
            settings.rollout, num_replicas=1, tensor_parallel_size=2, expert_parallel_size=2, temperature=0.6
        ),
        engine=EngineConfig(routing_replay=RoutingReplay.rollout),
        trainer=dataclasses.replace(settings.trainer, total_steps=3),
    )
    finished = run_ppo(settings)
    assert len(finished.metrics) == 4

    for line in finished.metrics:
        assert_agreement(line)
        assert {name for name in line if "/moe/" in name} == {
            name for name, first_step in ROUTERS.items() if line["step"] >= first_step
        }
        # two of four experts
        assert all(1 / 4 <= line[name] <= 1 / 2 for name in line if name.endswith("/expert_share/max"))

    model, loading = AutoModelForCausalLM.from_pretrained(finished.policy, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "experts").state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
