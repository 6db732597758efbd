"""What goes with the weights of a Hugging Face folder: which class its config.json names, and whether its head has a bias."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from megarl.weights.hf_folder import copy_companions, has_bias, model_class
from megarl.weights.name_mapping import Head
from tests.unit.weights.models import config_of, random_model, save

LM, TOKENS, SEQUENCES = "Qwen2ForCausalLM", "Qwen2ForTokenClassification", "Qwen2ForSequenceClassification"


def source_of(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {**config_of("qwen2").to_dict(), "architectures": [LM], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copied(source: Path, target: Path, dtype: torch.dtype | None = None, head: Head | None = None) -> dict[str, object]:
    target.mkdir()
    copy_companions(source, target, dtype, head)
    return json.loads((target / "config.json").read_text())


@pytest.mark.parametrize(
    ("architectures", "head", "expected"),
    [
        ([LM], "lm", LM),
        ([LM], "value", TOKENS),  # a critic that was made from a language model
        ([TOKENS], "value", TOKENS),
        ([SEQUENCES], "value", SEQUENCES),  # a reward model stays what it was published as
        ([SEQUENCES], "lm", LM),
        (["Qwen2Model"], "lm", LM),
        (["Qwen2Model"], "value", TOKENS),
        (None, "lm", LM),
        ([], "value", TOKENS),
        (["OurQwen2ForCausalLM"], "lm", "OurQwen2ForCausalLM"),  # a custom model keeps its own class
    ],
)
def test_the_class_has_the_head(tmp_path: Path, architectures: list[str] | None, head: Head, expected: str) -> None:
    config = copied(source_of(tmp_path / "a", architectures=architectures), tmp_path / "b", head=head)
    assert config["architectures"] == [expected]
    labels = {name for name in ("id2label", "label2id", "num_labels", "problem_type") if config.get(name) is not None}
    assert labels == ({"id2label", "label2id"} if head == "value" else set())
    if head == "value":
        assert (config["id2label"], config["label2id"]) == ({"0": "LABEL_0"}, {"LABEL_0": 0})


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_family_has_its_own_class(tmp_path: Path, family: str) -> None:
    source = source_of(tmp_path / "a", model_type=family, architectures=None)
    names = {"llama": "LlamaForCausalLM", "qwen2": LM, "qwen3": "Qwen3ForCausalLM"}
    assert copied(source, tmp_path / "b", head="lm")["architectures"] == [names[family]]


def test_nothing_is_changed_that_was_not_asked_for(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a", architectures=[SEQUENCES], torch_dtype="float16", id2label={"0": "good"}, rope_scaling=None)
    assert copied(source, tmp_path / "b") == json.loads((source / "config.json").read_text())


def test_the_dtype_has_one_name(tmp_path: Path) -> None:
    config = copied(source_of(tmp_path / "a", torch_dtype="float32"), tmp_path / "b", dtype=torch.bfloat16)
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_all_but_weights_is_copied(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a")
    kept = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "merges.txt", "modeling_ours.py")
    left = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "training_args.bin")
    for name in (*kept, *left):
        (source / name).write_text(name)
    (source / "notes.json").mkdir()  # a folder with a name that would do
    copied(source, tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {*kept, "config.json"}
    assert all((tmp_path / "b" / name).read_text() == name for name in kept)


@pytest.mark.parametrize(("architectures", "expected"), [([LM], False), ([TOKENS], True), ([SEQUENCES], False), (None, False)])
def test_which_class_has_a_bias_is_what_transformers_says(tmp_path: Path, architectures: list[str] | None, expected: bool) -> None:
    source = source_of(tmp_path / "a", architectures=architectures)
    assert has_bias(source) is expected
    kinds = {TOKENS: AutoModelForTokenClassification, SEQUENCES: AutoModelForSequenceClassification}
    if architectures and architectures[0] in kinds:
        model = kinds[architectures[0]].from_config(config_of("qwen2"))
        assert type(model).__name__ == architectures[0]
        assert ("score.bias" in model.state_dict()) is expected


def test_transformers_loads_the_class_that_is_named(tmp_path: Path) -> None:
    """A language model's folder becomes a critic's: its trunk, a head, and the bias of zeros."""
    source = save(random_model("qwen2"), tmp_path / "a")
    copied(source, tmp_path / "b", head="value")
    tensors = {name: value for name, value in load_file(source / "model.safetensors").items() if name != "lm_head.weight"}
    head = {"score.weight": torch.ones(1, 32), "score.bias": torch.zeros(1)}
    save_file({**tensors, **head}, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.score.weight.shape == (1, 32)


def test_the_part_of_a_class_name_that_says_its_head() -> None:
    names = ("Qwen2ForCausalLM", "LlamaForTokenClassification", "Qwen3ForSequenceClassification", "Qwen2Model", "")
    assert [model_class({"architectures": [name]}) for name in names] == [
        "ForCausalLM",
        "ForTokenClassification",
        "ForSequenceClassification",
        "",
        "",
    ]
