"""Test writing folders in block-scaled FP8, against whole tensors quantized in float64 and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.machine.errors import CheckpointError
from megarl.models.families import read_architecture
from megarl.models.fp8 import quantized_tensors, scale_name
from megarl.models.tensor_table import hf_tensors
from tests.families import example_config, example_fields
from tests.unit.checkpoints.convert.test_source import everything
from tests.unit.weights.block_fp8 import SIZES, Tensors, stored, write_fp8_folder
from tests.unit.weights.test_quantized_shards import quantized_by_hand

FP8 = torch.float8_e4m3fn
TP2_PP2 = Layout(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    virtual_pipeline_parallel_size=None,
    data_parallel_size=1,
)


def write_plain(folder: Path, family: str, dtype: torch.dtype) -> Tensors:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(example_fields(family, **SIZES, num_hidden_layers=2)))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor.name: (torch.randn(tensor.shape, generator=generator) * 0.02).to(dtype)
        for tensor in hf_tensors(read_architecture(str(folder)), "lm")
    }
    save_file(tensors, folder / "model.safetensors")
    return tensors


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_scales_are_those_of_whole_tensors(
    tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """The source is a checkpoint of four ranks, whose shards end inside blocks."""
    plain = write_plain(tmp_path / "plain", family, dtype)
    write_distributed(open_model(tmp_path / "plain"), tmp_path / "megatron", TP2_PP2)
    num_files, _ = write_hugging_face(
        open_model(tmp_path / "megatron"), tmp_path / "fp8", FP8, max_shard_bytes=300_000
    )
    assert num_files > 1

    found = stored(tmp_path / "fp8")
    quantized = quantized_tensors(read_architecture(str(tmp_path / "plain")))
    assert found.keys() == {*plain, *map(scale_name, quantized)}
    for name, tensor in plain.items():
        if name not in quantized:
            wide = name.endswith("e_score_correction_bias")
            assert torch.equal(found[name], tensor.float() if wide else tensor.bfloat16())
            continue
        values, scales = quantized_by_hand(tensor)
        assert torch.equal(bits(found[name]), bits(values)), name
        assert torch.equal(found[scale_name(name)], scales), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_folder_quantized_from_the_dtype_on_the_way_comes_back_bitwise(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    write_plain(tmp_path / "plain", "deepseek_v3", dtype)
    write_hugging_face(open_model(tmp_path / "plain"), tmp_path / "fp8", FP8)
    write_distributed(open_model(tmp_path / "fp8"), tmp_path / "megatron", TP2_PP2, dtype)
    write_hugging_face(open_model(tmp_path / "megatron"), tmp_path / "back", FP8)

    there, back = stored(tmp_path / "fp8"), stored(tmp_path / "back")
    assert there.keys() == back.keys()
    assert all(torch.equal(bits(there[name]), bits(back[name])) for name in there)


def test_scales_of_float32_are_rounded_on_the_way_through_bfloat16_and_values_are_kept(
    tmp_path: Path,
) -> None:
    write_fp8_folder(tmp_path / "fp8", "qwen3")
    write_hugging_face(open_model(tmp_path / "fp8"), tmp_path / "plain")
    write_hugging_face(open_model(tmp_path / "plain"), tmp_path / "back", FP8)
    there, back = stored(tmp_path / "fp8"), stored(tmp_path / "back")
    scales = [name for name in there if name.endswith("_scale_inv")]
    for name in scales:
        value = name.removesuffix("_scale_inv")
        assert torch.equal(bits(there[value]), bits(back[value]))
        assert float((back[name] / there[name] - 1).abs().max()) < 2**-8


def test_scales_that_are_powers_of_two_lose_nothing(tmp_path: Path) -> None:
    write_fp8_folder(tmp_path / "fp8", "qwen3", torch.float8_e8m0fnu)
    write_hugging_face(open_model(tmp_path / "fp8"), tmp_path / "back", FP8)
    there, back = (everything(open_model(tmp_path / name)) for name in ("fp8", "back"))
    assert all(torch.equal(there[name], back[name]) for name in there)


@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "deepseek_v3"])
def test_transformers_loads_what_is_written(tmp_path: Path, family: str) -> None:
    """Without a GPU it dequantizes, for which sizes must be below 128 or multiples of it."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_attention_heads": 16,
        "v_head_dim": 16,
    }
    torch.manual_seed(0)
    config = example_config(
        family, **sizes, num_hidden_layers=2, tie_word_embeddings=False, num_nextn_predict_layers=0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    write_hugging_face(open_model(tmp_path / "plain"), tmp_path / "fp8", FP8)

    fields = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert fields["dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16)
    write_hugging_face(open_model(tmp_path / "fp8"), tmp_path / "back")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    for name, parameter in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name


def test_the_configuration_lists_what_is_not_quantized(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", "qwen2_moe", torch.bfloat16)
    write_hugging_face(open_model(tmp_path / "plain"), tmp_path / "fp8", FP8)
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "fmt": "e4m3",
        "modules_to_not_convert": [
            "model.layers.0.mlp.gate",
            "model.layers.0.mlp.shared_expert_gate",
            "model.layers.1.mlp.gate",
            "model.layers.1.mlp.shared_expert_gate",
            "lm_head",
        ],
    }


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain", "qwen3_next", torch.bfloat16)
    with pytest.raises(CheckpointError, match="has gated delta nets, which are not supported in FP8"):
        write_hugging_face(open_model(tmp_path / "plain"), tmp_path / "fp8", FP8)
    assert not (tmp_path / "fp8").exists()
