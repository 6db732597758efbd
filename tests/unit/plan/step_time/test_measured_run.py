"""Test that a device is fitted to the phases of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import dump_config, load_config
from megarl.config.schema import PPOConfig
from megarl.config.shipped import CONFIGS_DIR, with_published_models
from megarl.config.validate import read_architectures
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import DeviceProfile, load_device
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.measured_run import fit_run
from megarl.plan.step_time.step import PredictedCosts
from megarl.tracking.run_files import CONFIG_FILE, METRICS_FILE

DEVICE = load_device("h100_80gb")
# A machine whose products are slower, whose memory is faster, and whose driver is slow.
TRUTH = replace(
    DEVICE, efficiency=replace(DEVICE.efficiency, gemm=0.35, memory=0.7, links=0.4), sample_ms=6.0
)


def write_run(folder: Path, name: str, device: DeviceProfile) -> PPOConfig:
    """Write a run whose phases take as long as predicted for a device."""
    path = CONFIGS_DIR / f"{name}.yaml"
    config = with_published_models(load_config(PPOConfig, path), str(path))[0]
    dump_config(config, folder / CONFIG_FILE)
    lengths = expected_lengths(config, 200, 800)
    plan = plan_placement(config)
    step = PredictedCosts(device, lengths).predict_step(config, plan, read_architectures(config)[0])
    metrics = {
        "prompt_length/mean": 200.0,
        "response_length/mean": 800.0,
        "timing_s/step": step.seconds,
        **{
            f"timing_s/{phase}": time.seconds - time.parts.get("offload", 0.0)
            for phase, time in step.phases.items()
        },
    }
    lines = [json.dumps({"step": number, **metrics}) for number in (1, 2, 3)]
    (folder / METRICS_FILE).write_text("\n".join(lines) + "\n")
    return config


def test_constants_are_fitted_to_measured_phases(tmp_path: Path) -> None:
    write_run(tmp_path, "qwen3_32b_grpo", TRUTH)
    fitted, phases, lengths = fit_run(tmp_path, DEVICE)
    assert set(phases) == {
        "gen",
        "old_log_prob",
        "ref",
        "update_actor",
        "update_weights",
        "step",
    }
    for measured_s, _, after_s in phases.values():
        assert after_s == pytest.approx(measured_s, rel=0.05)
    before = {name: before_s / measured_s for name, (measured_s, before_s, _) in phases.items()}
    assert before["update_actor"] < 0.75
    assert before["gen"] > 1.2
    assert fitted.efficiency.gemm == pytest.approx(0.35, rel=0.1)
    assert fitted.efficiency.attention == DEVICE.efficiency.attention
    assert lengths.prompt == 200


def test_a_run_that_generates_ahead_does_not_measure_generation(tmp_path: Path) -> None:
    """The phases are reproduced. Without generation, slow products cannot be told from slow memory."""
    write_run(tmp_path, "qwen2.5_7b_async_grpo", TRUTH)
    fitted, phases, _ = fit_run(tmp_path, DEVICE)
    assert set(phases) == {
        "old_log_prob",
        "ref",
        "update_actor",
        "update_weights",
        "step",
    }
    for measured_s, before_s, after_s in phases.values():
        assert before_s < 0.75 * measured_s
        assert after_s == pytest.approx(measured_s, rel=0.02)
    # Only generation depends on it.
    assert fitted.efficiency.decode_layer_us == DEVICE.efficiency.decode_layer_us


def test_a_folder_without_samples_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "qwen3_32b_grpo", TRUTH)
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "timing_s/step": 3.0}\n')
    with pytest.raises(ValueError, match="has no step with prompt_length/mean"):
        fit_run(tmp_path, DEVICE)
