"""All ranks of a small layout: what they hold, send and wait for equals calculations by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest

from megarl.config.layers import has_transformer_engine_modules
from megarl.config.schema import EngineConfig, Layers
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs, rounded_sums
from megarl.rehearse.dry_run.record import Collective, PhaseRecord, RankRecord
from tests.unit.rehearse.dry_run.runs import RESPONSE, ROWS, SMALL, TINY, TOKENS, ppo, requests, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

# The layers of each stage.
MICRO_BATCHES = 2
LAYERS = 1
HIDDEN = 64
BFLOAT16 = 2
FLOAT32 = 4
# Queries 64 x 64, keys and values 64 x 32 each, output 64 x 64, gate, up and down 64 x 96 each; split in two.
# Two norms, which are replicated.
LAYER = (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96) // 2 + 2 * 64
VOCABULARY = 256 // 2 * 64  # padded, and split in two
PARAMETERS = {0: LAYERS * LAYER + VOCABULARY, 1: LAYERS * LAYER + VOCABULARY + 64}
# Megatron's buffers end at a multiple of 128 elements for each replica.
PADDED = {0: 23680, 1: 23808}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RankRecord]:
    config = ppo(save_config(tmp_path_factory.mktemp("tiny") / "model", TINY), SMALL)
    config = replace(config, engine=EngineConfig(layers=Layers.local, log_prob_chunk_tokens=128))
    return sorted(rehearse_ranks(requests(config, list(range(8))), 2), key=lambda record: record.rank)


def phases(records: list[RankRecord], name: str) -> Iterator[tuple[RankRecord, PhaseRecord]]:
    for record in records:
        yield record, next(phase for phase in record.phases if phase.name == name)


def calls(phase: PhaseRecord) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return (kind, group, dtype) -> calls, bytes. Groups are identified by their first word."""

    def key(call: Collective) -> tuple[str, str, str]:
        return call.kind, call.group.split("_")[0].lower(), call.dtype

    return {
        name: (len(group := list(of)), sum(call.nbytes for call in group))
        for name, of in groupby(sorted(phase.collectives, key=key), key)
    }


def test_every_rank_ends_without_a_mistake(records: list[RankRecord]) -> None:
    assert [record.error for record in records] == [None] * 8
    assert hangs(records) == []
    assert rounded_sums(records) == []
    assert [(record.tensor_rank, record.data_rank, record.pipeline_rank) for record in records] == [
        (rank % 2, rank // 2 % 2, rank // 4) for rank in range(8)
    ]


def test_parameters_and_memory(records: list[RankRecord]) -> None:
    """Weights have 2 bytes, gradients 4, moments and masters of half of the parameters 12.

    Tensors outside the state are rotary frequencies (8) and a flag of the optimizer (1). Transformer Engine's
    Adam, which Megatron uses with local layers as well, has a flag of its own.
    """
    outside = 9 + has_transformer_engine_modules()
    for record, build in phases(records, "build"):
        stage = record.pipeline_rank
        assert record.num_parameters == PARAMETERS[stage]
        own = min(PADDED[stage] // 2, PARAMETERS[stage] - record.data_rank * PADDED[stage] // 2)
        assert build.held == PADDED[stage] * (BFLOAT16 + FLOAT32) + 12 * own + 4 * outside


def test_state_leaves_and_comes_back(records: list[RankRecord]) -> None:
    """RoPE tables remain and, on a stage that receives, the last micro-batch's hidden states and their gradient."""
    for (record, step), (_, offload), (_, restore) in zip(
        phases(records, "step"), phases(records, "offload"), phases(records, "restore"), strict=True
    ):
        assert 0 < offload.held - 2 * TOKENS * HIDDEN * BFLOAT16 * record.pipeline_rank < 10_000
        assert restore.held == step.held
        assert offload.peak == restore.peak == step.held


def test_collectives_of_the_first_stage(records: list[RankRecord]) -> None:
    """Sums over tensor ranks: one in the embedding and two per layer in forward, two per layer in backward.

    Between stages: hidden states, preceded by their shape.
    """
    hidden = TOKENS * HIDDEN * BFLOAT16
    shape = 3 * 8

    for record, score in phases(records[:4], "score"):
        assert calls(score) == {
            ("all_reduce", "tensor", "bfloat16"): (
                MICRO_BATCHES * (1 + 2 * LAYERS),
                MICRO_BATCHES * (1 + 2 * LAYERS) * hidden,
            ),
            ("send", "pipeline", "bfloat16"): (MICRO_BATCHES, MICRO_BATCHES * hidden),
            ("send", "pipeline", "int64"): (MICRO_BATCHES, MICRO_BATCHES * shape),
        }, record.rank

    for record, train in phases(records[:4], "train"):
        sums = MICRO_BATCHES * (1 + 4 * LAYERS)
        assert calls(train) == {
            ("all_reduce", "tensor", "bfloat16"): (sums, sums * hidden),
            ("send", "pipeline", "bfloat16"): (MICRO_BATCHES, MICRO_BATCHES * hidden),
            ("send", "pipeline", "int64"): (MICRO_BATCHES, MICRO_BATCHES * shape),
            ("recv", "pipeline", "bfloat16"): (MICRO_BATCHES, MICRO_BATCHES * hidden),
            ("recv", "pipeline", "int64"): (MICRO_BATCHES, MICRO_BATCHES * shape),
            ("reduce_scatter", "data", "float32"): (1, PADDED[0] * FLOAT32),
        }, record.rank


def test_collectives_of_the_last_stage(records: list[RankRecord]) -> None:
    """Log-probs over the vocabulary: for each chunk of 128 tokens the maximum logit, then four float32 sums.

    Backward has one sum of the head's gradient of the hidden states. The last layer's MLP has two, for the
    predicting tokens only.
    """
    hidden = TOKENS * HIDDEN * BFLOAT16
    predicting = ROWS * RESPONSE * HIDDEN * BFLOAT16
    chunks = ROWS * RESPONSE // 128
    scores = MICRO_BATCHES * chunks * 128 * (1 + 4) * FLOAT32

    for record, train in phases(records[4:], "train"):
        sums = MICRO_BATCHES * (4 * LAYERS + 1)
        fewer = MICRO_BATCHES * 3
        found = calls(train)
        assert found["all_reduce", "tensor", "bfloat16"] == (
            sums,
            (sums - fewer) * hidden + fewer * predicting,
        ), record.rank
        assert found["all_reduce", "tensor", "float32"] == (2 * chunks * MICRO_BATCHES, scores)
        assert found["reduce_scatter", "data", "float32"] == (1, PADDED[1] * FLOAT32)


def test_a_step_sends_the_norm_and_the_parameters(records: list[RankRecord]) -> None:
    """The squared norm is summed over the ranks once, then checked, reported and used for clipping."""
    for record, step in phases(records, "step"):
        assert calls(step) == {
            ("all_gather", "data", "bfloat16"): (1, PADDED[record.pipeline_rank] * BFLOAT16),
            ("all_reduce", "intra", "float32"): (1, FLOAT32),
        }


def test_products_are_counted(records: list[RankRecord]) -> None:
    """Two per weight and token in forward, four in backward.

    Attention has two products of (tokens, tokens) for each of the rank's two heads.
    """
    linear = LAYERS * (LAYER - 2 * 64)
    attention = LAYERS * ROWS * 2 * 2 * 2 * 16 * 128**2
    for _, score in phases(records[:4], "score"):
        assert score.flops == MICRO_BATCHES * (2 * linear * TOKENS + attention)


def test_waits_are_named(records: list[RankRecord]) -> None:
    """Offloading waits only once for each part that is kept; shape tables are read once per message."""
    for _, offload in phases(records, "offload"):
        assert [(wait.kind, wait.times) for wait in offload.host_syncs] == [("synchronize", 2)]
        assert offload.host_syncs[0].place.startswith("megarl/engine/offload.py:")
    for _, train in phases(records[:4], "train"):
        reads = [
            wait
            for wait in train.host_syncs
            if wait.place.endswith("_communicate_shapes") and wait.kind == "copy"
        ]
        # Sent shapes are copied to the device, received ones from it.
        assert sum(wait.times for wait in reads) == 2 * MICRO_BATCHES
