"""Dry runs with options of Megatron-Core: memory that the plan counts, and combinations that Megatron refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.roles import model_roles
from megarl.config.schema import MegatronConfig, PPOConfig
from megarl.config.validate import read_architectures
from megarl.rehearsal.prediction import predicted_memory
from megarl.rehearsal.processes import rehearse_ranks
from megarl.rehearsal.record import RankRecord, RankRequest
from tests.unit.rehearsal.memory_cases import beyond_bounds
from tests.unit.rehearsal.runs import SMALL, TINY, ppo, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    """A model whose state is larger than its activations."""
    folder: Path = tmp_path_factory.mktemp("options") / "model"
    return ppo(save_config(folder, {**TINY, "vocab_size": 4096}), SMALL)


def with_options(run: PPOConfig, options: MegatronConfig) -> PPOConfig:
    return replace(run, actor=replace(run.actor, megatron=options))


def rehearse(*configs: PPOConfig) -> list[RankRecord]:
    return list(rehearse_ranks([RankRequest(config, "actor", 0, 2) for config in configs], 1))


def problems(config: PPOConfig, record: RankRecord) -> list[str]:
    role = model_roles(config)[0]
    return beyond_bounds(record, predicted_memory(config, role, read_architectures(config)[0]["actor"], 0))


def test_bfloat16_gradients_are_counted(run: PPOConfig) -> None:
    """The gradient buffers shrink by two bytes per parameter; the step has float32 copies of its own shard."""
    half = with_options(run, MegatronConfig(ddp={"grad_reduce_in_fp32": False}))
    usual, shrunk = rehearse(run, half)
    assert problems(run, usual) == []
    assert problems(half, shrunk) == []

    # Megatron pads its buffers.
    built, smaller = (record.phases[0].held for record in (usual, shrunk))
    assert built - smaller == pytest.approx(2 * usual.num_parameters, rel=0.02)

    # The plan of the one run is wrong for the other.
    assert problems(run, shrunk) != []


def test_what_megatron_refuses_is_found(run: PPOConfig) -> None:
    """The flush of a warm-up requires interleaved stages, which this layout does not have."""
    (record,) = rehearse(
        with_options(run, MegatronConfig(transformer={"overlap_p2p_comm_warmup_flush": True}))
    )
    assert record.error is not None
    assert "overlap_p2p_comm_warmup_flush=True" in record.error
    assert record.phases == ()
