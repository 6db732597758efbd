"""Features that other layouts lack: a tied head, QK norms, padded rows, virtual stages, a frozen model, a critic."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.schema import CriticConfig, EngineConfig, MicroBatchConfig, ParallelConfig, Recompute
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import hangs
from megarl.rehearse.dry_run.record import RankRecord, RankRequest
from tests.unit.rehearse.dry_run.runs import TINY, ppo, save_config

pytestmark = pytest.mark.usefixtures("forked_rehearsals")

STAGES = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2, sequence_parallel=True)
HEAD_DIM = 32
# A layer split in two, its norms, and two norms of a head.
LAYER = (64 * (4 + 2 * 2) * HEAD_DIM + 4 * HEAD_DIM * 64 + 3 * 64 * 96) // 2 + 2 * 64 + 2 * HEAD_DIM
VOCABULARY = 256 // 2 * 64


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankRecord]]:
    """Return the records of the first tensor-parallel rank of both stages, in order."""
    folder = Path(save_config(tmp_path_factory.mktemp("qwen") / "model", {**TINY, "num_hidden_layers": 4}))
    fields = json.loads((folder / "config.json").read_text())
    fields |= {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    config = ppo(
        str(folder), replace(STAGES, virtual_pipeline_parallel_size=2), recompute=Recompute.selective
    )
    config = replace(
        config,
        actor=replace(config.actor, micro_batch=MicroBatchConfig(sequences=3)),
        critic=CriticConfig(parallel=STAGES, micro_batch=MicroBatchConfig(max_tokens=500)),
        engine=EngineConfig(packing=False),
    )
    asked = [
        RankRequest(config, role, rank, 2) for role in ("actor", "reference", "critic") for rank in (0, 2)
    ]
    found = list(rehearse_ranks(asked, 1))

    return {role: [found.pop(0), found.pop(0)] for role in ("actor", "reference", "critic")}


def test_no_mistake_is_found(records: dict[str, list[RankRecord]]) -> None:
    for ranks in records.values():
        assert [rank.error for rank in ranks] == [None, None]
        assert hangs(ranks) == []


def test_parameters(records: dict[str, list[RankRecord]]) -> None:
    """Two layers per stage.

    The last stage has a copy of the embedding as its tied head; a critic's head has 64 weights.
    """
    for role in ("actor", "reference"):
        assert [rank.num_parameters for rank in records[role]] == [
            2 * LAYER + VOCABULARY,
            2 * LAYER + VOCABULARY + 64,
        ]
    assert [rank.num_parameters for rank in records["critic"]] == [
        2 * LAYER + VOCABULARY,
        2 * LAYER + 64 + 64,
    ]


def test_phases(records: dict[str, list[RankRecord]]) -> None:
    """A frozen model has no optimizer, and no state except its parameters."""
    for role in ("actor", "critic"):
        assert [phase.name for phase in records[role][0].phases] == [
            "build",
            "score",
            "train",
            "step",
            "offload",
            "restore",
        ]

    frozen = records["reference"][0]
    assert [phase.name for phase in frozen.phases] == ["build", "score", "offload", "restore"]

    # Two chunks, each with its rotary frequencies.
    assert frozen.phases[0].held == 2 * frozen.num_parameters + 4 * HEAD_DIM // 2 * 2


def test_a_tied_embedding_is_summed_over_both_stages(records: dict[str, list[RankRecord]]) -> None:
    for rank in records["actor"]:
        train = next(phase for phase in rank.phases if phase.name == "train")
        (summed,) = [call for call in train.collectives if call.group == "EMBEDDING_GROUP"]
        assert (summed.kind, summed.dtype, summed.elements, summed.ranks) == (
            "all_reduce",
            "float32",
            VOCABULARY,
            (0, 2),
        )
