"""Stored models read back as Hugging Face tensors; the distributed ones are written by slow loops and
PyTorch."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarl.checkpoints.convert.distributed import open_distributed
from megarl.checkpoints.convert.hugging_face import open_hugging_face
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.torch_dist import TORCH_DIST
from megarl.machine.errors import CheckpointError
from megarl.weights.tensors import TensorSlice
from tests.unit.weights.models import (
    EXPERTS,
    NUM_LAYERS,
    architecture_of,
    random_model,
    save,
    slow_shards,
    stored_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CASES = [
    ("qwen2", False),
    ("qwen2", True),
    ("qwen3", True),
    ("llama", False),
    ("qwen2_moe", False),
    ("qwen3_moe", True),
]
CANONICAL = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def everything(source: ModelSource) -> dict[str, torch.Tensor]:
    """Return copies of all tensors, because a memory-mapped block keeps its file open."""
    return {
        name: tensor.block(TensorSlice.whole(tensor.hf.view), tensor.dtype).reshape(tensor.hf.shape).clone()
        for name, tensor in source.tensors.items()
    }


def stacked(state: dict[str, torch.Tensor], family: str, tied: bool) -> dict[str, torch.Tensor]:
    """Return Megatron's tensors of the whole model.

    Layers are stacked along a first dimension, unless only some of them have experts, and the experts of a
    layer along the next. The vocabulary is padded.
    """
    shards = slow_shards(
        state,
        architecture_of(family, tied=tied),
        tensor_parallel_size=1,
        rank=0,
        layers=tuple(range(NUM_LAYERS)),
        holds_embedding=True,
        holds_output=True,
        experts=range(EXPERTS),
    )
    whole = {name: value for name, value in shards.items() if "layers." not in name}
    layers = [_of_layer(shards, f"decoder.layers.{layer}.") for layer in range(NUM_LAYERS)]

    if family == "qwen2_moe":
        return whole | {
            f"decoder.layers.{layer}.{rest}": value
            for layer, own in enumerate(layers)
            for rest, value in own.items()
        }

    return whole | {
        "decoder.layers." + rest: torch.stack([own[rest] for own in layers]) for rest in layers[0]
    }


def _of_layer(shards: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    own = {name.removeprefix(prefix): value for name, value in shards.items() if name.startswith(prefix)}
    is_dense = "mlp.router.weight" not in own
    found = {}

    for rest, value in own.items():
        before, is_expert, after = rest.partition(".local_experts.")
        if not is_expert:
            found[CANONICAL.get(rest, rest) if is_dense or not rest.startswith("pre_mlp") else rest] = value
        elif after.startswith("0."):
            matrices = [own[f"{before}.local_experts.{expert}.{after[2:]}"] for expert in range(EXPERTS)]
            found[f"{before}.experts.{after[2:]}"] = torch.stack(matrices)

    return found


def write(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(TORCH_DIST))
    torch.save({}, folder / "common.pt")
    return folder


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_both_formats_give_the_model_bit_for_bit(tmp_path: Path, family: str, tied: bool) -> None:
    model = random_model(family, tied=tied)
    expected = stored_state(model)
    hugging_face = save(model, tmp_path / "hf", max_shard_size="30KB")
    optimizer = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3)}
    distributed = write({**stacked(expected, family, tied), **optimizer}, tmp_path / "megatron")

    for source in (open_hugging_face(hugging_face), open_distributed(distributed, companions=hugging_face)):
        found = everything(source)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), source.kind
        assert source.head == "lm"
        assert source.num_parameters == sum(value.numel() for value in expected.values())


def test_a_block_of_a_tensor_in_another_dtype(tmp_path: Path) -> None:
    model = random_model("llama")
    folder = write(stacked(model.state_dict(), "llama", False), tmp_path / "megatron")
    source = open_distributed(folder, companions=save(model, tmp_path / "hf"))

    # The rows of one query group, in groups of three rows of the stored tensor.
    tensor = source.tensors["model.layers.2.self_attn.k_proj.weight"]
    place = TensorSlice.whole(tensor.hf.view).along(0, 1, 3)
    rows = model.state_dict()[tensor.hf.name].view(tensor.hf.view)[1:3]
    assert torch.equal(tensor.block(place, torch.bfloat16), rows.bfloat16())


def test_a_tensor_that_is_missing_extra_or_of_another_shape(tmp_path: Path) -> None:
    model = random_model("llama")
    tensors = stacked(model.state_dict(), "llama", False)
    hugging_face = save(model, tmp_path / "hf")
    key = "decoder.layers.mlp.linear_fc2.weight"

    with pytest.raises(
        CheckpointError,
        match=r"decoder\.layers\.mlp\.linear_fc2\.weight is missing; config\.json requires model\.layers\.0\.mlp",
    ):
        open_distributed(
            write({name: value for name, value in tensors.items() if name != key}, tmp_path / "a"),
            hugging_face,
        )

    with pytest.raises(CheckpointError, match=r"decoder\.adapter is not a tensor of this architecture"):
        open_distributed(write({**tensors, "decoder.adapter": torch.zeros(2)}, tmp_path / "b"), hugging_face)
    with pytest.raises(
        CheckpointError,
        match=r"linear_fc2\.weight has shape \(4, 20, 32\), config\.json requires \(4, 32, 20\)",
    ):
        open_distributed(
            write({**tensors, key: tensors[key].transpose(1, 2).contiguous()}, tmp_path / "c"), hugging_face
        )
