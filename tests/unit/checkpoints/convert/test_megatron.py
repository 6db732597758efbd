"""Megatron's own loader accepts what a conversion writes, and what an engine saves can be converted, bitwise
identical, in real ranks."""

from pathlib import Path

import pytest
import torch

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.checkpoints.torch_dist import TorchDistIndex, read_chunk, read_index
from megarl.config.schema import ExpertsConfig, ParallelConfig
from megarl.weights.hf_folder import copy_companions
from tests.ranks import RankPool
from tests.unit.checkpoints.convert.megatron_side import load_strictly, train_and_save_weights
from tests.unit.checkpoints.convert.test_source import everything
from tests.unit.engine.checkpoint_side import Settings
from tests.unit.engine.comparison import max_difference
from tests.unit.engine.models import (
    load_critic,
    load_lm,
    make_batch,
    reference_logits,
    reference_values,
    save_critic,
    save_model,
    scores_of,
)
from tests.unit.engine.rank_side import EXPERT_LAYOUTS, LAYOUTS, merge

ANY_LAYOUT = {**LAYOUTS, **EXPERT_LAYOUTS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen2", "qwen2-tied", "qwen3-tied", "llama-tied", "qwen2_moe", "qwen3_moe", "glm4_moe"):
        save_model(family, root / family)
    save_critic(root / "qwen2", root / "critic")
    return root


def layout_of(parallel: ParallelConfig) -> Layout:
    return Layout(
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_parallel_size=parallel.virtual_pipeline_parallel_size,
        data_parallel_size=1,
    )


# (model, head, written layout, loading layout)
CASES = [
    ("qwen2", "lm", "TP2xPP2", "TP2xPP2"),
    ("qwen2-tied", "lm", "TP2", "PP2xVPP2"),
    ("qwen3-tied", "lm", "PP2xVPP2", "TP2"),
    ("llama-tied", "lm", "TP1", "TP2xPP2"),
    ("critic", "value", "TP2xPP2", "PP2"),
    ("qwen2_moe", "lm", "PP2", "TP2+SPxEP2"),
]


@pytest.mark.parametrize(("model", "head", "written", "loading"), CASES)
def test_megatron_loads_it_strictly_and_computes_what_hugging_face_does_after_the_way_back(
    model: str, head: str, written: str, loading: str, models: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    write_distributed(open_model(models / model), tmp_path / "megatron", layout_of(ANY_LAYOUT[written]))
    write_hugging_face(open_model(tmp_path / "megatron"), tmp_path / "back", max_shard_bytes=10**9)
    batch = make_batch()
    settings = Settings(ANY_LAYOUT[loading], str(models / model), head)
    ranks = rank_pool.run(
        load_strictly,
        world_size=settings.parallel.world_size,
        settings=settings,
        folder=tmp_path / "megatron",
        batch=batch,
    )

    with torch.no_grad():
        if head == "value":
            expected = {"values": reference_values(load_critic(tmp_path / "back"), batch)}
        else:
            expected = scores_of(reference_logits(load_lm(tmp_path / "back"), batch), batch)

    for rank in ranks:
        assert rank.wrong == []
        assert all(max_difference(rank.outputs[key], value) <= 1e-5 for key, value in expected.items())
        assert "contains a model without its training state, so it cannot be resumed" in rank.refusal


def model_part(index: TorchDistIndex) -> dict[str, torch.Tensor]:
    """Return every chunk of the weights, by key and position."""
    return {
        f"{key} {chunk.offsets}": read_chunk(index.folder, chunk)
        for key, tensor in index.tensors.items()
        if not key.startswith("optimizer.")
        for chunk in tensor.chunks
    }


@pytest.mark.parametrize(
    ("model", "head", "layout", "dtype"),
    [
        ("qwen2-tied", "lm", "TP2xPP2", torch.bfloat16),
        ("critic", "value", "PP2xVPP2", torch.float32),
        ("qwen2", "lm", "TP2", torch.float32),
        ("qwen3-tied", "lm", "TP1", torch.float32),
        ("glm4_moe", "lm", "TP2+SPxETP2", torch.bfloat16),
    ],
)
def test_what_an_engine_saved_is_converted_there_and_back(
    model: str, head: str, layout: str, dtype: torch.dtype, models: Path, rank_pool: RankPool, tmp_path: Path
) -> None:
    """Converted back in the same layout, it has the same keys, chunks and objects, except for the optimizer
    and random states."""
    routers = ExpertsConfig(bias_update_rate=0.01)
    settings = Settings(ANY_LAYOUT[layout], str(models / model), head, dtype, routers)
    role = tmp_path / "actor"
    weights = merge(
        rank_pool.run(
            train_and_save_weights, world_size=settings.parallel.world_size, settings=settings, folder=role
        )
    )
    (role / "huggingface").mkdir()
    copy_companions(models / model, role / "huggingface", dtype, "value" if head == "value" else "lm")
    write_hugging_face(open_model(role), tmp_path / "hf")
    found = everything(open_model(tmp_path / "hf"))
    assert found.keys() == weights.keys()
    for name, value in found.items():
        assert torch.equal(value.float(), weights[name])
        assert value.dtype == (torch.float32 if name.endswith("correction_bias") else dtype)
    assert not any(
        torch.equal(value, found[name]) for name, value in everything(open_model(models / model)).items()
    )

    write_distributed(open_model(tmp_path / "hf"), tmp_path / "back", layout_of(settings.parallel))
    saved = read_index(role)
    back = read_index(tmp_path / "back")
    assert back.objects.keys() == {key for key in saved.objects if not key.startswith("rng_state")}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in back.tensors.items()} == {
        key: (tensor.shape, tensor.dtype)
        for key, tensor in saved.tensors.items()
        if not key.startswith("optimizer.")
    }
    one = model_part(saved)
    other = model_part(back)
    assert one.keys() == other.keys()

    for place, value in one.items():
        rows = slice(None)
        # Padding rows have no meaning.
        if "word_embeddings" in place or ("output_layer" in place and head == "lm"):
            rows = slice(max(0, 199 - int(place.split("(")[1].split(",")[0])))
        assert torch.equal(value[rows], other[place][rows]), place
