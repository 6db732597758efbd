"""Test PPO on the sum of a reward model and a function, with the model on the critic's devices and in its
processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    DynamicSamplingConfig,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    ParallelConfig,
    PlacementConfig,
    PlacementStrategy,
    PPOConfig,
    RewardFunctionConfig,
    RewardModelConfig,
)
from megarl.plan.placement.plan import plan_placement
from tests.integration.tiny_run import Finished, run_ppo, save_inputs, tiny_config
from tests.unit.roles.reward_models import byte_pair_tokenizer, save_reward_model

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 2
WEIGHT = -0.5
FUNCTION_WEIGHT = 2.0
TWO_STAGES = ParallelConfig(pipeline_parallel_size=2)
MICRO_BATCH = MicroBatchConfig(max_tokens=64)
TOLERANCE = 1e-4
TEMPERATURE = 0.2
# The reward model time-shares devices with the engine.
CUSTOM = PlacementConfig(
    strategy=PlacementStrategy.custom,
    roles={"actor": "trained", "critic": "trained", "reward_model": "frozen", "rollout": "frozen"},
    pools={"trained": [1], "frozen": [2]},
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"))
    save_reward_model(folder / "judge")
    return folder


def config(
    inputs: Path, output_dir: Path, parallel: ParallelConfig, strategy: PlacementStrategy
) -> PPOConfig:
    function = RewardFunctionConfig(path=str(inputs / "reward.py"), weight=FUNCTION_WEIGHT)
    model = RewardModelConfig(
        path=str(inputs / "judge"), parallel=parallel, micro_batch=MICRO_BATCH, weight=WEIGHT
    )
    return tiny_config(
        inputs,
        output_dir,
        algorithm=AlgorithmConfig(kl=KLConfig(where=KLWhere.none)),
        reward={"functions": [function], "model": model},
        placement=CUSTOM if strategy is PlacementStrategy.custom else PlacementConfig(strategy=strategy),
        trainer={"total_steps": STEPS, "validate_before": False},
        tracking={"log_generations": 8},
    )


@pytest.fixture(scope="module")
def beside(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run the reward model on two ranks in separate processes, the first on the critic's device."""
    settings = config(
        inputs, tmp_path_factory.mktemp("beside"), TWO_STAGES, PlacementStrategy.split_collocate
    )
    plan = plan_placement(settings)
    model = plan.group("reward_model").processes
    (critic,) = plan.group("critic").processes
    assert (len(model), model[0].pool, model[0].devices) == (2, critic.pool, critic.devices)

    return run_ppo(settings)


def test_the_score_is_the_sum_of_what_each_part_says(beside: Finished) -> None:
    for line in beside.metrics:
        assert line["timing_s/reward_model"] > 0
        assert line["reward/model/truncated"] == line["reward/model/spells_special"] == 0
        assert line["reward/model/min"] < line["reward/model/mean"] < line["reward/model/max"]
        assert line["reward/functions/min"] <= line["reward/functions/mean"] <= line["reward/functions/max"]
        total = line["reward/functions/mean"] + WEIGHT * line["reward/model/mean"]
        assert line["critic/score/mean"] == pytest.approx(total, abs=1e-6)


def test_validation_scores_are_the_functions_plus_hugging_faces(beside: Finished, inputs: Path) -> None:
    """Recompute the score of each sample: its prompt from the data (numbers 32 to 39), its text from the run,
    by transformers' own class and tokenizer."""
    tokenizer = byte_pair_tokenizer()
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "judge", dtype=torch.float32)
    lines = [json.loads(line) for line in (beside.output_dir / "generations.jsonl").read_text().splitlines()]
    assert len(lines) == 8

    for line in lines:
        number = 32 + int(line["uid"])
        chat = [
            {"role": "user", "content": f"{number}+{number % 7}="},
            {"role": "assistant", "content": line["response"]},
        ]
        ids = torch.tensor([tokenizer.apply_chat_template(chat, return_dict=False)])
        with torch.no_grad():
            of_model = float(model(ids).logits)
        of_function = FUNCTION_WEIGHT * line["response"].count(line["ground_truth"]) / 4
        assert line["score"] == pytest.approx(of_function + WEIGHT * of_model, abs=TOLERANCE)


def assert_same_run(run: Finished, expected: Finished) -> None:
    for line, other in zip(run.metrics, expected.metrics, strict=True):
        names = [
            name
            for name in other
            if not name.startswith(("timing_s/", "perf/", "rollout/", "resharding/", "training/", "memory/"))
        ]
        assert {name: line[name] for name in names} == pytest.approx(
            {name: other[name] for name in names}, rel=1e-5, abs=1e-6
        )

    weights, others = (load_file(each.policy / "model.safetensors") for each in (run, expected))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=1e-5, atol=1e-7)


def test_in_one_process_with_actor_and_critic_it_is_the_same_run(
    beside: Finished, inputs: Path, tmp_path: Path
) -> None:
    """The roles also time-share devices with the engine in this placement."""
    settings = config(inputs, tmp_path, ParallelConfig(), PlacementStrategy.fully_collocate)
    assert plan_placement(settings).group_of("reward_model").roles == ("actor", "critic", "reward_model")
    assert_same_run(run_ppo(settings), beside)


def test_beside_the_engine_and_in_turns_with_it_it_is_the_same_run(
    beside: Finished, inputs: Path, tmp_path: Path
) -> None:
    assert_same_run(run_ppo(config(inputs, tmp_path, TWO_STAGES, PlacementStrategy.custom)), beside)


def dapo(settings: PPOConfig) -> PPOConfig:
    """Use dynamic sampling with a policy that is so certain that some prompts get equal responses."""
    return replace(
        settings,
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
            kl=KLConfig(where=KLWhere.none),
            dynamic_sampling=DynamicSamplingConfig(enabled=True, max_generations=20),
        ),
        data=replace(settings.data, max_response_length=2),
        rollout=replace(settings.rollout, n=2, temperature=TEMPERATURE),
    )


def test_dynamic_sampling_on_scores_of_the_model_is_the_same_run_in_every_placement(
    inputs: Path, tmp_path: Path
) -> None:
    """The model scores whole rounds, while no group is generated: in one placement the devices are its own,
    in the other it takes them from the engine and gives them back for the next round."""
    runs = [
        run_ppo(dapo(config(inputs, tmp_path / strategy.value, ParallelConfig(), strategy)))
        for strategy in (PlacementStrategy.split_collocate, PlacementStrategy.fully_collocate)
    ]
    for line in runs[0].metrics:
        assert line["dynamic_sampling/num_generations"] > 1
        assert line["dynamic_sampling/num_without_signal"] > 0
    assert_same_run(runs[1], runs[0])
