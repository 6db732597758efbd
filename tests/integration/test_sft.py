"""Test supervised fine-tuning end to end on real Ray, against Hugging Face's cross-entropy."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
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
from tests.integration.tiny_run import SYMBOLS, Finished, run_sft, save_inputs

STEPS = 12
SAMPLES = 7  # an odd number: the replicas get different shares
MAX_LENGTH = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SFTConfig:
    save_inputs(inputs := tmp_path_factory.mktemp("inputs"), num_layers=2)
    for name, start in (("conversations", 0), ("held_out_conversations", 100)):
        rows = [{"messages": conversation(start + number)} for number in range(24)]
        pq.write_table(pa.Table.from_pylist(rows), inputs / f"{name}.parquet")

    return SFTConfig(
        model=ModelConfig(path=str(inputs / "policy"), dtype=DType.float32),
        data=SFTDataConfig(
            train_files=[str(inputs / f"{name}.parquet") for name in ("sft", "conversations")],
            val_files=[
                str(inputs / f"{name}.parquet") for name in ("sft_validation", "held_out_conversations")
            ],
            max_length=MAX_LENGTH,
        ),
        actor=ActorConfig(
            parallel=ParallelConfig(data_parallel_size=2),
            micro_batch=MicroBatchConfig(max_tokens=32),
            optim=OptimConfig(lr=1e-2),
        ),
        checkpoint=CheckpointConfig(at_end=False),
        trainer=SFTTrainerConfig(
            total_steps=STEPS,
            samples_per_step=SAMPLES,
            validate_every_steps=5,
            output_dir=str(tmp_path_factory.mktemp("sft")),
        ),
        tracking=TrackingConfig(loggers=["jsonl"]),
        device=Device.cpu,
    )


@pytest.fixture(scope="module")
def finished(ray_cluster: None, config: SFTConfig) -> Finished:
    return run_sft(config)


def conversation(number: int) -> list[dict[str, str]]:
    turns = [
        ("user", f"{number}="),
        ("assistant", f"{number + 1}"),
        ("user", "="),
        ("assistant", f"{number % 10}+"),
    ]
    return [{"role": role, "content": content} for role, content in turns]


def dataset(config: SFTConfig, files: list[str]) -> SFTDataset:
    return SFTDataset(files, load_tokenizer(config.model.path), SFTDataConfig(max_length=MAX_LENGTH))


def answer_losses(folder: str | Path, batch: DataProto) -> list[float]:
    """Return the loss of each answer token, computed by Hugging Face. The labels are set by hand: the tokens
    between <model> and <end>, including the latter."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opening = SYMBOLS.index("<model>")
    end = SYMBOLS.index("<end>")
    losses = []

    for padded, mask in zip(batch.tensors["input_ids"], batch.tensors["attention_mask"].bool(), strict=True):
        ids = padded[mask]
        is_answer = False
        labels = torch.full_like(ids, -100)
        for place, token in enumerate(ids.tolist()):
            if is_answer:
                labels[place] = token
            is_answer = token == opening or (is_answer and token != end)
        with torch.no_grad():
            loss = model(ids[None], labels=labels[None]).loss
        losses += [float(loss)] * int((labels != -100).sum())

    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_loss_is_hugging_faces_over_answer_tokens(config: SFTConfig, finished: Finished) -> None:
    loader = BatchLoader(
        dataset(config, config.data.train_files), SAMPLES, shuffle=True, seed=config.data.seed
    )
    first = next(loader)
    answers = first.tensors["response_mask"].int()
    assert (answers.diff(dim=1) == 1).any(), "a chat of two answers is among them"
    assert finished.metrics[0]["sft/loss"] == pytest.approx(
        mean(answer_losses(config.model.path, first)), rel=1e-5
    )
    assert finished.metrics[0]["num_tokens"] == int(first.tensors["attention_mask"].sum())


def test_the_loss_falls(finished: Finished) -> None:
    assert [line["step"] for line in finished.metrics] == list(range(1, STEPS + 1))
    losses = [line["sft/loss"] for line in finished.metrics]
    assert mean(losses[-3:]) < 0.7 * losses[0]

    for line in finished.metrics:
        assert {
            "sft/grad_norm",
            "sft/lr",
            "timing_s/step",
            "timing_s/update_actor",
            "perf/throughput",
        } <= line.keys()


def test_the_validation_loss_is_hugging_faces(config: SFTConfig, finished: Finished) -> None:
    assert [line["step"] for line in finished.metrics if "val/loss" in line] == [5, 10, STEPS]
    held_out = dataset(config, config.data.val_files)
    assert len(held_out) % SAMPLES  # the last batch is smaller
    losses = [loss for batch in one_pass(held_out, SAMPLES) for loss in answer_losses(finished.policy, batch)]
    assert finished.metrics[-1]["val/loss"] == pytest.approx(mean(losses), rel=1e-4)
