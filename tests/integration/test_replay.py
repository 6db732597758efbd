"""Test that a recorded step agrees with its replay in another layout, and that a planted change is found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megarl.checkpoints.trace_comparison import ComparedTensor, compare_traces
from megarl.cli.run.replay import recorded_step, replay
from megarl.config.load import dump_config
from megarl.config.schema import (
    CheckpointConfig,
    Device,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
)
from megarl.tracking.run_files import CONFIG_FILE
from tests.command import Command
from tests.integration.tiny_run import Finished, placed_pools, run_ppo, save_inputs, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

TOLERANCE = 1e-5
LR = 1e-3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"))
    return folder


@pytest.fixture(scope="module")
def config(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    return tiny_config(
        inputs,
        tmp_path_factory.mktemp("run"),
        actor={"optim": OptimConfig(lr=LR)},
        critic={"optim": OptimConfig(lr=LR)},
        checkpoint=CheckpointConfig(every_steps=1, keep=0, asynchronous=False, save_hf=False),
        tracking={"record_batches": 3},
        trainer={"total_steps": 3, "updates_per_step": 2, "validate_before": False},
    )


@pytest.fixture(scope="module")
def finished(config: PPOConfig) -> Finished:
    return run_ppo(config)


def traced(config: PPOConfig, run: Finished, step: int, folder: Path) -> dict[str, float]:
    recorded = recorded_step(config, run.output_dir, step)
    with placed_pools(config) as pools:
        return replay(config, recorded, folder, Device.cpu, pools, num_rows=64)


@pytest.fixture(scope="module")
def original(config: PPOConfig, finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "trace"
    metrics = traced(config, finished, 2, folder)

    # The replay repeats the run: its gradient norms are bitwise those that the run logged.
    for name in ("actor/grad_norm", "critic/grad_norm"):
        assert metrics[name] == finished.metrics[1][name]
    return folder


def differences(first: Path, second: Path, role: str) -> list[ComparedTensor]:
    compared = list(compare_traces(first / role, second / role, TOLERANCE, LR))
    assert len(compared) > 100
    return [tensor for tensor in compared if not tensor.is_close]


def test_another_layout_agrees(config: PPOConfig, finished: Finished, original: Path, tmp_path: Path) -> None:
    """The actor has tensor and sequence parallelism, and the critic two stages and other micro-batches."""
    other = replace(
        config,
        actor=replace(config.actor, parallel=ParallelConfig(tensor_parallel_size=2, sequence_parallel=True)),
        critic=replace(
            config.critic,
            parallel=ParallelConfig(pipeline_parallel_size=2),
            micro_batch=MicroBatchConfig(sequences=2),
        ),
    )
    traced(other, finished, 2, tmp_path / "trace")
    for role in ("actor", "critic"):
        assert differences(original, tmp_path / "trace", role) == []


def other_model(config: PPOConfig, folder: Path) -> PPOConfig:
    shutil.copytree(config.model.path, folder)
    return replace(config, model=replace(config.model, path=str(folder)))


def test_a_changed_function_is_found(config: PPOConfig, finished: Finished, tmp_path: Path) -> None:
    """The attention has another rotary embedding. The first step begins with the weights of the folder."""
    traced(config, finished, 1, tmp_path / "original")
    rotary = other_model(config, tmp_path / "rotary")
    path = tmp_path / "rotary" / "config.json"
    fields = json.loads(path.read_text())
    fields["rope_theta"] = fields.get("rope_theta", 10000.0) * 2
    if "rope_parameters" in fields:
        fields["rope_parameters"]["rope_theta"] = fields["rope_theta"]
    path.write_text(json.dumps(fields))
    traced(rotary, finished, 1, tmp_path / "of_rotary")
    first = differences(tmp_path / "original", tmp_path / "of_rotary", "actor")[0]
    assert (first.stage, first.name) == ("mini-batch 1, forward pass", "layer 0000 0 self_attention")


def test_the_command(config: PPOConfig, finished: Finished, tmp_path: Path) -> None:
    """A replay agrees in another layout, and names the weight of which one element was changed."""
    dump_config(config, finished.output_dir / CONFIG_FILE)
    arguments = ["-m", "megarl", "replay", str(finished.output_dir), "1"]
    agrees = Command([*arguments, "actor.parallel.tensor_parallel_size=2"], tmp_path / "agrees.log")
    assert agrees.status() == 0, agrees.said()
    assert "actor/grad_norm: agrees" in agrees.said()
    assert "actor: all " in agrees.said()

    # The reference of the comparison is the trace that the first command has left.
    weight = other_model(config, tmp_path / "weight")
    path = tmp_path / "weight" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.down_proj.weight"][3, 5] += 0.01
    save_file(tensors, path, {"format": "pt"})
    against = str(finished.output_dir / "replays" / "step_00000001" / "original")
    differs = Command(
        [*arguments, "--against", against, f"model.path={weight.model.path}"], tmp_path / "differs.log"
    )
    assert differs.status() == 1, differs.said()
    assert (
        "the first is in weights before the step: decoder.layers.2.mlp.linear_fc2.weight: largest "
        "difference 0.01"
    ) in differs.said()


def test_a_step_that_was_not_recorded_is_refused(config: PPOConfig, finished: Finished) -> None:
    with pytest.raises(ValueError, match=r"no batch of step 9 \(steps kept: 1, 2, 3\)"):
        recorded_step(config, finished.output_dir, 9)
