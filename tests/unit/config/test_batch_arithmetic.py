"""The arithmetic of a run against numbers worked out by hand, and parameter counts against transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megarl.config.batch_arithmetic import (
    RoleArithmetic,
    Row,
    fullest_micro_batch,
    fullest_with_shared_prompt,
    room_of_longest_row,
    work_of_roles,
)
from megarl.config.load import load_config
from megarl.config.memory_sizes import most_checkpoints, state_bytes
from megarl.config.roles import ModelRole, model_roles, role_named
from megarl.config.schema import (
    CheckpointConfig,
    DPOConfig,
    DType,
    KeepBestConfig,
    MicroBatchConfig,
    OptimConfig,
    ParallelConfig,
    PPOConfig,
    SFTConfig,
    TrainerConfig,
)
from megarl.config.validate import read_architectures
from megarl.data.packing import plan_micro_batches
from megarl.models.counts import num_parameters
from megarl.models.families import read_architecture
from tests.unit.config.folders import pair_values, ppo_values, sft_values, write_yaml


def load(folder: Path, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, write_yaml(folder / "run.yaml", ppo_values(folder)), overrides)


def arithmetic(config: PPOConfig) -> list[RoleArithmetic]:
    return work_of_roles(config, read_architectures(config)[0])


def test_ppo_by_hand(tmp_path: Path) -> None:
    run = load(tmp_path)

    # 12 prompts x 4 samples; 3 mini-batches of 16 rows; rows of 16 + 8 tokens.
    assert (run.prompts_per_step, run.samples_per_prompt, run.samples_per_step) == (12, 4, 48)
    assert (run.updates_per_pass, run.max_row_tokens) == (3, 24)
    actor, reference, critic = (
        dataclasses.replace(role, num_parameters=0, state_bytes_per_rank=0) for role in arithmetic(run)
    )
    assert actor == RoleArithmetic(
        role="actor",
        num_parameters=0,
        num_ranks=4,
        num_replicas=2,
        mini_batch_rows=16,
        rows_per_replica=(8, 8),
        # 64 tokens hold 32 of the shortest rows (2 tokens), and 2 of the longest: 8 / 2
        micro_batches=(1, 4),
        optimizer_steps_per_step=6,  # 3 updates x 2 epochs
        optimizer_steps_total=36,  # 10 steps less 4 of critic warm-up
        state_bytes_per_rank=0,
    )
    assert (reference.mini_batch_rows, reference.rows_per_replica, reference.micro_batches) == (
        48,
        (24, 24),
        (1, 1),
    )
    assert (reference.num_ranks, reference.optimizer_steps_per_step, reference.optimizer_steps_total) == (
        4,
        0,
        0,
    )

    # 16 rows by 3
    assert (critic.num_ranks, critic.rows_per_replica, critic.micro_batches) == (2, (16, 16), (6, 6))
    assert (critic.optimizer_steps_per_step, critic.optimizer_steps_total) == (6, 60)


def test_rows_that_do_not_divide_by_the_replicas(tmp_path: Path) -> None:
    actor = arithmetic(load(tmp_path, "actor.parallel.data_parallel_size=3"))[0]
    assert actor.rows_per_replica == (5, 6)  # 16 rows over 3
    assert actor.micro_batches == (1, 3)


def test_a_virtual_pipeline_runs_a_multiple_of_its_stages(tmp_path: Path) -> None:
    config = load(
        tmp_path, "critic.parallel.virtual_pipeline_parallel_size=2", "critic.micro_batch.sequences=6"
    )
    critic = arithmetic(config)[2]
    assert critic.micro_batches == (4, 4)  # ceil(16 / 6) = 3, and the pipeline has 2 stages


@pytest.mark.parametrize("length", [2, 24])
def test_micro_batches_are_what_the_packer_plans(tmp_path: Path, length: int) -> None:
    actor = arithmetic(load(tmp_path))[0]
    planned = plan_micro_batches([length] * actor.mini_batch_rows, actor.num_replicas, max_tokens=64)
    assert planned.num_micro_batches == actor.micro_batches[0 if length == 2 else 1]


def test_sft_by_hand(tmp_path: Path) -> None:
    config = load_config(SFTConfig, write_yaml(tmp_path / "sft.yaml", sft_values(tmp_path)))
    assert (config.samples_per_step, config.updates_per_pass, config.max_row_tokens) == (8, 1, 32)
    (actor,) = work_of_roles(config, read_architectures(config)[0])
    assert actor.optimizer_steps_total == 5


def test_pairs_by_hand(tmp_path: Path) -> None:
    """Three pairs are six rows. On two replicas, the fuller one has two pairs.

    A pair of 1 prompt token and two answers of 31 has 63 tokens, so that each is a micro-batch of 64.
    """
    path = write_yaml(tmp_path / "dpo.yaml", pair_values(tmp_path))
    config = load_config(DPOConfig, path, ["actor.parallel.data_parallel_size=2"])
    assert (config.samples_per_step, config.updates_per_pass) == (6, 1)
    (actor,) = work_of_roles(config, read_architectures(config)[0])
    assert (actor.mini_batch_rows, actor.rows_per_replica, actor.optimizer_steps_total) == (6, (2, 4), 5)
    assert actor.micro_batches == (1, 2)
    (role,) = model_roles(config)
    assert room_of_longest_row(config, role) == 63
    architecture = read_architectures(config)[0]["actor"]
    assert fullest_micro_batch(config, role, architecture, trains=True) == [Row(1, 31), Row(1, 31)]


@pytest.mark.parametrize(
    ("overrides", "largest", "sharing"),
    [
        # Two responses fill what a prompt of 16 leaves of 24, 12 on each of two ranks, and 20 tokens.
        (["actor.micro_batch.max_tokens=24"], [Row(16, 8)], [Row(16, 4)] * 2),
        (
            ["actor.micro_batch.max_tokens=12", "actor.parallel.context_parallel_size=2"],
            [Row(16, 8)],
            [Row(16, 4)] * 2,
        ),
        (["actor.micro_batch.max_tokens=32", "data.max_response_length=16"], [Row(16, 16)], [Row(16, 8)] * 2),
        # A limit in rows counts rows with different prompts.
        (
            ["actor.micro_batch.max_tokens=null", "actor.micro_batch.sequences=3"],
            [Row(16, 8, 0), Row(16, 8, 1), Row(16, 8, 2)],
            [Row(16, 8, 1), Row(16, 8, 1), Row(16, 8, 2)],
        ),
        (["actor.micro_batch.max_tokens=null", "actor.micro_batch.sequences=1"], [Row(16, 8)], None),
        # Rows of the largest micro-batch share a prompt already, or no rows do.
        (["actor.micro_batch.max_tokens=32"], [Row(16, 8), Row(16, 8)], None),
        (["actor.micro_batch.max_tokens=24", "engine.share_prompts=false"], [Row(16, 8)], None),
    ],
)
def test_the_largest_micro_batch_with_a_shared_prompt(
    tmp_path: Path, overrides: list[str], largest: list[Row], sharing: list[Row] | None
) -> None:
    config = load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path)), overrides)
    role = model_roles(config)[0]
    architecture = read_architectures(config)[0]["actor"]
    assert fullest_micro_batch(config, role, architecture, trains=True) == largest
    assert fullest_with_shared_prompt(config, role, architecture, trains=True) == sharing


def test_state_of_a_rank_by_hand(tmp_path: Path) -> None:
    """2,000 parameters are sharded over TP 2, and the optimizer state over DP 2.

    In bfloat16, weights have 2 and gradients 4 bytes each, moments 8 and the master weights 4.
    """
    # No layer: the embedding of 49 x 40, tied, and the last norm of 40.
    read = read_architecture(ppo_values(tmp_path)["model"]["path"])
    tiny = dataclasses.replace(
        read, num_hidden_layers=0, hidden_size=40, vocab_size=49, tie_word_embeddings=True
    )
    assert num_parameters(tiny) == 2000
    parallel = ParallelConfig(tensor_parallel_size=2, data_parallel_size=2)
    role = ModelRole(
        **vars(role_named("actor")),
        path="",
        path_key="",
        parallel=parallel,
        micro_batch=MicroBatchConfig(sequences=1),
        optim=OptimConfig(),
    )
    assert state_bytes(DType.bfloat16, role, tiny) == 1000 * (2 + 4 + (8 + 4) // 2)
    assert state_bytes(DType.float32, role, tiny) == 1000 * (4 + 4 + 8 // 2)
    assert state_bytes(DType.bfloat16, dataclasses.replace(role, optim=None), tiny) == 1000 * 2


@pytest.mark.parametrize(
    ("checkpoint", "most"),
    [
        (CheckpointConfig(), 1),
        (CheckpointConfig(at_end=False), 0),
        (CheckpointConfig(every_steps=5), 2),  # after 5 and 10
        (CheckpointConfig(every_steps=4, keep=0), 3),  # after 4, 8 and 10
        (CheckpointConfig(every_steps=4, at_end=False, keep=0), 2),
        (CheckpointConfig(every_steps=1), 3),  # two are kept, one is written
        (CheckpointConfig(every_minutes=5, keep=0), 10),
        # the best and the newest, one is written
        (CheckpointConfig(keep_best=KeepBestConfig(metric="val/score/mean"), keep=1), 3),
    ],
)
def test_how_many_checkpoints_ten_steps_have_on_the_disk(checkpoint: CheckpointConfig, most: int) -> None:
    assert most_checkpoints(PPOConfig(checkpoint=checkpoint, trainer=TrainerConfig(total_steps=10))) == most
