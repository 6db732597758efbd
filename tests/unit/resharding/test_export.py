import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.protocol.weights import TensorChunk, WeightBucket, WeightTransferError
from megarl.resharding.export import save_hf_folder
from megarl.resharding.gather import iterate_buckets
from megarl.resharding.layout import model_layouts, shard_shapes
from megarl.resharding.load import load_into_shards
from megarl.resharding.manifest import manifest_of
from tests.unit.resharding.models import PADDED_VOCAB, architecture_of, random_model, save


def buckets_of(folder: Path, architecture) -> list[WeightBucket]:
    layout = model_layouts(architecture, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)[0]
    parameters = {name: torch.empty(shape) for name, shape in shard_shapes(architecture, layout).items()}
    load_into_shards(folder, architecture, layout, parameters)
    return list(iterate_buckets(parameters, architecture, layout, None, 3000, torch.float32))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(random_model("qwen2", tied=True).to(torch.bfloat16), tmp_path / "source", max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(("max_shard_size", "num_files"), [(5 * 10**9, 1), (40_000, 3)])
def test_transformers_loads_the_folder_and_gives_the_same_logits(tmp_path, source, max_shard_size: int, num_files: int) -> None:
    architecture = architecture_of("qwen2", tied=True)
    target = tmp_path / "runs" / "export"
    save_hf_folder(buckets_of(source, architecture), manifest_of(architecture, torch.float32), target, source, max_shard_size)

    files = list(target.glob("*.safetensors"))
    assert len(files) == num_files
    assert all(file.stat().st_size <= max_shard_size + 4000 for file in files)  # 107 kB of weights; 4000 for the header
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


def test_incomplete_weights_leave_what_was_there(tmp_path, source) -> None:
    architecture = architecture_of("qwen2", tied=True)
    manifest, buckets, target = manifest_of(architecture, torch.float32), buckets_of(source, architecture), tmp_path / "export"
    save_hf_folder(buckets, manifest, target, source)
    before = (target / "model.safetensors").read_bytes()
    with pytest.raises(WeightTransferError, match=r"model\.norm\.weight \(missing"):
        save_hf_folder(buckets[:-1], manifest, target, source)
    with pytest.raises(WeightTransferError, match=r"twice at element"):
        save_hf_folder([*buckets, buckets[3]], manifest, target, source)
    with pytest.raises(WeightTransferError, match=r"'lm_head\.weight' is not in the model's manifest"):
        save_hf_folder([WeightBucket((TensorChunk("lm_head.weight", 0, torch.zeros(1)),))], manifest, target, source)
    assert (target / "model.safetensors").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}


def test_a_complete_export_replaces_the_former(tmp_path, source) -> None:
    architecture = architecture_of("qwen2", tied=True)
    manifest, buckets, target = manifest_of(architecture, torch.float32), buckets_of(source, architecture), tmp_path / "export"
    save_hf_folder(buckets, manifest, target, source, max_shard_size=40_000)
    save_hf_folder(buckets, manifest, target, source)
    assert [path.name for path in target.glob("*.safetensors*")] == ["model.safetensors"]


def test_folders_that_are_not_overwritten(tmp_path, source) -> None:
    manifest = manifest_of(architecture_of("qwen2", tied=True), torch.float32)
    with pytest.raises(ValueError, match="would overwrite the folder"):
        save_hf_folder([], manifest, source, source)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="is not a Hugging Face folder"):
        save_hf_folder([], manifest, tmp_path / "home", source)
