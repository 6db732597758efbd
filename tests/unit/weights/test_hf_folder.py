"""A model as a Hugging Face folder: its files, the class in config.json, and the bias of its head."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megarl.models.families import FAMILIES, REWARD_CLASS
from megarl.models.tensor_table import Head
from megarl.weights.export_plan import plan_export
from megarl.weights.hf_folder import FilePlan, copy_companions, has_bias, model_class, save_hf_folder
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.shards import Shards
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transports.folder import FolderTransfer
from tests.unit.weights.exports import small_files_only
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, config_of, random_model, save

ARCHITECTURE = architecture_of("qwen2", tied=True)


def export(source: Path, target: Path, max_file_bytes: int = 5 * 10**9) -> None:
    """Export from a single process."""
    (layout,) = model_layouts(ARCHITECTURE, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)
    parameters = {name: torch.empty(shape) for name, shape in shard_shapes(ARCHITECTURE, layout).items()}
    load_into_shards(source, ARCHITECTURE, layout, parameters)
    shards = Shards(parameters=parameters, architecture=ARCHITECTURE, layout=layout)
    plan = plan_export(
        ARCHITECTURE, [layout], ["node"], torch.float32, message_bytes=3000, max_file_bytes=max_file_bytes
    )

    def write(folder: Path) -> None:
        sending = FolderTransfer(None, 0, plan.of_rank(0), shards, folder)
        try:
            while not sending.run():
                pass
        finally:
            sending.close()

    save_hf_folder(write, plan.files, target, source)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(
        random_model("qwen2", tied=True).to(torch.bfloat16), tmp_path / "source", max_shard_size="30KB"
    )
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(5 * 10**9, 1), (40_000, 3)])
def test_transformers_loads_the_folder_and_gives_the_same_logits(
    tmp_path, source, max_file_bytes: int, num_files: int
) -> None:
    target = tmp_path / "runs" / "export"
    target.parent.mkdir()
    export(source, target, max_file_bytes)

    files = list(target.glob("*.safetensors"))
    assert len(files) == num_files

    # 107 kB of weights; 4000 bytes for the header
    assert all(file.stat().st_size <= max_file_bytes + 4000 for file in files)
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (target / "tokenizer.json").is_file()
    assert (target / "generation_config.json").is_file()
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in target.parent.iterdir()] == ["export"]  # nothing temporary is left

    tokens = torch.arange(24).view(2, 12)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.float32
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert torch.equal(model(tokens).logits, reference(tokens).logits)


def test_a_full_disk_leaves_what_was_there(tmp_path, source) -> None:
    target = tmp_path / "export"
    export(source, target)
    before = (target / "model.safetensors").read_bytes()
    with small_files_only(100_000), pytest.raises(OSError, match=r"too large: .*/model\.safetensors"):
        export(source, target)
    assert (target / "model.safetensors").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}


def test_a_file_is_complete_and_exact_or_an_error(tmp_path) -> None:
    manifest = {
        name: meta
        for name, meta in manifest_of(ARCHITECTURE, torch.float32).items()
        if name == "model.norm.weight"
    }
    half = ("model.norm.weight", 0)
    other_half = ("model.norm.weight", 16)
    data = torch.zeros(16)

    def written(manifest: Manifest, *places: tuple[str, int]) -> Callable[[], None]:
        file = SafetensorsFile(tmp_path / str(len(list(tmp_path.iterdir()))), manifest)
        for place in places:
            file.write(*place, data)
        return file.close

    written(manifest, other_half, half)()
    with pytest.raises(WeightTransferError, match=r"model\.norm\.weight \(missing from element 16"):
        written(manifest, half)()
    with pytest.raises(WeightTransferError, match=r"twice at element 0"):
        written(manifest, half, half, other_half)()
    with pytest.raises(WeightTransferError, match=r"'lm_head\.weight' is not in the model's manifest"):
        written(manifest, ("lm_head.weight", 0))


def test_a_complete_export_replaces_the_former(tmp_path, source) -> None:
    target = tmp_path / "export"
    export(source, target, max_file_bytes=40_000)
    export(source, target)
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]


def test_folders_that_are_not_overwritten(tmp_path, source) -> None:
    def write(folder: Path) -> None:
        raise AssertionError("nothing is written")

    files: tuple[FilePlan, ...] = ()
    with pytest.raises(ValueError, match="would overwrite the folder"):
        save_hf_folder(write, files, source, source)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is not a Hugging Face folder"):
        save_hf_folder(write, files, tmp_path / "home", source)


LM = "Qwen2ForCausalLM"
TOKENS = "Qwen2ForTokenClassification"
SEQUENCES = "Qwen2ForSequenceClassification"


def source_of(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {**config_of("qwen2").to_dict(), "architectures": [LM], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copied(
    source: Path, target: Path, dtype: torch.dtype | None = None, head: Head | None = None
) -> dict[str, object]:
    target.mkdir()
    copy_companions(source, target, dtype, head)
    return json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("name", [LM, TOKENS, SEQUENCES, "Qwen2Model"])
def test_a_value_head_can_be_given_a_class(tmp_path: Path, name: str) -> None:
    """A reward model that was trained from any folder is of the class that is scored at the last token."""
    source = source_of(tmp_path / "a", architectures=[name])
    (tmp_path / "b").mkdir()
    copy_companions(source, tmp_path / "b", head="value", value_class=REWARD_CLASS)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == [SEQUENCES]


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
def test_the_class_has_the_head(
    tmp_path: Path, architectures: list[str] | None, head: Head, expected: str
) -> None:
    config = copied(source_of(tmp_path / "a", architectures=architectures), tmp_path / "b", head=head)
    assert config["architectures"] == [expected]
    labels = {
        name
        for name in ("id2label", "label2id", "num_labels", "problem_type")
        if config.get(name) is not None
    }
    assert labels == ({"id2label", "label2id"} if head == "value" else set())
    if head == "value":
        assert (config["id2label"], config["label2id"]) == ({"0": "LABEL_0"}, {"LABEL_0": 0})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_own_class(tmp_path: Path, family: str) -> None:
    source = source_of(tmp_path / "a", model_type=family, architectures=None)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    expected = classes[family]
    assert copied(source, tmp_path / "b", head="lm")["architectures"] == [expected]


def test_nothing_is_changed_that_was_not_asked_for(tmp_path: Path) -> None:
    source = source_of(
        tmp_path / "a",
        architectures=[SEQUENCES],
        torch_dtype="float16",
        id2label={"0": "good"},
        rope_scaling=None,
    )
    assert copied(source, tmp_path / "b") == json.loads((source / "config.json").read_text())


def test_the_dtype_has_one_name(tmp_path: Path) -> None:
    config = copied(source_of(tmp_path / "a", torch_dtype="float32"), tmp_path / "b", dtype=torch.bfloat16)
    assert config["dtype"] == "bfloat16"
    assert "torch_dtype" not in config


def test_all_but_weights_is_copied(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a")
    kept = (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "merges.txt",
        "modeling_ours.py",
    )
    left = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "training_args.bin",
        "adapter_config.json",
    )
    for name in (*kept, *left):
        (source / name).write_text(name)
    (source / "notes.json").mkdir()  # a folder whose name matches
    copied(source, tmp_path / "b")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {*kept, "config.json"}
    assert all((tmp_path / "b" / name).read_text() == name for name in kept)


@pytest.mark.parametrize(
    ("architectures", "expected"), [([LM], False), ([TOKENS], True), ([SEQUENCES], False), (None, False)]
)
def test_which_class_has_a_bias_is_what_transformers_says(
    tmp_path: Path, architectures: list[str] | None, expected: bool
) -> None:
    source = source_of(tmp_path / "a", architectures=architectures)
    assert has_bias(source) is expected
    kinds = {TOKENS: AutoModelForTokenClassification, SEQUENCES: AutoModelForSequenceClassification}

    if architectures and architectures[0] in kinds:
        model = kinds[architectures[0]].from_config(config_of("qwen2"))
        assert type(model).__name__ == architectures[0]
        assert ("score.bias" in model.state_dict()) is expected


def test_transformers_loads_the_class_that_is_named(tmp_path: Path) -> None:
    """A language model's folder becomes a critic's: its trunk, a head, and a bias of zeros."""
    source = save(random_model("qwen2"), tmp_path / "a")
    copied(source, tmp_path / "b", head="value")
    tensors = {
        name: value
        for name, value in load_file(source / "model.safetensors").items()
        if name != "lm_head.weight"
    }
    head = {"score.weight": torch.ones(1, 32), "score.bias": torch.zeros(1)}
    save_file({**tensors, **head}, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    model, report = AutoModelForTokenClassification.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.score.weight.shape == (1, 32)


def test_the_part_of_a_class_name_that_says_its_head() -> None:
    names = (
        "Qwen2ForCausalLM",
        "LlamaForTokenClassification",
        "Qwen3ForSequenceClassification",
        "Qwen2Model",
        "",
    )
    assert [model_class({"architectures": [name]}) for name in names] == [
        "ForCausalLM",
        "ForTokenClassification",
        "ForSequenceClassification",
        "",
        "",
    ]


def test_layers_that_are_not_written_are_not_promised(tmp_path: Path) -> None:
    """Layers that predict further tokens may be missing in the weights. A checkpoint's copy keeps the field."""
    source = tmp_path / "source"
    target = tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    config_of("deepseek_v3").save_pretrained(source)
    copy_companions(source, target, promises_mtp=False)
    written = json.loads((target / "config.json").read_text())
    assert json.loads((source / "config.json").read_text()) == {**written, "num_nextn_predict_layers": 1}
    assert written["num_nextn_predict_layers"] == 0
    copy_companions(source, target)
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
