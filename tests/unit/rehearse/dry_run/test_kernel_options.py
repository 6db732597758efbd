"""Dry runs with the kernels of `engine.flash_attention`, `cp_comm_type` and `fp32_lm_head`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.schema import CPCommType, EngineConfig, FlashAttention, Layers, ParallelConfig
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.record import RankRecord, RankRequest
from tests.unit.plan.step_time.comparison import EXACT, differences
from tests.unit.rehearse.dry_run.runs import TINY, ppo, requests, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

PARALLEL = ParallelConfig(tensor_parallel_size=2, context_parallel_size=2)
ENGINES = {
    "default": EngineConfig(layers=Layers.local),
    "kernels": EngineConfig(
        layers=Layers.local, flash_attention=FlashAttention.fa4, cp_comm_type=CPCommType.all_gather
    ),
    "head": EngineConfig(layers=Layers.local, fp32_lm_head=True),
    "ring": EngineConfig(layers=Layers.local, cp_comm_type=CPCommType.p2p, share_prompts=False),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankRequest]:
    config = ppo(save_config(tmp_path_factory.mktemp("tiny") / "model", TINY), PARALLEL)
    return {name: requests(replace(config, engine=engine), [0])[0] for name, engine in ENGINES.items()}


@pytest.fixture(scope="module")
def records(asked: dict[str, RankRequest]) -> dict[str, RankRecord]:
    return {name: next(iter(rehearse_ranks([request], 1))) for name, request in asked.items()}


def test_the_time_model_counts_the_same(
    asked: dict[str, RankRequest], records: dict[str, RankRecord]
) -> None:
    assert differences(asked["default"], records["default"], EXACT) == []


def test_kernels_need_no_package_and_change_no_number(records: dict[str, RankRecord]) -> None:
    assert records["kernels"].error is None
    assert records["kernels"].phases == records["default"].phases


def test_logits_in_float32_have_the_same_products_and_no_copy_in_16_bits(
    records: dict[str, RankRecord],
) -> None:
    assert records["head"].error is None
    for got, want in zip(records["head"].phases, records["default"].phases, strict=True):
        assert (got.name, got.flops, got.held) == (want.name, want.flops, want.held)
        assert got.collectives == want.collectives
        assert got.peak <= want.peak


def test_a_ring_needs_transformer_engine(records: dict[str, RankRecord]) -> None:
    assert records["ring"].error is not None
    assert "engine.cp_comm_type=p2p" in records["ring"].error
