import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.weights.carriers.folder import FolderTrainerEnd
from megarl.weights.export import FilePlan, save_hf_folder
from megarl.weights.export_plan import plan_export
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.receipt import ChunkMeta, Manifest, WeightTransferError
from megarl.weights.safetensors_file import SafetensorsFile
from megarl.weights.sending import Sending
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.shards import Shards
from tests.unit.weights.exports import small_files_only
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save

ARCHITECTURE = architecture_of("qwen2", tied=True)


def export(source: Path, target: Path, max_file_bytes: int = 5 * 10**9) -> None:
    """By one process that is alone."""
    (layout,) = model_layouts(ARCHITECTURE, tensor_parallel_size=1, padded_vocab_size=PADDED_VOCAB)
    parameters = {name: torch.empty(shape) for name, shape in shard_shapes(ARCHITECTURE, layout).items()}
    load_into_shards(source, ARCHITECTURE, layout, parameters)
    shards = Shards(parameters=parameters, architecture=ARCHITECTURE, layout=layout)
    plan = plan_export(ARCHITECTURE, [layout], ["node"], torch.float32, message_bytes=3000, max_file_bytes=max_file_bytes)

    def write(folder: Path) -> None:
        end = FolderTrainerEnd(None, 0, plan.of_rank(0), folder)
        try:
            sending = Sending(end, shards, ())
            while sending.run(()) is None:
                pass
        finally:
            end.close()

    save_hf_folder(write, plan.files, target, source)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save(random_model("qwen2", tied=True).to(torch.bfloat16), tmp_path / "source", max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(("max_file_bytes", "num_files"), [(5 * 10**9, 1), (40_000, 3)])
def test_transformers_loads_the_folder_and_gives_the_same_logits(tmp_path, source, max_file_bytes: int, num_files: int) -> None:
    target = tmp_path / "runs" / "export"
    target.parent.mkdir()
    export(source, target, max_file_bytes)

    files = list(target.glob("*.safetensors"))
    assert len(files) == num_files
    assert all(file.stat().st_size <= max_file_bytes + 4000 for file in files)  # 107 kB of weights; 4000 for the header
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
    manifest = {name: meta for name, meta in manifest_of(ARCHITECTURE, torch.float32).items() if name == "model.norm.weight"}
    half, other_half = ChunkMeta("model.norm.weight", 0, 16), ChunkMeta("model.norm.weight", 16, 16)
    data = torch.zeros(16)

    def written(manifest: Manifest, *chunks: ChunkMeta) -> Callable[[], None]:
        file = SafetensorsFile(tmp_path / str(len(list(tmp_path.iterdir()))), manifest)
        for chunk in chunks:
            file.write(chunk, data)
        return file.close

    written(manifest, other_half, half)()
    with pytest.raises(WeightTransferError, match=r"model\.norm\.weight \(missing from element 16"):
        written(manifest, half)()
    with pytest.raises(WeightTransferError, match=r"twice at element 0"):
        written(manifest, half, half, other_half)()
    with pytest.raises(WeightTransferError, match=r"'lm_head\.weight' is not in the model's manifest"):
        written(manifest, ChunkMeta("lm_head.weight", 0, 1))


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
