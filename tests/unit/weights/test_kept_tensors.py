"""Layers that predict further tokens and vision towers are copied from the original folder, whatever is
trained or converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.cli.main import main
from megarl.models.families import read_architecture
from megarl.models.fp8 import scale_name
from megarl.weights.hf_folder import write_kept_tensors_and_index
from megarl.weights.kept_tensors import read_kept_tensors
from megarl.weights.tensors import WeightTransferError
from tests.families import example_config
from tests.unit.weights.block_fp8 import dequantized_by_hand
from tests.unit.weights.kept_tensors import (
    INDEX,
    NUM_LAYERS,
    SHAPES,
    Tensors,
    indexed,
    same_bits,
    set_field,
    write_files,
    write_original,
)

FP8 = torch.float8_e4m3fn


def promised(folder: Path) -> int | None:
    return json.loads((folder / "config.json").read_text()).get("num_nextn_predict_layers")


def without_kept(tensors: Tensors, family: str) -> Tensors:
    return {name: value for name, value in tensors.items() if name not in SHAPES[family]}


@pytest.mark.parametrize("family", SHAPES)
def test_conversion_there_and_back_keeps_all_bits(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The size of files splits the layers."""
    expected = write_original(tmp_path / "hf", family)
    hf, there, back = (str(tmp_path / name) for name in ("hf", "there", "back"))
    sizes = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    assert main(["convert", "hf-to-megatron", "--input", hf, "--output", there, *sizes]) == 0
    to_hf = ["convert", "megatron-to-hf", "--input", there, "--output", back, "--config", hf]
    assert main([*to_hf, "--max-shard-size", "10KB"]) == 0

    assert capsys.readouterr().err == ""
    assert len(list((tmp_path / "back").glob("kept-*.safetensors"))) > 1
    assert same_bits(indexed(tmp_path / "back"), expected)
    sizes_of_all = sum(value.nbytes for value in expected.values())
    assert json.loads((tmp_path / "back" / INDEX).read_text())["metadata"] == {"total_size": sizes_of_all}
    assert promised(tmp_path / "back") == promised(tmp_path / "hf")
    assert main(["convert", "verify", hf, back]) == 0
    assert_transformers_loads(tmp_path / "back", tmp_path / "hf")


def assert_transformers_loads(folder: Path, original: Path) -> None:
    """Transformers ignores what is kept."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert all(name.startswith((f"model.layers.{NUM_LAYERS}.", "mtp.")) for name in info["unexpected_keys"])
    expected = AutoModelForCausalLM.from_pretrained(original, dtype="auto")
    assert same_bits(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("family", SHAPES)
def test_without_the_original_folder_they_are_not_written(
    tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_original(tmp_path / "hf", family)
    there, back = tmp_path / "there", tmp_path / "back"
    layout = Layout(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        virtual_pipeline_parallel_size=None,
        data_parallel_size=1,
    )
    write_distributed(open_model(tmp_path / "hf"), there, layout)
    assert main(["convert", "megatron-to-hf", "--input", str(there), "--output", str(back)]) == 0

    (line,) = capsys.readouterr().err.splitlines()
    assert "is written without the layers that predict further tokens" in line
    assert line.endswith("pass --config HF_DIR, the folder of the original model")
    assert same_bits(load_file(back / "model.safetensors"), without_kept(expected, family))
    assert [path.name for path in back.glob("*.safetensors*")] == ["model.safetensors"]
    assert not promised(back)
    assert_transformers_loads(back, tmp_path / "hf")


def test_a_single_file_gets_a_second_one(tmp_path: Path) -> None:
    """The index lists both files. Transformers would read a `model.safetensors` without it."""
    expected = write_original(tmp_path / "hf", "deepseek_v3")
    hf, converted = (str(tmp_path / name) for name in ("hf", "x"))
    assert main(["convert", "megatron-to-hf", "--input", hf, "--output", converted]) == 0
    assert {path.name for path in (tmp_path / "x").glob("*.safetensors")} == {
        "model-00001-of-00001.safetensors",
        "kept.safetensors",
    }
    assert same_bits(indexed(tmp_path / "x"), expected)
    assert_transformers_loads(tmp_path / "x", tmp_path / "hf")


def test_transformers_loads_the_tower_of_a_small_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = AutoModelForImageTextToText.from_config(example_config("qwen3_5"), dtype=torch.float32)
    original.save_pretrained(tmp_path / "hf")
    hf, converted = (str(tmp_path / name) for name in ("hf", "x"))
    assert main(["convert", "megatron-to-hf", "--input", hf, "--output", converted]) == 0
    loaded = AutoModelForImageTextToText.from_pretrained(converted, dtype="auto")
    assert same_bits(loaded.state_dict(), original.state_dict())


def test_folders_for_engines_do_not_have_them(tmp_path: Path) -> None:
    expected = write_original(tmp_path / "hf", "glm4_moe")
    write_hugging_face(open_model(tmp_path / "hf"), tmp_path / "engine")
    assert same_bits(load_file(tmp_path / "engine" / "model.safetensors"), without_kept(expected, "glm4_moe"))
    assert promised(tmp_path / "engine") == 0


def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    expected = write_original(tmp_path / "hf", "glm4_moe")
    architecture = read_architecture(str(tmp_path / "hf"))
    dtype = torch.bfloat16
    assert read_kept_tensors(tmp_path / "hf", architecture, "value", dtype) is None

    with pytest.raises(WeightTransferError, match="without block scales.*--dtype bfloat16"):
        read_kept_tensors(tmp_path / "hf", architecture, "lm", FP8)
    write_files(tmp_path / "hf", [without_kept(expected, "glm4_moe")])
    with pytest.raises(WeightTransferError, match=f"=1, but layer {NUM_LAYERS} is not stored"):
        read_kept_tensors(tmp_path / "hf", architecture, "lm", dtype)
    (tmp_path / "hf" / INDEX).unlink()
    with pytest.raises(WeightTransferError, match=r"no model\.safetensors and no"):
        read_kept_tensors(tmp_path / "hf", architecture, "lm", dtype)

    set_field(tmp_path / "hf", 0)
    assert read_kept_tensors(tmp_path / "hf", read_architecture(str(tmp_path / "hf")), "lm", dtype) is None


def test_layers_that_are_not_stored_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers writes such folders: it ignores the layers, but keeps the field."""
    tensors = write_original(tmp_path / "hf", "glm_moe_dsa")
    after_last = f"model.layers.{NUM_LAYERS}."
    stored = {name: value for name, value in tensors.items() if not name.startswith(after_last)}
    write_files(tmp_path / "hf", [stored])
    hf, converted = (str(tmp_path / name) for name in ("hf", "x"))
    assert main(["convert", "megatron-to-hf", "--input", hf, "--output", converted]) == 0

    (line,) = capsys.readouterr().err.splitlines()
    assert "is written without the layers that predict further tokens: " in line
    assert line.endswith(f"layer {NUM_LAYERS} is not stored")
    assert same_bits(load_file(tmp_path / "x" / "model.safetensors"), stored)
    assert promised(tmp_path / "x") == 0


def test_a_qwen3_next_without_them_has_none(tmp_path: Path) -> None:
    expected = write_original(tmp_path / "hf", "qwen3_next")
    write_files(tmp_path / "hf", [without_kept(expected, "qwen3_next")])
    assert (
        read_kept_tensors(tmp_path / "hf", read_architecture(str(tmp_path / "hf")), "lm", torch.bfloat16)
        is None
    )


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_layers_in_fp8(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    """They are dequantized for a folder without FP8, and copied with their scales otherwise.

    Scales are in another file than the values, and no size is a multiple of the block.
    """
    tensors = write_original(tmp_path / "hf", "deepseek_v3")
    name = f"model.layers.{NUM_LAYERS}.eh_proj.weight"
    generator = torch.Generator().manual_seed(1)
    tensors[name] = (torch.randn(300, 200, generator=generator) * 100).to(FP8)
    scales = (torch.rand(3, 2, generator=generator) + 0.1).to(scale_dtype)
    write_files(tmp_path / "hf", [tensors, {scale_name(name): scales}])
    layers = {name: tensors[name] for name in SHAPES["deepseek_v3"]}
    architecture = read_architecture(str(tmp_path / "hf"))

    for dtype in (torch.bfloat16, torch.float32, FP8):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        kept = read_kept_tensors(tmp_path / "hf", architecture, "lm", dtype)
        assert write_kept_tensors_and_index(folder, [], kept) == ["kept.safetensors"]
        as_written = {name: dequantized_by_hand(tensors[name], scales).to(dtype)}
        if dtype == FP8:
            as_written = {scale_name(name): scales}
        assert same_bits(load_file(folder / "kept.safetensors"), layers | as_written)
