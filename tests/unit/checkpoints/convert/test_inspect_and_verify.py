"""The description of the model in a folder, and the comparison of two folders."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.source import architecture_fields, describe
from megarl.checkpoints.convert.verify import Comparison, Match, compare
from megarl.cli.main import main
from megarl.cli.run.convert import print_comparison, print_description, verdict
from tests.families import example_architecture
from tests.unit.checkpoints.convert.test_source import stacked, write
from tests.unit.engine.models import save_critic
from tests.unit.weights.kept_tensors import SHAPES, write_files, write_original
from tests.unit.weights.models import random_model, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAME = "model.layers.2.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("qwen2")


@pytest.fixture(scope="module")
def hugging_face(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(model, tmp_path_factory.mktemp("models") / "hf")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages }}"}'
    )
    return folder


@pytest.fixture
def copy(hugging_face: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hugging_face, tmp_path / "copy"))


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace tensors of the folder's single file, or remove those that are None.

    Names have __ instead of a dot.
    """
    path = folder / "model.safetensors"
    stored = load_file(path)

    for name, value in tensors.items():
        stored.pop(name.replace("__", "."))
        if value is not None:
            stored[name.replace("__", ".")] = value

    save_file(stored, path, metadata={"format": "pt"})
    return folder


def printed(comparison: Comparison) -> str:
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=200))
    return text.getvalue()


def test_the_same_model_in_two_formats(model: PreTrainedModel, hugging_face: Path, tmp_path: Path) -> None:
    distributed = open_model(
        write(stacked(model.state_dict(), "qwen2", False), tmp_path / "megatron"), companions=hugging_face
    )
    calls: list[tuple[int, int]] = []
    comparison = compare(
        open_model(hugging_face), distributed, lambda nbytes, total: calls.append((nbytes, total))
    )
    assert comparison.is_same
    assert comparison.count(Match.identical) == len(comparison.tensors) == 51
    assert (
        sum(nbytes for nbytes, _ in calls)
        == calls[0][1]
        == sum(value.nbytes for value in model.state_dict().values())
    )
    assert verdict(comparison) == "identical: 51 tensors bitwise identical"


def test_one_element_of_one_tensor(hugging_face: Path, copy: Path) -> None:
    stored = load_file(copy / "model.safetensors")[NAME]
    stored[3, 4] += 0.25
    comparison = compare(
        open_model(hugging_face), open_model(change(copy, model__layers__2__mlp__up_proj__weight=stored))
    )
    (tensor,) = comparison.differing
    assert (tensor.name, tensor.match, tensor.num_different, tensor.num_elements) == (
        NAME,
        Match.different,
        1,
        640,
    )
    assert tensor.max_difference == pytest.approx(0.25, rel=1e-6)
    assert not comparison.is_same
    assert "model.layers.2.mlp.up_proj.weight │ 1 of 640" in printed(comparison)
    assert (
        printed(comparison).splitlines()[-1] == "different: 50 tensors bitwise identical, 1 tensor different"
    )


def test_a_zero_of_another_sign_and_a_number_that_is_none(
    hugging_face: Path, copy: Path, tmp_path: Path
) -> None:
    bias = torch.zeros(32)
    bias[5] = float("nan")
    left = change(copy, model__norm__weight=bias)
    right = Path(shutil.copytree(left, tmp_path / "right"))
    assert compare(open_model(left), open_model(right)).is_same
    bias[7] = -0.0
    (tensor,) = compare(open_model(left), open_model(change(right, model__norm__weight=bias))).differing
    assert (tensor.num_different, tensor.max_difference) == (1, 0.0)


@pytest.mark.parametrize(
    ("left", "right", "reason"),
    [
        (torch.float32, torch.bfloat16, "float32 and bfloat16, rounded to bfloat16"),
        (torch.float16, torch.float32, "float16 and float32, rounded to float16"),
        (torch.bfloat16, torch.float16, "bfloat16 and float16, rounded to float16"),
    ],
)
def test_the_same_model_in_another_dtype(
    tmp_path: Path, left: torch.dtype, right: torch.dtype, reason: str
) -> None:
    """float16 rounds the smallest element of the bfloat16 tensor in the third case."""
    model = random_model("qwen2")
    with torch.no_grad():
        model.model.embed_tokens.weight[0, 0] = 1e-6
    one = save(model.to(left), tmp_path / "left")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other = save(model.to(right), tmp_path / "right")
    comparison = compare(open_model(one), open_model(other))
    assert comparison.is_same
    assert comparison.count(Match.rounded) == len(comparison.tensors)
    first = comparison.tensors[0]
    weight = state[first.name]
    assert first.reason == reason
    assert first.max_difference == float((weight.double() - weight.to(right).double()).abs().max())
    assert verdict(comparison).startswith("identical except for rounding (")
    assert reason in verdict(comparison)
    spoiled = load_file(other / "model.safetensors")[NAME]
    spoiled[0, 0] *= 1.5
    assert not compare(
        open_model(one), open_model(change(other, model__layers__2__mlp__up_proj__weight=spoiled))
    ).is_same


def test_models_with_other_tensors_and_another_architecture(
    hugging_face: Path, copy: Path, tmp_path: Path
) -> None:
    save_critic(copy, tmp_path / "critic")
    comparison = compare(open_model(hugging_face), open_model(tmp_path / "critic"))
    assert {tensor.name: tensor.reason for tensor in comparison.differing} == {
        "lm_head.weight": f"is not in {tmp_path / 'critic'}",
        "score.weight": f"is not in {hugging_face}",
    }
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] = 1e-5
    (copy / "config.json").write_text(json.dumps(config))
    other = compare(open_model(hugging_face), open_model(copy))
    assert other.architecture == (("rms_norm_eps", 1e-6, 1e-5),)
    assert (other.differing, other.is_same) == ((), False)
    assert "rms_norm_eps" in printed(other)


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    left, right = tmp_path / "left", tmp_path / "right"
    tensors = write_original(left, "deepseek_v3")
    shutil.copytree(left, right)
    assert compare(open_model(left), open_model(right)).count(Match.identical) == len(tensors)

    name = "model.layers.2.enorm.weight"
    tensors[name][3] += 1
    write_files(right, [tensors])
    (tensor,) = compare(open_model(left), open_model(right)).differing
    assert (tensor.name, tensor.match, tensor.num_different) == (name, Match.different, 1)

    del tensors[name]
    write_files(right, [tensors])
    (tensor,) = compare(open_model(left), open_model(right)).differing
    assert (tensor.name, tensor.match, tensor.reason) == (name, Match.missing, f"is not in {right}")


def test_a_checkpoint_has_no_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    tensors = write_original(tmp_path / "hf", "deepseek_v3")
    assert (
        main(
            [
                "convert",
                "hf-to-megatron",
                "--input",
                f"{tmp_path / 'hf'}",
                "--output",
                f"{tmp_path / 'mcore'}",
            ]
        )
        == 0
    )
    comparison = compare(open_model(tmp_path / "hf"), open_model(tmp_path / "mcore"))
    num_mtp = len(SHAPES["deepseek_v3"])
    assert comparison.is_same
    assert comparison.count(Match.identical) == len(tensors) - num_mtp
    assert verdict(comparison).endswith(
        f"; not compared: {num_mtp} tensors of layers that predict further tokens or of a vision tower, which "
        "Megatron's formats do not contain"
    )


def test_parts_of_pairs_in_an_architecture_have_names() -> None:
    """Programs read them in the output of `megarl convert inspect --json`."""
    experts = json.loads(json.dumps(architecture_fields(example_architecture("deepseek_v3"))))["experts"]
    assert experts["groups"] == {"num_groups": 2, "num_selected": 1}
    assert architecture_fields(example_architecture("qwen3_moe"))["experts"]["groups"] is None
    windowed = architecture_fields(example_architecture("gemma3_text"))
    assert windowed["local_rope"] == {"theta": 1e4, "scaling": None}
    assert architecture_fields(example_architecture("qwen3"))["local_rope"] is None


def test_what_a_folder_holds(model: PreTrainedModel, hugging_face: Path, tmp_path: Path) -> None:
    description = describe(open_model(hugging_face))
    tensors = {
        tensor["name"]: (tensor["shape"], tensor["dtype"], tensor["nbytes"])
        for tensor in description["tensors"]
    }
    state = model.state_dict()
    assert tensors == {name: (tuple(value.shape), "float32", value.nbytes) for name, value in state.items()}
    assert description["num_parameters"] == sum(value.numel() for value in state.values())
    assert (description["family"], description["model_class"], description["head"]) == (
        "qwen2",
        "Qwen2ForCausalLM",
        "language model",
    )
    assert (description["format"], description["layout"], description["step"]) == (
        "Hugging Face",
        "1 safetensors file",
        None,
    )
    assert description["tokenizer"] == "Qwen2Tokenizer (tokenizer.json), with a chat template"
    assert json.loads(json.dumps(description))["architecture"]["num_hidden_layers"] == 4
    text = io.StringIO()
    print_description(description, Console(file=text, width=60))  # narrow, but nothing is truncated
    assert all(f" {name} " in text.getvalue() for name in state)
    (hugging_face / "tokenizer.json").unlink()
    assert describe(open_model(hugging_face))["tokenizer"] == "none"
