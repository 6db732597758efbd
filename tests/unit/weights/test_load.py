"""Loading, against shards made by slow loops in every layout, and the slices of tensors in a shard."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.checkpoints.convert.hugging_face import open_hugging_face
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.shard_layout import ShardLayout, model_layouts, shard_shapes
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import Part, TensorSlice, tiling_fault
from tests.unit.checkpoints.convert.test_source import everything
from tests.unit.weights.models import (
    PADDED_VOCAB,
    architecture_of,
    random_model,
    save,
    shards_of,
    stored_state,
)
from tests.unit.weights.transfers import Cut

MODELS = [("qwen2", False), ("qwen2", True), ("qwen3", False), ("llama", True)]
MODELS += [("qwen2_moe", False), ("qwen3_moe", True), ("mixtral", True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("folders")
    return {
        # Half of the folders have several files and an index.
        (family, tied): save(
            random_model(family, tied=tied), root / f"{family}-{tied}", "30KB" if tied else "5GB"
        )
        for family, tied in MODELS
    }


def loaded(
    folder: Path, architecture, layout: ShardLayout, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    parameters = {
        name: torch.full(shape, torch.nan, dtype=dtype)
        for name, shape in shard_shapes(architecture, layout).items()
    }
    load_into_shards(folder, architecture, layout, parameters)
    return parameters


def sub_slices(tensor_slice: TensorSlice) -> list[TensorSlice]:
    """Return the slice, and slices that engines with other layouts need.

    They are rows that begin and end inside a head, and some columns.
    """
    rows = tensor_slice.stops[0] - tensor_slice.starts[0]
    found = [
        tensor_slice,
        tensor_slice.along(0, tensor_slice.starts[0] + rows // 3, tensor_slice.stops[0] - rows // 4),
    ]
    if len(tensor_slice.starts) > 1:
        found.append(found[-1].along(1, tensor_slice.starts[1] + 1, tensor_slice.stops[1] - 2))

    return [part for part in found if part.volume]


@pytest.mark.parametrize(
    "cut",
    [
        Cut(data=2, expert_tensor=2),
        Cut(tensor=2, expert=2),
        Cut(pipeline=2, virtual=2),
        Cut(tensor=2, pipeline=2, expert_tensor=2),
        Cut(tensor=4, expert=4),
    ],
    ids=str,
)
def test_what_is_loaded_is_what_slow_loops_cut_and_is_found_again(folders, cut: Cut) -> None:
    for (family, tied), folder in folders.items():
        architecture = architecture_of(family, tied=tied)
        state = stored_state(random_model(family, tied=tied))
        held: dict[str, set[TensorSlice]] = {}
        for layout in cut.layouts(architecture):
            parameters = loaded(folder, architecture, layout)
            expected = shards_of(state, architecture, layout)
            assert parameters.keys() == expected.keys()
            for name, shard in expected.items():
                assert torch.equal(parameters[name], shard), name
            shards = Shards(parameters=parameters, architecture=architecture, layout=layout)
            for name, slices in held_slices(architecture, layout).items():
                held.setdefault(name, set()).update(slices)
                for part in (part for tensor_slice in slices for part in sub_slices(tensor_slice)):
                    elements = torch.cat([region.reshape(-1) for region in shards.regions(Part(name, part))])
                    assert torch.equal(elements, state[name][part.index].reshape(-1)), (name, str(part))
        manifest = manifest_of(architecture, torch.float32)
        assert held.keys() == manifest.keys()
        for name, meta in manifest.items():
            assert (
                tiling_fault(meta.shape, sorted(held[name], key=lambda tensor_slice: tensor_slice.starts))
                is None
            ), name


def test_fused_experts_are_read_each_by_itself(tmp_path: Path) -> None:
    """Experts are fused as in transformers' memory. Here, half of each of two experts is read."""
    model = random_model("qwen3_moe")
    architecture = architecture_of("qwen3_moe")
    save_file(
        {name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors"
    )
    layout = Cut(data=4, expert=2, expert_tensor=2).layouts(architecture)[3]
    parameters = loaded(tmp_path, architecture, layout)
    expected = shards_of(stored_state(model), architecture, layout)
    assert any("local_experts.3" in name for name in expected)
    assert all(torch.equal(parameters[name], shard) for name, shard in expected.items())
    model.config.save_pretrained(tmp_path)
    found = everything(open_hugging_face(tmp_path))
    assert found.keys() == stored_state(model).keys()
    assert all(torch.equal(found[name], value) for name, value in stored_state(model).items())


def test_bfloat16_parameters_and_float32_folder(folders) -> None:
    """Loading casts to the parameter's dtype."""
    architecture = architecture_of("qwen3")
    layout = model_layouts(architecture, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)[0]
    shards = Shards(
        parameters=loaded(folders["qwen3", False], architecture, layout, torch.bfloat16),
        architecture=architecture,
        layout=layout,
    )
    state = random_model("qwen3").state_dict()

    for name, (tensor_slice,) in held_slices(architecture, layout).items():
        elements = torch.cat([region.reshape(-1) for region in shards.regions(Part(name, tensor_slice))])
        assert torch.equal(elements, state[name].bfloat16().view(-1)), name
