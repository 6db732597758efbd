"""Test folders in block-scaled FP8: reading whole tensors and slices of shards, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.cli.run.named_model import find_model, hugging_face_folder
from megarl.config.schema import Device, DType, ModelConfig, ParallelConfig, RolloutConfig
from megarl.machine.errors import ConfigError
from megarl.models.families import read_architecture
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import check_headers
from megarl.weights.safetensors_file import LazyTensor, dequantize
from megarl.weights.shard_layout import layouts_of, shard_shapes
from megarl.weights.tensors import TensorSlice, WeightTransferError
from tests.families import example_fields
from tests.unit.checkpoints.convert.test_source import everything
from tests.unit.weights.block_fp8 import (
    FIELD,
    Tensors,
    dequantized_by_hand,
    stored,
    write_files,
    write_fp8_folder,
)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_folder_is_converted_to_bfloat16(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    expected = write_fp8_folder(tmp_path / "fp8", "deepseek_v3", scale_dtype)
    source = open_model(tmp_path / "fp8")
    assert source.layout == "2 safetensors files, in block-scaled FP8"
    write_hugging_face(source, tmp_path / "plain", max_shard_bytes=200_000)

    written = everything(open_model(tmp_path / "plain"))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value.bfloat16()) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_products_in_float32_are_not_rounded_to_bfloat16_first(tmp_path: Path) -> None:
    expected = write_fp8_folder(tmp_path / "fp8", "qwen3")
    write_hugging_face(open_model(tmp_path / "fp8"), tmp_path / "plain", torch.float32)
    written = everything(open_model(tmp_path / "plain"))
    assert all(torch.equal(written[name], value.float()) for name, value in expected.items())


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3", ParallelConfig(tensor_parallel_size=2)),
        ("qwen3_moe", ParallelConfig(tensor_parallel_size=2, expert_parallel_size=2)),
        ("glm4_moe", ParallelConfig(tensor_parallel_size=2, expert_tensor_parallel_size=2)),
        ("deepseek_v3", ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2)),
    ],
    ids=["TP2", "TP2xEP2", "TP2xETP2", "TP4xPP2"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards_are_those_of_the_converted_folder(
    tmp_path: Path, family: str, parallel: ParallelConfig, dtype: torch.dtype
) -> None:
    """No bound of a shard is one of a block."""
    write_fp8_folder(tmp_path / "fp8", family)
    write_hugging_face(open_model(tmp_path / "fp8"), tmp_path / "plain", dtype)
    architecture = read_architecture(str(tmp_path / "fp8"))
    assert architecture == read_architecture(str(tmp_path / "plain"))

    for layout in layouts_of(architecture, parallel):
        shapes = shard_shapes(architecture, layout)
        of_fp8, of_plain = (
            {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}
            for _ in range(2)
        )
        load_into_shards(tmp_path / "fp8", architecture, layout, of_fp8)
        load_into_shards(tmp_path / "plain", architecture, layout, of_plain)
        assert all(torch.equal(of_fp8[name], of_plain[name]) for name in of_plain)


def test_any_slice_of_any_view_equals_that_of_the_whole() -> None:
    numbers = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for view in ((300, 200), (1, 300, 200), (6, 50, 200), (3, 2, 50, 200), (300, 4, 50), (5, 60, 2, 100)):
        values = (torch.randn(300, 200, generator=generator) * 100).to(torch.float8_e4m3fn)
        scales = torch.rand(3, 2, generator=generator)
        whole = dequantized_by_hand(values, scales).view(view)
        matrix = LazyTensor(partial(dequantize, values, scales, torch.float32), (300, 200), view)
        for _ in range(30):
            bounds = [sorted(numbers.sample(range(size + 1), 2)) for size in view]
            index = tuple(slice(start, stop) for start, stop in bounds)
            assert torch.equal(matrix[index], whole[index])


def test_reading_takes_a_few_million_elements_at_a_time() -> None:
    sizes = []

    class Recording:
        def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
            sizes.append(TensorSlice(*zip(*((each.start, each.stop) for each in index), strict=True)).volume)
            return torch.ones([each.stop - each.start for each in index]).to(torch.float8_e4m3fn)

    shape = (3000, 2000)
    matrix = dequantize(Recording(), torch.ones(24, 16), torch.bfloat16, TensorSlice.whole(shape))
    assert matrix.sum(dtype=torch.float64) == 6e6
    assert sum(sizes) == 6_000_000
    assert max(sizes) <= 2**20


def test_engines_compute_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    expected = write_fp8_folder(tmp_path / "fp8", "qwen3")
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(tmp_path / "fp8"), dtype=DType.float32),
        rollout=RolloutConfig(),
        device=Device.cpu,
        returns_routes=False,
    )
    engine = HFEngine(spec)
    assert {name: value.shape for name, value in engine.parameters.items()} == {
        name: value.shape for name, value in expected.items()
    }
    assert {value.dtype for value in engine.parameters.values()} == {torch.float32}

    # Engines that read a folder get a converted one.
    with hugging_face_folder(find_model(tmp_path / "fp8"), torch.bfloat16, tmp_path) as folder:
        read = stored(folder)
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], value.bfloat16()) for name, value in expected.items())


def without_a_scale(files: Tensors) -> None:
    del files["model.layers.1.mlp.down_proj.weight_scale_inv"]


def with_scales_of_other_blocks(files: Tensors) -> None:
    files["model.layers.1.mlp.down_proj.weight_scale_inv"] = torch.ones(3, 6)


def with_integer_scales(files: Tensors) -> None:
    files["model.layers.1.mlp.down_proj.weight_scale_inv"] = torch.ones(2, 3, dtype=torch.int32)


def with_a_scale_too_many(files: Tensors) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    files[name] = files[name].bfloat16()


def with_a_quantized_norm(files: Tensors) -> None:
    files["model.norm.weight"] = torch.ones(192).to(torch.float8_e4m3fn)
    files["model.norm.weight_scale_inv"] = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            without_a_scale,
            "down_proj.weight in 0.safetensors is stored as F8_E4M3, but "
            "model.layers.1.mlp.down_proj.weight_scale_inv, the scales of its blocks, is missing",
        ),
        (
            with_scales_of_other_blocks,
            r"weight_scale_inv in 0.safetensors has shape \(3, 6\), but blocks of 128 x 128 of shape "
            r"\(192, 344\) have \(2, 3\)",
        ),
        (with_integer_scales, "weight_scale_inv in 0.safetensors is stored as I32, not one of F32, BF16"),
        (with_a_scale_too_many, "down_proj.weight_scale_inv in .* is not a tensor of this architecture"),
        (with_a_quantized_norm, "model.norm.weight in .* is stored as F8_E4M3 with 1 axes; only matrices"),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Callable[[Tensors], None], problem: str) -> None:
    folder = tmp_path / "fp8"
    write_fp8_folder(folder, "qwen3")
    tensors = stored(folder)
    change(tensors)
    (folder / "1.safetensors").unlink()
    write_files(folder, [tensors])
    for check in (
        partial(check_headers, folder, read_architecture(str(folder)), "lm", trains=True),
        partial(open_model, folder),
    ):
        with pytest.raises(WeightTransferError, match=problem):
            check()


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ({"quant_method": "mxfp8"}, "'quant_method' is 'mxfp8', but only 'fp8' is supported; convert the"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'quant_method' is 'modelopt', but only"),
        ({"quant_method": "compressed-tensors"}, "'quant_method' is 'compressed-tensors', but only"),
        ({"quant_method": "mxfp4"}, "'quant_method' is 'mxfp4', but only"),
        (FIELD | {"weight_block_size": [1, 32]}, r"'weight_block_size' is [1, 32], but only [128, 128]"),
        ({"quant_method": "fp8"}, "'weight_block_size' is None, but only [128, 128]"),
        (FIELD | {"fmt": "e5m2"}, "'fmt' is 'e5m2', but only 'e4m3'"),
        (FIELD | {"activation_scheme": "static"}, "'activation_scheme' is 'static', but only 'dynamic'"),
        (FIELD | {"kv_cache_scheme": "fp8"}, "'kv_cache_scheme' is 'fp8', and megarl does not know"),
        ("fp8", "'quantization_config' is 'fp8'; must be an object"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, field: Any, problem: str) -> None:
    fields = example_fields("deepseek_v3") | {"quantization_config": field}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as refused:
        read_architecture(str(tmp_path))
    (found,) = refused.value.problems
    assert problem in found
