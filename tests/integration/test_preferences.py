"""Test runs on pairs of answers end to end on real Ray, against Hugging Face's models."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from megarl.checkpoints.trace_comparison import compare_traces
from megarl.cli.run.replay import recorded_step, replay
from megarl.config.load import dump_config
from megarl.config.schema import (
    ActorConfig,
    CheckpointConfig,
    Device,
    DPOConfig,
    DPOLossConfig,
    DType,
    LoRAConfig,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    PairReferenceConfig,
    ParallelConfig,
    PreferenceConfig,
    PreferenceDataConfig,
    PreferenceTrainerConfig,
    RatedPreferenceDataConfig,
    RewardModelConfig,
    RewardModelLossConfig,
    RewardModelRunConfig,
    TrackingConfig,
)
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.tokenizer import load_tokenizer
from megarl.trainers.samples import RecordedBatches
from tests.command import Command
from tests.integration.tiny_run import (
    Finished,
    placed_pools,
    run_pairs,
    run_ppo,
    save_inputs,
    tiny_config,
)

STEPS = 10
PAIRS = 7  # an odd number: the replicas get different shares
BETA = 0.3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"), num_layers=2)
    save_pairs(folder)
    return folder


def save_pairs(folder: Path) -> None:
    """Write `pairs.parquet` and `held_out.parquet` to `folder`."""
    # The good answer repeats the number, the bad one is another number, and longer for some.
    rows = [
        {"prompt": f"{n}=", "chosen": f"{n}", "rejected": f"{(n * 7 + 3) % 40}" + "+" * (n % 3)}
        for n in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:30]), folder / "pairs.parquet")
    pq.write_table(pa.Table.from_pylist(rows[30:]), folder / "held_out.parquet")


def pair_config[Run: PreferenceConfig](schema: type[Run], inputs: Path, output_dir: Path, **more: Any) -> Run:
    data = PreferenceDataConfig if schema is DPOConfig else RatedPreferenceDataConfig
    return schema(
        model=ModelConfig(path=str(inputs / "policy"), dtype=DType.float32),
        data=data(  # pyrefly: ignore[bad-argument-type]
            train_files=[str(inputs / "pairs.parquet")],
            val_files=[str(inputs / "held_out.parquet")],
            max_length=16,
        ),
        actor=ActorConfig(
            parallel=ParallelConfig(data_parallel_size=2),
            micro_batch=MicroBatchConfig(max_tokens=48),
            optim=OptimConfig(lr=3e-3),
        ),
        checkpoint=CheckpointConfig(at_end=False),
        trainer=PreferenceTrainerConfig(
            total_steps=STEPS, pairs_per_step=PAIRS, validate_every_steps=4, output_dir=str(output_dir)
        ),
        tracking=TrackingConfig(loggers=["jsonl"], record_batches=STEPS),
        device=Device.cpu,
        **more,
    )


@pytest.fixture(scope="module")
def dpo_config(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> DPOConfig:
    return pair_config(DPOConfig, inputs, tmp_path_factory.mktemp("dpo"), loss=DPOLossConfig(beta=BETA))


@pytest.fixture(scope="module")
def dpo(ray_cluster: None, dpo_config: DPOConfig) -> Finished:
    return run_pairs(dpo_config)


@pytest.fixture(scope="module")
def reward_config(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> RewardModelRunConfig:
    loss = RewardModelLossConfig(center_coefficient=0.01)
    return pair_config(RewardModelRunConfig, inputs, tmp_path_factory.mktemp("reward_model"), loss=loss)


@pytest.fixture(scope="module")
def reward_model(ray_cluster: None, reward_config: RewardModelRunConfig) -> Finished:
    return run_pairs(reward_config)


def held_out_rows(config: PreferenceConfig) -> list[tuple[list[int], list[int]]]:
    """Return the prompt and response tokens of all held-out rows, both answers of a pair after each other."""
    pairs = PairDataset(config.data.val_files, pair_encoder(config, load_tokenizer(config.model.path)))
    return [
        (pair.prompt_ids, answer)
        for pair in (pairs[number] for number in range(len(pairs)))
        for answer in (pair.chosen_ids, pair.rejected_ids)
    ]


def log_probs(
    folder: str | Path, rows: list[tuple[list[int], list[int]]], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    sums = []
    for prompt, response in rows:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        sums.append(F.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None]).sum())
    return torch.stack(sums)


def test_dpo_starts_at_the_reference_and_learns(dpo: Finished) -> None:
    assert [line["step"] for line in dpo.metrics] == list(range(1, STEPS + 1))
    first = dpo.metrics[0]
    assert first["dpo/loss"] == pytest.approx(log(2), abs=1e-5)
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-4)
    assert dpo.metrics[-1]["dpo/loss"] < 0.8 * log(2)
    names = {"dpo/grad_norm", "dpo/lr", "timing_s/update_actor", "perf/throughput", "num_tokens"}
    assert names <= first.keys()


def test_the_validation_of_dpo_is_hugging_faces(dpo: Finished, dpo_config: DPOConfig) -> None:
    assert [line["step"] for line in dpo.metrics if "val/loss" in line] == [4, 8, STEPS]
    rows = held_out_rows(dpo_config)
    rewards = BETA * (log_probs(dpo.policy, rows) - log_probs(dpo_config.model.path, rows))
    margins = rewards[0::2] - rewards[1::2]
    last = dpo.metrics[-1]
    assert last["val/loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-4)
    assert last["val/margin"] == pytest.approx(float(margins.mean()), rel=1e-3)
    assert last["val/accuracy"] == pytest.approx(float((margins > 0).float().mean()))


def test_a_reward_model_scores_as_hugging_faces_class_does(
    reward_model: Finished, reward_config: RewardModelRunConfig
) -> None:
    assert reward_model.metrics[0]["reward_model/loss"] == pytest.approx(log(2))  # its head starts at 0
    assert reward_model.metrics[-1]["reward_model/loss"] < 0.9 * log(2)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model.policy, dtype=torch.float32)
    scores = []
    for prompt, response in held_out_rows(reward_config):
        with torch.no_grad():
            scores.append(model(torch.tensor([prompt + response[:-1]])).logits[0, 0])

    chosen, rejected = torch.stack(scores)[0::2], torch.stack(scores)[1::2]
    loss = -F.logsigmoid(chosen - rejected).mean() + 0.01 * (chosen + rejected).square().mean()
    last = reward_model.metrics[-1]
    assert last["val/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert last["val/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert last["val/chosen_score"] == pytest.approx(float(chosen.mean()), rel=1e-4)


def test_a_trained_reward_model_is_what_reward_model_reads(
    reward_model: Finished, inputs: Path, tmp_path: Path
) -> None:
    config = tiny_config(inputs, tmp_path / "run", trainer={"total_steps": 1})
    judge = RewardModelConfig(path=str(reward_model.policy), micro_batch=MicroBatchConfig(max_tokens=64))
    (line,) = run_ppo(replace(config, reward=replace(config.reward, functions=[], model=judge))).metrics[-1:]
    assert line["reward/mean"] == pytest.approx(line["reward/model/mean"])
    assert line["reward/model/max"] > line["reward/model/min"]


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_step_is_replayed_in_another_layout(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The first replay repeats the run, and the second one agrees with it in every tensor."""
    config: PreferenceConfig = request.getfixturevalue(f"{kind}_config")
    finished: Finished = request.getfixturevalue({"dpo": "dpo", "reward": "reward_model"}[kind])
    other = replace(config, actor=replace(config.actor, parallel=ParallelConfig(tensor_parallel_size=2)))
    recorded = recorded_step(config, finished.output_dir, 1)
    metrics = []
    for name, layout in (("original", config), ("changed", other)):
        with placed_pools(layout) as pools:
            metrics.append(replay(layout, recorded, tmp_path / name, Device.cpu, pools, num_rows=64))

    (norm,) = (name for name in metrics[0] if name.endswith("/grad_norm"))
    assert metrics[0][norm] == finished.metrics[0][norm]
    folders = (tmp_path / name / "actor" for name in ("original", "changed"))
    compared = list(compare_traces(*folders, 1e-5, config.actor.optim.lr))
    assert len(compared) > 50
    assert [tensor.describe() for tensor in compared if not tensor.is_close] == []


@pytest.mark.usefixtures("forked_processes")
def test_a_resumed_run_has_the_same_reference(dpo: Finished, dpo_config: DPOConfig, tmp_path: Path) -> None:
    """The first command needs the reference of some pairs, and the second one computes the others before it
    loads the checkpoint."""
    config = replace(
        dpo_config,
        checkpoint=CheckpointConfig(),
        trainer=replace(dpo_config.trainer, output_dir=str(tmp_path / "run")),
    )
    dump_config(config, tmp_path / "run.yaml")
    said = []
    for steps in (2, STEPS):
        command = Command(
            ["-m", "megarl", "train", str(tmp_path / "run.yaml"), f"trainer.total_steps={steps}"],
            tmp_path / "log",
        )
        assert command.status() == 0, command.said()
        said.append(command.said())

    assert f"reference: log-probs of {2 * PAIRS} pairs of data.train_files" in said[0]
    assert f"reference: log-probs of {30 - 2 * PAIRS} pairs of data.train_files" in said[1]
    assert "of data.val_files" not in said[1]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["dpo/loss"] for line in lines] == pytest.approx(
        [line["dpo/loss"] for line in dpo.metrics], abs=1e-6
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["pairs"]) == (STEPS, STEPS * PAIRS)


@pytest.mark.usefixtures("forked_processes")
def test_another_model_is_the_reference_of_adapters(dpo_config: DPOConfig, tmp_path: Path) -> None:
    """The reference has another architecture, and the loss is TRL's formula on both models in float64."""
    (tmp_path / "other").mkdir()
    save_inputs(tmp_path / "other", num_layers=1)
    reference = tmp_path / "other" / "policy"
    config = replace(
        dpo_config,
        reference=PairReferenceConfig(path=str(reference)),
        actor=replace(
            dpo_config.actor, parallel=ParallelConfig(tensor_parallel_size=2), lora=LoRAConfig(rank=4)
        ),
        trainer=replace(dpo_config.trainer, total_steps=1, output_dir=str(tmp_path / "run")),
    )
    dump_config(config, tmp_path / "run.yaml")
    command = Command(["-m", "megarl", "train", str(tmp_path / "run.yaml")], tmp_path / "log")
    assert command.status() == 0, command.said()
    assert f"reference: log-probs of {PAIRS} pairs of data.train_files" in command.said()
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())

    batch = RecordedBatches(tmp_path / "run", 0).read(1).ragged
    rows = list(
        zip(*([row.tolist() for row in batch[key].each()] for key in ("prompts", "responses")), strict=True)
    )
    expected = log_probs(reference, rows, torch.float64)
    sums = torch.stack([row.double().sum() for row in batch["ref_log_prob"].each()])
    assert sums.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    rewards = BETA * (log_probs(config.model.path, rows, torch.float64) - expected)
    margins = rewards[0::2] - rewards[1::2]
    assert line["dpo/loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-5)
    assert line["dpo/margin"] == pytest.approx(float(margins.mean()), rel=1e-4)

    held_out = held_out_rows(config)
    trained = log_probs(tmp_path / "run" / "huggingface", held_out)
    rewards = BETA * (trained - log_probs(reference, held_out))
    assert line["val/margin"] == pytest.approx(float((rewards[0::2] - rewards[1::2]).mean()), rel=1e-3)
