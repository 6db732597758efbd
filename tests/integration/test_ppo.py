"""Test PPO end to end on real Megatron and real Ray: what a run writes, and that its parts follow the
configuration."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.batch.data_proto import DataProto
from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    CorrectionLevel,
    KLConfig,
    KLControllerConfig,
    KLControllerKind,
    KLEstimator,
    KLWhere,
    ParallelConfig,
    PPOConfig,
    RolloutCorrectionConfig,
)
from megarl.controller.futures import DerivedFuture, has_ended
from megarl.plan.placement.plan import plan_placement
from megarl.roles.models import ABSENT, Critic
from megarl.roles.start import PPORoles
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.tracking.samples import read_samples, sample_files
from megarl.trainers.monitor import phases_by_call
from tests.integration.tiny_run import Finished, run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 5
WARMUP_STEPS = 2
SAMPLES = 16
PEAK_TFLOPS = 0.25
TARGET = 0.02
HORIZON = 160
BETA = 0.05
TRAINED = [
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/approx_kl",
    "actor/ratio_max",
    "actor/ratio_min",
    "actor/grad_norm",
    "actor/lr",
    "perf/tflops/actor",
]
ALWAYS = [
    *(
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/grad_norm",
        "critic/score/mean",
        "critic/score/max",
        "critic/score/min",
    ),
    *("response_length/mean", "response_length/max", "response_length/min", "response_length/clip_ratio"),
    *(
        f"timing_s/{phase}"
        for phase in ("step", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic")
    ),
    "perf/tflops/critic",
    *("actor/entropy", "groups/without_signal", "rollout_correction/kl"),
    *("perf/throughput", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
    *("training/rollout_log_probs_diff_mean", "training/rollout_log_probs_diff_max"),
]
IN_TRAINING = [
    *TRAINED,
    "timing_s/update_actor",
    "timing_s/update_weights",
    "resharding/gb_per_s",
    "resharding/extra_bytes",
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def config(
    inputs: Path,
    output_dir: Path,
    algorithm: AlgorithmConfig,
    *,
    context_parallel_size: int = 1,
    updates_per_step: int = 2,
    **trainer: Any,
) -> PPOConfig:
    return tiny_config(
        inputs,
        output_dir,
        algorithm=algorithm,
        actor={"parallel": ParallelConfig(context_parallel_size=context_parallel_size)},
        trainer={"updates_per_step": updates_per_step, **trainer},
        tracking={"log_generations": 3},
    )


def split_collocate(inputs: Path, output_dir: Path) -> PPOConfig:
    controller = KLControllerConfig(kind=KLControllerKind.adaptive, target=TARGET, horizon=HORIZON)
    given = config(
        inputs,
        output_dir,
        AlgorithmConfig(kl=KLConfig(coefficient=BETA, controller=controller)),
        context_parallel_size=2,
        total_steps=STEPS,
        critic_warmup_steps=WARMUP_STEPS,
        epochs_per_batch=2,
        validate_every_steps=2,
    )
    return replace(given, placement=replace(given.placement, device_peak_tflops=PEAK_TFLOPS))


class PolicyWatch:
    """Record the actor's weights and the rollout's version before each step.

    In the last step, the critic's processes are stopped from the call of its update until the actor's new
    weights have been sent.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        self._folder = folder
        self._source = source
        self.versions: list[int] = []
        self.critic_had_updated = True

    def __call__(self, step: int, roles: PPORoles) -> None:
        if step == STEPS:
            assert isinstance(roles.critic, Critic)
            self._hold_critic(roles.critic, roles.weights)
        self.versions.append(roles.rollout.replicas[0].call(RolloutWorker.weight_version))
        roles.actor.save_hf(self._folder / str(step), str(self._source))

    def _hold_critic(self, critic: Critic, weights: RolloutWeights) -> None:
        update = critic.update
        push = weights.push
        pids = critic.group.pids

        # a driver that waits for the critic must fail the test, not hang it
        release = Timer(60, send, (pids, signal.SIGCONT))

        def update_that_stands_still(batch: DataProto, step: int) -> DerivedFuture:
            send(pids, signal.SIGSTOP)
            release.start()
            self._updated = update(batch, step)
            return self._updated

        def releasing_push() -> None:
            push()
            self.critic_had_updated = has_ended(self._updated.calls)
            release.cancel()
            send(pids, signal.SIGCONT)

        critic.update = update_that_stands_still
        weights.push = releasing_push

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self._folder / str(step) / "model.safetensors")


def send(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.fixture(scope="module")
def watch(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyWatch:
    return PolicyWatch(tmp_path_factory.mktemp("watched"), inputs / "policy")


@pytest.fixture(scope="module")
def finished(inputs: Path, watch: PolicyWatch, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_ppo(split_collocate(inputs, tmp_path_factory.mktemp("ppo")), watch)


def test_every_step_has_its_metrics(finished: Finished) -> None:
    before, *steps = finished.metrics
    assert [line["step"] for line in finished.metrics] == list(range(STEPS + 1))
    validated = {
        f"val/{source}{name}" for source in ("", "count/") for name in ("score/mean", "reward/error_rate")
    }
    assert before.keys() == {"step", "timing_s/testing", *validated}

    for line in steps:
        expected = {*ALWAYS, *(IN_TRAINING if line["step"] > WARMUP_STEPS else [])}
        expected |= {"val/count/score/mean", "timing_s/testing"} if line["step"] in (2, 4, STEPS) else set()
        assert expected - line.keys() == set(), line["step"]
        assert all(math.isfinite(value) for value in line.values())
        assert line["training/rollout_probs_diff_max"] < 1e-5  # the rollout has the actor's weights
        phases = [line[f"timing_s/{name}"] for name in ("gen", "reward", "values", "update_critic")]
        assert 0 < max(phases) < line["timing_s/step"]
        assert ("timing_s/testing" in line) == ("val/score/mean" in line)
        for role in ("actor", "critic"):
            assert line.get(f"perf/mfu/{role}", 0) == pytest.approx(
                line.get(f"perf/tflops/{role}", 0) / PEAK_TFLOPS
            )


def test_no_metric_is_of_a_phase_that_did_not_happen(finished: Finished) -> None:
    for line in finished.metrics[1 : WARMUP_STEPS + 1]:
        assert not line.keys() & set(IN_TRAINING)


def test_the_critic_warms_up_alone(finished: Finished, watch: PolicyWatch, inputs: Path) -> None:
    start = load_file(inputs / "policy" / "model.safetensors")
    for step in range(1, WARMUP_STEPS + 2):
        assert all(torch.equal(weight, start[name]) for name, weight in watch.weights(step).items())
    assert any(
        not torch.equal(weight, start[name]) for name, weight in watch.weights(WARMUP_STEPS + 2).items()
    )
    assert watch.versions == [1, 1, 1, 2, 3]
    first, second = finished.metrics[1:3]
    assert (first["critic/values/max"], first["critic/values/min"]) == (0, 0)  # a new head
    assert second["critic/values/max"] != 0


def test_the_kl_coefficient_follows_its_controller(finished: Finished) -> None:
    """beta <- beta (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon)."""
    steps = finished.metrics[1:]
    kls = [line["actor/reward_kl_penalty"] for line in steps]
    assert kls[: WARMUP_STEPS + 1] == pytest.approx([0, 0, 0], abs=1e-6)
    assert max(kls[WARMUP_STEPS + 1 :]) > TARGET  # it moves both ways
    betas = [line["actor/reward_kl_penalty_coeff"] for line in steps]
    assert betas[:4] == pytest.approx([0.05, 0.049, 0.04802, 0.0470596])

    for beta, kl, following in zip(betas, kls, betas[1:], strict=False):
        error = min(max(kl / TARGET - 1, -0.2), 0.2)
        assert following == pytest.approx(beta * (1 + error * SAMPLES / HORIZON))


def test_rewards_are_scores_minus_the_penalty(finished: Finished) -> None:
    last = finished.metrics[-1]
    assert last["critic/rewards/mean"] != pytest.approx(last["critic/score/mean"], abs=1e-6)
    first = finished.metrics[1]  # no KL yet
    assert first["critic/rewards/mean"] == pytest.approx(first["critic/score/mean"], abs=1e-6)


def test_the_timeline_shows_every_pool(finished: Finished, inputs: Path) -> None:
    events = json.loads((finished.output_dir / "timeline.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    pools = plan_placement(split_collocate(inputs, finished.output_dir)).process_on_nodes
    expected = {f"pool {pool}" for pool in (*pools, "driver")}

    # curves have points only in runs that take some seconds
    assert set(names.values()) - {"counters"} == expected
    calls = [event for event in events if event["ph"] == "X"]
    assert {names[event["pid"]] for event in calls} == expected
    assert all(event["dur"] >= 0 for event in calls)

    # the KL in the reward is computed before the update
    not_here = {("reward_model", "score_conversations"), ("actor", "update_scored")}

    # this run has neither judges nor a teacher
    not_here |= {("reward", "use_judges"), ("teacher", "log_probs")}

    # before others end: this run's engine ends all samples at once
    not_here |= {("reward", "begin"), ("reward", "scored")}

    # no prompt is dropped
    not_here |= {("reward", "forget")}
    assert {*phases_by_call(), ("driver", "step")} - not_here <= {
        (event["args"]["role"], event["name"]) for event in calls
    }


def test_neither_update_waits_for_the_other(watch: PolicyWatch, finished: Finished) -> None:
    """Their pools share no process: while the critic's processes are stopped in its update, the actor's
    update ends and its weights are sent."""
    assert len(finished.metrics) == STEPS + 1
    assert not watch.critic_had_updated


def test_generations_are_written(finished: Finished) -> None:
    rows = [json.loads(line) for line in (finished.output_dir / "generations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [step for step in (0, 2, 4, STEPS) for _ in range(3)]
    assert rows[0].keys() == {
        "step",
        "uid",
        "data_source",
        "response",
        "ground_truth",
        "extra_info",
        "score",
        "reward_numbers",
    }

    # the held-out numbers
    assert [row["extra_info"] for row in rows] == [{"index": 32 + int(row["uid"])} for row in rows]

    # greedy, with the same weights
    assert [row["response"] for row in rows[:3]] == [row["response"] for row in rows[3:6]]


def test_samples_are_kept_as_the_loss_saw_them(finished: Finished) -> None:
    assert list(sample_files(finished.output_dir)) == [1, STEPS]
    for step, path in sample_files(finished.output_dir).items():
        rows, tokens, parts = read_samples(path)
        metrics = finished.metrics[step]
        assert len(rows) == SAMPLES
        assert parts == ["compute_score"]
        for row in rows.to_pylist():
            assert (
                re.sub("<[a-z]+>", "", "".join(tokens[number] for number in row["response_ids"]))
                == row["response"]
            )
            assert row["prompt"].startswith("<user>")
            assert row["prompt"].endswith("=<model>")
            lists = ("response_ids", "advantages", "log_probs", "rollout_log_probs")
            assert {len(row[name]) for name in lists} == {row["response_length"]}
            assert len(row["prompt_ids"]) == row["prompt_length"]
            assert row["score"] == row["response"].count(row["ground_truth"]) / 4 == row["score_parts"][0]
            assert row["advantage"] == pytest.approx(
                sum(row["advantages"]) / row["response_length"], abs=1e-6
            )
            assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == 1 else "length")
        columns = rows.to_pydict()
        assert [columns["uid"].count(uid) for uid in dict.fromkeys(columns["uid"])] == [4] * 4
        assert set(columns["weight_version"]) == {max(1, step - WARMUP_STEPS)}
        gaps = [
            abs(own - engine)
            for of_row in zip(columns["log_probs"], columns["rollout_log_probs"], strict=True)
            for own, engine in zip(*of_row, strict=True)
        ]
        assert max(gaps) == pytest.approx(metrics["training/rollout_log_probs_diff_max"], rel=1e-4)
        assert sum(columns["score"]) / SAMPLES == pytest.approx(metrics["critic/score/mean"])
        assert sum(columns["response_length"]) / SAMPLES == metrics["response_length/mean"]
        assert max(map(max, columns["advantages"])) == pytest.approx(metrics["critic/advantages/max"])


def test_the_policy_is_saved_for_transformers(finished: Finished, inputs: Path) -> None:
    model, loading = AutoModelForCausalLM.from_pretrained(finished.policy, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    start = load_file(inputs / "policy" / "model.safetensors")
    moved = {
        name: float((weight - start[name]).abs().max())
        for name, weight in model.state_dict().items()
        if name in start
    }
    assert moved.keys() == start.keys()
    assert min(moved.values()) > 1e-4


_TIMED = ("timing_s/", "perf/", "resharding/", "rollout/")


def without_times(finished: Finished) -> list[dict[str, float]]:
    return [
        {key: value for key, value in line.items() if not key.startswith(_TIMED)} for line in finished.metrics
    ]


def sampled(finished: Finished) -> list[dict[str, list[Any]]]:
    columns = ["response_ids", "advantages", "log_probs", "rollout_log_probs", "score"]
    return [
        read_samples(path)[0].select(columns).to_pydict()
        for path in sample_files(finished.output_dir).values()
    ]


def test_the_same_seed_gives_the_same_run_if_only_what_changed_is_sent(
    finished: Finished, inputs: Path, tmp_path: Path
) -> None:
    given = split_collocate(inputs, tmp_path)
    again = run_ppo(replace(given, resharding=replace(given.resharding, delta=True)))
    assert without_times(again) == without_times(finished)
    assert sampled(again) == sampled(finished)
    policy, same = (load_file(run.policy / "model.safetensors") for run in (finished, again))
    assert all(torch.equal(same[name], weight) for name, weight in policy.items())

    # The first sync sends everything; later ones send almost everything, since all of float32 changes.
    shares = [line["resharding/sent_share"] for line in again.metrics if "resharding/sent_share" in line]
    assert 1 < shares[0] < 1.05
    assert max(shares[1:]) <= 1.05


def test_grpo_runs_without_critic_and_reference(inputs: Path, tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    seen: list[PPORoles] = []
    finished = run_ppo(
        config(inputs, tmp_path, algorithm, total_steps=2, validate_before=False),
        lambda step, roles: seen.append(roles),
    )
    assert (seen[0].critic, seen[0].reference) == (ABSENT, ABSENT)
    assert [line["step"] for line in finished.metrics] == [1, 2]

    for line in finished.metrics:
        assert set(IN_TRAINING) <= line.keys()
        assert not line.keys() & {
            "critic/vf_loss",
            "critic/values/mean",
            "timing_s/values",
            "timing_s/ref",
            "actor/reward_kl_penalty",
        }
        assert line["actor/grad_norm"] > 0
        assert line["critic/rewards/mean"] == line["critic/score/mean"]


def test_the_kl_can_stand_in_the_loss(inputs: Path, tmp_path: Path) -> None:
    """A single update per batch computes the scores in its own pass, and the metrics are those of a separate
    pass before it."""
    kl = KLConfig(where=KLWhere.loss, estimator=KLEstimator.k3, coefficient=0.1)
    correction = RolloutCorrectionConfig(level=CorrectionLevel.token)
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=kl, rollout_correction=correction
    )
    finished = run_ppo(
        config(inputs, tmp_path, algorithm, updates_per_step=1, total_steps=3, validate_before=False)
    )
    losses = [line["actor/kl_loss"] for line in finished.metrics]
    assert losses[0] == pytest.approx(0, abs=1e-6)  # the actor still equals the reference
    assert min(losses[1:]) > 1e-3

    for line in finished.metrics:
        assert line["critic/rewards/mean"] == line["critic/score/mean"]  # and not in the reward
        assert ("timing_s/old_log_prob" in line) == (line["step"] == 1)  # for the gate
        assert line["actor/approx_kl"] == 0
        assert "actor/reward_kl_penalty" not in line
        assert line["reward/mean"] == line["critic/score/mean"]
        assert 0 < line["training/rollout_log_probs_diff_max"] < 1e-4
        assert line["rollout_correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert line["actor/entropy"] > 0.5
