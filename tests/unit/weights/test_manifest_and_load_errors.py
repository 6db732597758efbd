"""Faults of a folder. The message names the file and the tensor."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.machine.errors import CheckpointError
from megarl.models.families import FAMILIES
from megarl.weights.checkpoint_index import read_checkpoint_index
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.tensors import WeightTransferError
from tests.families import is_kept
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save, stored_state


def load(
    folder: Path, *, tied: bool = False, head: str = "lm", value_head: str = "stored", num_layers: int = 1
) -> dict[str, torch.Tensor]:
    architecture = architecture_of("qwen2", tied=tied, num_layers=num_layers)
    layout = model_layouts(architecture, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)[0]
    parameters = {
        name: torch.full(shape, 7.0) for name, shape in shard_shapes(architecture, layout, head).items()
    }
    load_into_shards(folder, architecture, layout, parameters, head, value_head)

    return parameters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(random_model("qwen2", num_layers=1), tmp_path / "model")


@pytest.fixture
def tied_folder(tmp_path: Path) -> Path:
    return save(random_model("qwen2", tied=True, num_layers=1), tmp_path / "tied")


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite stored tensors; None removes one. Underscores represent dots in names."""
    path = folder / "model.safetensors"
    tensors = load_file(path)

    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor

    save_file(tensors, path)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_manifest_is_the_model_of_transformers(family: str, tied: bool) -> None:
    model = random_model(family, tied=tied)
    manifest = manifest_of(architecture_of(family, tied=tied), torch.float32)
    assert {name: meta.shape for name, meta in manifest.items()} == {
        name: tuple(value.shape)
        for name, value in stored_state(model).items()
        if not is_kept(name, model.config)
    }


def test_manifest_of_a_critic() -> None:
    manifest = manifest_of(architecture_of("qwen2", tied=True), torch.bfloat16, head="value")
    assert manifest["score.weight"].shape == (1, 32)
    assert "lm_head.weight" not in manifest


def test_missing_extra_and_wrong_shape_are_all_named(folder: Path) -> None:
    edit(
        folder,
        model__norm__weight=None,
        model__layers__0__mlp__gate_proj__weight=torch.zeros(32, 20),
        model__layers__0__self_attn__o_proj__bias=torch.zeros(32),
    )
    with pytest.raises(WeightTransferError) as caught:
        load(folder)
    message = str(caught.value)
    assert "config.json does not match 3 tensors" in message
    assert "model.norm.weight is missing" in message
    assert (
        "model.layers.0.mlp.gate_proj.weight in model.safetensors has shape (32, 20), but config.json implies "
        "(20, 32)" in message
    )
    assert (
        "model.layers.0.self_attn.o_proj.bias in model.safetensors is not a tensor of this architecture"
        in message
    )


def test_quantized_storage_is_refused(folder: Path) -> None:
    edit(folder, model__norm__weight=torch.zeros(32, dtype=torch.int8))
    with pytest.raises(
        WeightTransferError, match=r"model\.norm\.weight in model\.safetensors is stored as I8"
    ):
        load(folder)


def test_rotary_tables_are_ignored(folder: Path) -> None:
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))
    load(folder)


def test_a_tied_model_may_store_its_output_layer_only_if_equal(tied_folder: Path) -> None:
    embedding = load_file(tied_folder / "model.safetensors")["model.embed_tokens.weight"]
    edit(tied_folder, lm_head__weight=embedding.clone())
    load(tied_folder, tied=True)
    different = embedding.clone()
    different[198, 31] += 1e-3
    edit(tied_folder, lm_head__weight=different)

    with pytest.raises(
        WeightTransferError,
        match=r"model\.safetensors: lm_head\.weight differs from model\.embed_tokens\.weight.*set it to",
    ):
        load(tied_folder, tied=True)


def test_an_untied_config_over_tied_weights_is_refused(tied_folder: Path) -> None:
    with pytest.raises(WeightTransferError, match=r"lm_head\.weight is missing .*tie_word_embeddings"):
        load(tied_folder, tied=False)


def test_value_head_stored_or_left_to_the_caller(folder: Path) -> None:
    with pytest.raises(WeightTransferError, match=r"score\.weight is missing .*not serve as a reward model"):
        load(folder, head="value")

    parameters = load(folder, head="value", value_head="initial")
    assert torch.equal(parameters["output_layer.weight"], torch.full((1, 32), 7.0))
    assert not any(
        (tensor == 7.0).any() for name, tensor in parameters.items() if name != "output_layer.weight"
    )
    score = torch.arange(32.0).view(1, 32)
    edit(folder, lm_head__weight=None, score__weight=score)
    assert torch.equal(load(folder, head="value")["output_layer.weight"], score)


def test_truncated_missing_and_corrupt_files(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()

    for damaged in (content[: len(content) // 2], content[:5], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(
            WeightTransferError, match=r"model/model\.safetensors: truncated or not a safetensors file"
        ):
            load(folder)

    path.unlink()
    with pytest.raises(
        WeightTransferError, match=r"model: no model\.safetensors and no model\.safetensors\.index\.json"
    ):
        load(folder)


def test_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    folder = save(random_model("qwen2", num_layers=1), tmp_path / "model", max_shard_size="20KB")
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert read_checkpoint_index(folder)["model.norm.weight"].shape == (32,)
    load(folder)

    files = sorted(set(index["weight_map"].values()))
    moved = dict(index["weight_map"])
    moved["model.norm.weight"] = next(file for file in files if file != moved["model.norm.weight"])
    index_path.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(WeightTransferError, match=r"contains 'model\.norm\.weight', which .* maps to"):
        load(folder)
    index_path.write_text(json.dumps({"weight_map": {**index["weight_map"], "model.extra": files[0]}}))
    with pytest.raises(WeightTransferError, match=rf"{files[0]}: does not contain 'model\.extra'"):
        load(folder)
    index_path.write_text("{}")
    with pytest.raises(WeightTransferError, match=r"index\.json: not a safetensors index"):
        load(folder)
    index_path.write_text(json.dumps(index))
    (folder / files[1]).unlink()
    with pytest.raises(WeightTransferError, match=rf"{files[1]}: file is missing"):
        load(folder)


def test_parameters_that_are_not_the_layouts(folder: Path) -> None:
    architecture = architecture_of("qwen2", num_layers=1)
    layout = model_layouts(architecture, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)[0]
    shapes = shard_shapes(architecture, layout)
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    parameters["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(2)
    parameters["decoder.final_layernorm.weight"] = torch.zeros(31)
    del parameters["output_layer.weight"]
    with pytest.raises(WeightTransferError) as caught:
        load_into_shards(folder, architecture, layout, parameters)
    assert "output_layer.weight is missing" in str(caught.value)
    assert "decoder.layers.1.mlp.linear_fc2.weight is not part of this layout" in str(caught.value)
    assert "decoder.final_layernorm.weight has shape (31,), but the layout implies (32,)" in str(caught.value)

    with pytest.raises(
        WeightTransferError,
        match=r"lm_head\.weight in model\.safetensors has shape \(199, 32\), but config\.json implies \(200, "
        r"32\)",
    ):
        load_into_shards(folder, replace(architecture, vocab_size=200), layout, parameters)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused_by_the_name_of_its_tensor(folder: Path, bad: float) -> None:
    values = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].clone()
    values[-1, -1] = bad
    edit(folder, model__layers__0__mlp__up_proj__weight=values)
    said = r"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.weight has elements that are NaN or infinite"
    with pytest.raises(WeightTransferError, match=said):
        load(folder)
    with pytest.raises(CheckpointError, match=r"^model\.layers\.0\.mlp\.up_proj\.weight has elements"):
        write_hugging_face(open_model(folder), folder.with_name("written"))
    assert not folder.with_name("written").exists()


def test_large_values_whose_sum_is_infinite_are_finite(folder: Path) -> None:
    large = torch.full((32,), torch.finfo(torch.float32).max)
    edit(folder, model__norm__weight=large)
    assert bool(load(folder)["decoder.final_layernorm.weight"].eq(large).all())


def test_two_sets_of_weights_in_a_folder_are_refused(tmp_path: Path) -> None:
    model = random_model("qwen2", num_layers=1)
    folder = save(model, tmp_path / "model", max_shard_size="20KB")
    load(folder)
    # transformers prefers safetensors, so an older format does no harm.
    (folder / "pytorch_model.bin").write_bytes(b"older")
    load(folder)

    shutil.copy(save(model, tmp_path / "single") / "model.safetensors", folder)
    with pytest.raises(WeightTransferError, match=r"two sets of weights, model\.safetensors and .*; delete"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    load(folder)


def test_an_index_of_a_single_file_is_one_set(folder: Path) -> None:
    names = load_file(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)


def test_an_adapter_next_to_the_weights_of_a_model_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(
        WeightTransferError, match=r"has an adapter \(adapter_config\.json\) next to the weights"
    ):
        load(folder)
