"""Folders in MXFP4 against transformers' own conversion, whole and in slices of shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.config.schema import ParallelConfig
from megarl.machine.errors import ConfigError
from megarl.models.families import FAMILIES, read_architecture
from megarl.models.tensor_table import hf_tensors
from megarl.weights.load import load_into_shards
from megarl.weights.shard_layout import layouts_of, shard_shapes
from tests.unit.checkpoints.convert.test_source import everything

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write(folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder in which blocks and scales are in different files, and return what they mean."""
    folder.mkdir()
    fields = FAMILIES["gpt_oss"].example() | {"num_hidden_layers": 2, "quantization_config": MXFP4}
    (folder / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(0)
    files: list[dict[str, torch.Tensor]] = [{}, {}]
    expected = {}

    for tensor in hf_tensors(read_architecture(str(folder)), "lm"):
        if not tensor.name.endswith("_proj"):
            files[0][tensor.name] = torch.randn(tensor.shape, generator=generator).bfloat16()
            expected[tensor.name] = files[0][tensor.name]
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 132, shape, generator=generator, dtype=torch.uint8)
        files[0][tensor.name + "_blocks"] = blocks
        files[1][tensor.name + "_scales"] = scales
        expected[tensor.name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert expected[tensor.name].shape == tensor.shape

    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return expected


def test_a_folder_is_converted_to_bfloat16(tmp_path: Path) -> None:
    expected = write(tmp_path / "packed")
    write_hugging_face(open_model(tmp_path / "packed"), tmp_path / "plain")
    written = everything(open_model(tmp_path / "plain"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(tensor_parallel_size=2, expert_parallel_size=2)],
    ids=["TP1", "TP2xEP2"],
)
def test_shards_are_those_of_the_converted_folder(tmp_path: Path, parallel: ParallelConfig) -> None:
    write(tmp_path / "packed")
    write_hugging_face(open_model(tmp_path / "packed"), tmp_path / "plain")
    architecture = read_architecture(str(tmp_path / "packed"))
    assert architecture.is_packed
    assert architecture == read_architecture(str(tmp_path / "plain"))

    for layout in layouts_of(architecture, parallel):
        packed, plain = (
            {
                name: torch.full(shape, torch.nan, dtype=torch.bfloat16)
                for name, shape in shard_shapes(architecture, layout).items()
            }
            for _ in range(2)
        )
        load_into_shards(tmp_path / "packed", architecture, layout, packed)
        load_into_shards(tmp_path / "plain", architecture, layout, plain)
        assert all(torch.equal(packed[name], plain[name]) for name in plain)


def test_another_quantization_is_refused(tmp_path: Path) -> None:
    fields = FAMILIES["gpt_oss"].example() | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"quantization_config.*only null and quant_method mxfp4"):
        read_architecture(str(tmp_path))
