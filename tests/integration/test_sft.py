"""Supervised fine-tuning end to end on real Ray, against Hugging Face's cross-entropy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.batch.data_proto import DataProto
from megarl.config.schema import (
    ActorConfig,
    CheckpointConfig,
    Device,
    DType,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    TrackingConfig,
)
from megarl.data.loader import BatchLoader, one_pass
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer
from tests.integration.tiny_run import Finished, run_sft, save_inputs

STEPS = 12
SAMPLES = 7  # an odd number: the replicas get different shares
MAX_LENGTH = 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    save_inputs(inputs := tmp_path_factory.mktemp("inputs"))
    return SFTConfig(
        model=ModelConfig(path=str(inputs / "policy"), dtype=DType.float32),
        data=SFTDataConfig(
            train_files=[str(inputs / "sft.parquet")], val_files=[str(inputs / "sft_validation.parquet")], max_length=MAX_LENGTH
        ),
        actor=ActorConfig(
            parallel=ParallelConfig(data_parallel_size=2), micro_batch=MicroBatchConfig(max_tokens=32), optim=OptimConfig(lr=1e-2)
        ),
        checkpoint=CheckpointConfig(at_end=False),
        trainer=SFTTrainerConfig(
            total_steps=STEPS, samples_per_step=SAMPLES, validate_every_steps=5, output_dir=str(tmp_path_factory.mktemp("sft"))
        ),
        tracking=TrackingConfig(loggers=["jsonl"]),
        device=Device.cpu,
    )


@pytest.fixture(scope="module")
def finished(ray_cluster: None, config: SFTConfig) -> Finished:
    return run_sft(config)


def dataset(config: SFTConfig, files: list[str]) -> SFTDataset:
    return SFTDataset(files, load_tokenizer(config.model.path), SFTDataConfig(max_length=MAX_LENGTH))


def answer_losses(folder: str | Path, batch: DataProto) -> list[float]:
    """Of each answer token, by Hugging Face's own loss with the prompt's labels masked out."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors, losses = batch.tensors, []
    num_prompt_columns = tensors["prompts"].shape[1]
    for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"].bool(), strict=True):
        labels = ids.clone()
        labels[:num_prompt_columns] = -100
        with torch.no_grad():
            loss = model(ids[mask][None], labels=labels[mask][None]).loss
        losses += [float(loss)] * int((labels[mask] != -100).sum())
    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_loss_is_hugging_faces_over_answer_tokens(config: SFTConfig, finished: Finished) -> None:
    loader = BatchLoader(dataset(config, config.data.train_files), SAMPLES, shuffle=True, seed=config.data.seed)
    first = next(loader)
    assert finished.metrics[0]["sft/loss"] == pytest.approx(mean(answer_losses(config.model.path, first)), rel=1e-5)
    assert finished.metrics[0]["num_tokens"] == int(first.tensors["attention_mask"].sum())


def test_the_loss_falls(finished: Finished) -> None:
    assert [line["step"] for line in finished.metrics] == list(range(1, STEPS + 1))
    losses = [line["sft/loss"] for line in finished.metrics]
    assert mean(losses[-3:]) < 0.7 * losses[0]
    for line in finished.metrics:
        assert {"sft/grad_norm", "sft/lr", "timing_s/step", "timing_s/update_actor", "perf/throughput"} <= line.keys()


def test_the_validation_loss_is_hugging_faces(config: SFTConfig, finished: Finished) -> None:
    assert [line["step"] for line in finished.metrics if "val/loss" in line] == [5, 10, STEPS]
    held_out = dataset(config, config.data.val_files)
    assert len(held_out) % SAMPLES  # the last batch is smaller
    losses = [loss for batch in one_pass(held_out, SAMPLES) for loss in answer_losses(finished.policy, batch)]
    assert finished.metrics[-1]["val/loss"] == pytest.approx(mean(losses), rel=1e-4)
