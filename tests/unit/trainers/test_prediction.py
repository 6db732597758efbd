"""Test the predicted times of a run as metrics."""

from __future__ import annotations

import pytest

from megarl.config.load import load_config
from megarl.config.published import with_published_models
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import predict_step
from megarl.tracking.metric_table import unknown_metrics
from megarl.trainers.step_observers import StepPrediction

DEVICE = load_device("h100_80gb")


def run(name: str) -> PPOConfig:
    path = CONFIGS_DIR / f"{name}.yaml"
    return with_published_models(load_config(PPOConfig, path), str(path))[0]


def metrics(config: PPOConfig, prompt: float, response: float) -> dict[str, float]:
    prediction = StepPrediction(config, plan_placement(config), read_architectures(config)[0], DEVICE)
    return prediction.metrics({"prompt_length/mean": prompt, "response_length/mean": response})


def test_a_step_is_predicted_for_its_own_lengths() -> None:
    config = run("qwen3_32b_grpo")
    step = predict_step(
        config,
        plan_placement(config),
        read_architectures(config)[0],
        DEVICE,
        expected_lengths(config, 300, 2000),
    )
    found = metrics(config, 300.0, 2000.0)
    assert found["perf/predicted_step_s"] == step.seconds
    assert found["predicted_s/update_actor"] == step.phases["update_actor"].seconds
    assert found["predicted_s/gen"] == step.phases["gen"].seconds
    assert metrics(config, 300.0, 4000.0)["perf/predicted_step_s"] > 1.5 * step.seconds
    assert unknown_metrics(found) == []


def test_generation_ahead_is_predicted_as_the_time_that_the_trainer_waits() -> None:
    config = run("qwen2.5_7b_async_grpo")
    # Short samples: the engines are faster than training, which never waits.
    assert metrics(config, 100.0, 200.0)["predicted_s/gen"] == 0
    longer = metrics(config, 10.0, 200.0)
    trained_s = sum(seconds for name, seconds in longer.items() if name.startswith("predicted_s/"))
    driver_s = config.samples_per_step * DEVICE.sample_ms / 1e3
    assert longer["perf/predicted_step_s"] == pytest.approx(trained_s + driver_s)


def test_lengths_beyond_the_limits_count_as_the_limits() -> None:
    config = run("qwen3_32b_grpo")
    assert metrics(config, 1e6, 1e6) == metrics(config, config.longest_prompt, config.longest_response)


def test_nothing_is_predicted_for_a_step_without_samples() -> None:
    config = run("qwen3_32b_grpo")
    prediction = StepPrediction(config, plan_placement(config), read_architectures(config)[0], DEVICE)
    assert prediction.metrics({"timing_s/step": 1.0}) == {}
