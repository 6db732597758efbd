"""Tiny Hugging Face folders in block-scaled FP8, with what they stand for, computed in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megarl.models.families import read_architecture
from megarl.models.fp8 import BLOCK, quantized_tensors, scale_name, scale_shape
from megarl.models.tensor_table import hf_tensors
from tests.families import example_fields

# As DeepSeek-V3.1 has it.
FIELD = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}
# The sizes of no matrix are multiples of the block, and those of shards are not either.
SIZES = {"hidden_size": 192, "intermediate_size": 344, "head_dim": 40, "moe_intermediate_size": 88}
Tensors = dict[str, torch.Tensor]


def dequantized_by_hand(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply each block of a matrix by its scale, in float64, and round to float32."""
    found = torch.empty(values.shape)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            where = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            found[where] = (values[where].double() * scales[row, column].double()).float()
    return found


def write_fp8_folder(
    folder: Path, family: str, scale_dtype: torch.dtype = torch.float32, **changes: Any
) -> Tensors:
    """Write a folder whose scales are in another file than the values, and return what it stands for.

    Matrices are float32 in the result, and the other tensors bfloat16.
    """
    folder.mkdir()
    fields = example_fields(family, **(SIZES | {"num_hidden_layers": 2} | changes))
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": FIELD}))
    architecture = read_architecture(str(folder))
    quantized = quantized_tensors(architecture)
    generator = torch.Generator().manual_seed(0)
    files: list[Tensors] = [{}, {}]
    expected = {}

    for tensor in hf_tensors(architecture, "lm"):
        random = torch.randn(tensor.shape, generator=generator)
        if tensor.name not in quantized:
            files[0][tensor.name] = expected[tensor.name] = random.bfloat16()
            continue
        values = (random * 150).clamp(-448, 448).to(torch.float8_e4m3fn)
        # Each block has the largest value, so that its scale can be found again.
        values[::BLOCK, ::BLOCK] = 448.0
        scales = torch.rand(scale_shape(tensor.shape), generator=generator) * 1e-3 + 1e-4
        scales = scales.to(scale_dtype)
        files[0][tensor.name] = values
        files[1][scale_name(tensor.name)] = scales
        expected[tensor.name] = dequantized_by_hand(values, scales)

    write_files(folder, files)
    return expected


def write_files(folder: Path, files: list[Tensors]) -> None:
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def stored(folder: Path) -> Tensors:
    """Return all tensors in the files of a folder, as they are stored."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
