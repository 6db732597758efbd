"""Test generation ahead of training in whole runs: queued samples survive a kill, and their age is
reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.checkpoints.run_folder import step_name
from megarl.config.schema import DType, RolloutEngineKind
from megarl.tracking.samples import read_samples, sample_files
from megarl.trainers.ppo import SAMPLES_FILE
from tests.integration.tiny_run import run_ppo, save_inputs
from tests.soak import async_kills
from tests.soak.save_kills import LOOK_S, Run, ahead_config, assert_same, assert_whole, untimed

pytestmark = pytest.mark.usefixtures("forked_processes")

STEPS = 5
COOL = 0.6
AGREEMENT = 1e-4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    return folder


def test_a_run_that_is_killed_with_samples_ahead_goes_on_as_if_nothing_had_been(
    ray_cluster: None, inputs: Path, tmp_path: Path
) -> None:
    config = ahead_config(inputs, DType.float32, STEPS, every_steps=1)
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = Run(config, tmp_path / "straight")
    run_ppo(replace(config, trainer=replace(config.trainer, output_dir=str(undisturbed.output_dir))))
    straight = undisturbed.outcome()
    assert [line["rollout/age/max"] for line in straight.metrics if "rollout/age/max" in line] == [
        0,
        1,
        2,
        2,
        2,
    ]
    assert [line["rollout/age/mean"] for line in straight.metrics if "rollout/age/mean" in line] == [
        0,
        1,
        2,
        2,
        2,
    ]
    assert [line["rollout/groups_ahead"] for line in straight.metrics if "rollout/groups_ahead" in line] == [
        12,
        12,
        12,
        6,
        0,
    ]

    run = Run(config, tmp_path / "killed")
    command = run.start()
    command.wait_for(lambda: run.is_saving(after_step=2), LOOK_S)
    command.kill_all()
    assert_whole(run, had_one=True)
    latest = run.checkpoints.latest()
    assert latest is not None
    assert (latest / SAMPLES_FILE).is_file()
    assert_same(run.finish(), straight)


def test_kills_of_a_replica_a_process_that_scores_and_the_driver_lose_and_double_nothing(
    tmp_path: Path,
) -> None:
    assert "each prompt once, in order" in async_kills.run("fake", 3, seed=0, folder=tmp_path)


def test_sglang_one_step_ahead_and_drained_writes_by_the_weights_it_says_and_goes_on_to_the_bit(
    ray_cluster: None, inputs: Path, tmp_path: Path
) -> None:
    """One sample at a time and no prompt cache; otherwise the last bits depend on what an engine batches with
    a sample."""
    steps = 4
    begun = 2
    config = ahead_config(inputs, DType.float32, steps, every_steps=1)
    sglang = replace(config.rollout.sglang, server_args={"disable_radix_cache": True})
    rollout = replace(
        config.rollout,
        engine=RolloutEngineKind.sglang,
        sglang=sglang,
        max_staleness=1,
        max_concurrency=1,
        temperature=COOL,
    )
    config = replace(config, rollout=rollout, checkpoint=replace(config.checkpoint, keep=0))
    straight = run_ppo(
        replace(config, trainer=replace(config.trainer, output_dir=str(tmp_path / "straight")))
    )
    lines = [line for line in straight.metrics if line["step"]]
    assert [line["rollout/age/max"] for line in lines] == [0, 1, 1, 1]

    # compared with what the trainer computes
    differences = [value for key, value in lines[0].items() if key.startswith("training/rollout_")]
    assert len(differences) == 4
    assert max(differences) < AGREEMENT

    checkpoints = straight.output_dir / "checkpoints"

    for step, path in sample_files(straight.output_dir).items():
        trained = max(0, step - 2)  # the step whose weights wrote them
        assert_written_by(
            checkpoints / step_name(trained) / "huggingface" if trained else inputs / "policy", path, COOL
        )

    checkpoint = checkpoints / step_name(begun)
    assert (checkpoint / SAMPLES_FILE).is_file()
    resumed = run_ppo(
        replace(
            config,
            trainer=replace(config.trainer, output_dir=str(tmp_path / "resumed")),
            checkpoint=replace(config.checkpoint, resume=str(checkpoint)),
        )
    )
    assert [untimed(line) for line in resumed.metrics] == [
        untimed(line) for line in straight.metrics if line["step"] > begun
    ]

    for name in (
        "huggingface/model.safetensors",
        *(f"samples/step_{step:08d}.parquet" for step in range(begun + 1, steps + 1)),
    ):
        assert (resumed.output_dir / name).read_bytes() == (straight.output_dir / name).read_bytes(), name

    # with checksums of weights and optimizer state
    last = Path("checkpoints", step_name(steps), "actor", "manifest.json")
    assert (
        json.loads((resumed.output_dir / last).read_text())["tensors"]
        == json.loads((straight.output_dir / last).read_text())["tensors"]
    )


def assert_written_by(model: Path, samples: Path, temperature: float) -> None:
    """Check that the log-prob of each token is that of a plain forward pass."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row in read_samples(samples).rows.to_pylist():
        prompt = row["prompt_ids"]
        response = torch.tensor(row["response_ids"])
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + row["response_ids"]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(-1, response[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(row["rollout_log_probs"]), expected, rtol=0, atol=AGREEMENT)
