"""Conversions between Hugging Face and Megatron and back are bitwise identical, and a conversion that fails
leaves no files."""

import json
import os
import resource
import signal
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from megarl.checkpoints.convert import distributed_writer, streaming
from megarl.checkpoints.convert.distributed_writer import plan_distributed, write_distributed
from megarl.checkpoints.convert.hugging_face_writer import write_hugging_face
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.convert.source import ModelSource
from megarl.checkpoints.convert.streaming import Progress, no_progress
from megarl.checkpoints.role_folder import Layout, read_description
from megarl.checkpoints.torch_dist import read_chunk, read_index
from megarl.config.shipped import CONFIGS_DIR
from megarl.machine.errors import CheckpointError
from megarl.models.families import read_architecture
from tests.families import DENSE_FAMILIES, RENAMED_FAMILIES, SPARSE_FAMILIES, is_kept, model_class
from tests.unit.checkpoints.convert.test_source import everything, stacked
from tests.unit.weights.models import (
    VOCAB,
    architecture_of,
    cast,
    config_of,
    random_model,
    save,
    stored_state,
)

FAMILIES = [
    (family, tied)
    for family in DENSE_FAMILIES
    for tied in ((True,) if family in RENAMED_FAMILIES else (False, True))
]
FAMILIES += [(family, number % 2 == 1) for number, family in enumerate(SPARSE_FAMILIES)]
# (TP, PP, VPP): maximum size of an item in bytes, by whether the output layer is the embedding. Each family is
# converted in all six where it has models of both kinds.
LAYOUTS = {
    False: {(1, 1, None): 2500, (4, 1, None): 10**6, (2, 2, None): 1000},
    True: {(2, 1, None): 10**6, (1, 2, None): 10**6, (4, 2, 2): 10**6},
}


def layout_of(tensor: int = 1, pipeline: int = 1, virtual: int | None = None) -> Layout:
    return Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        virtual_pipeline_parallel_size=virtual,
        data_parallel_size=1,
    )


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(value, right[name]) for name, value in left.items()
    )


def trained(state: Mapping[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model without those that are kept."""
    return {name: value for name, value in state.items() if not is_kept(name, model.config)}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(random_model("llama"), tmp_path_factory.mktemp("models") / "llama")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_conversion_to_megatron_and_back_is_bitwise_identical(
    family: str, tied: bool, tmp_path: Path
) -> None:
    """The vocabulary has 199 rows. Items and files are small, so that tensors are split."""
    model = cast(random_model(family, tied=tied), torch.bfloat16 if tied else torch.float32)
    source = open_model(save(model, tmp_path / "hf"))
    expected = trained(stored_state(model), model)

    for layout, item_bytes in LAYOUTS[tied].items():
        there, back = (tmp_path / f"{'x'.join(map(str, layout))} {way}" for way in ("there", "back"))
        num_files, _ = write_distributed(source, there, layout_of(*layout), max_item_bytes=item_bytes)
        assert num_files == layout[0] * layout[1]
        write_hugging_face(open_model(there), back, max_shard_bytes=30_000)
        assert same(everything(open_model(back)), expected), layout

    kind = model_class(model.config)
    loaded, info = kind.from_pretrained(back, output_loading_info=True, dtype="auto")
    assert all(is_kept(name, model.config) for name in info.pop("missing_keys"))
    assert not any(info.values())
    # transformers rounds the selection biases of some classes when it loads them.
    state = loaded.state_dict()
    wanted = {
        name: value.to(state[name].dtype) if name.endswith("correction_bias") else value
        for name, value in model.state_dict().items()
    }
    assert same(trained(state, model), trained(wanted, model))


def test_a_published_configuration_with_experts_at_reduced_width(tmp_path: Path) -> None:
    """The configuration is Qwen3-30B-A3B's own config.json, with its 128 experts, of which a token uses 8,
    and its heads, in two layers, with published names."""
    published = json.loads((CONFIGS_DIR / "models" / "Qwen3-30B-A3B" / "config.json").read_text())
    narrow = {"hidden_size": 16, "head_dim": 2, "moe_intermediate_size": 4, "intermediate_size": 24}
    narrow |= {"vocab_size": 199, "num_hidden_layers": 2}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(published | narrow))
    shapes = {"model.embed_tokens.weight": (199, 16), "model.norm.weight": (16,), "lm_head.weight": (199, 16)}
    of_layer = {"input_layernorm": (16,), "post_attention_layernorm": (16,), "mlp.gate": (128, 16)}
    of_layer |= {f"self_attn.{name}_proj": (rows, 16) for name, rows in (("q", 64), ("k", 8), ("v", 8))}
    of_layer |= {"self_attn.o_proj": (16, 64), "self_attn.q_norm": (2,), "self_attn.k_norm": (2,)}

    for expert in range(128):
        of_layer |= {
            f"mlp.experts.{expert}.{name}_proj": shape
            for name, shape in (("gate", (4, 16)), ("up", (4, 16)), ("down", (16, 4)))
        }

    shapes |= {
        f"model.layers.{layer}.{name}.weight": shape for layer in range(2) for name, shape in of_layer.items()
    }
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(weights, tmp_path / "hf" / "model.safetensors")

    write_distributed(open_model(tmp_path / "hf"), tmp_path / "megatron", layout_of(2, 2))
    experts = read_index(tmp_path / "megatron").tensors[
        "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    ]
    assert tuple(experts.shape) == (2, 128, 8, 16)
    write_hugging_face(open_model(tmp_path / "megatron"), tmp_path / "back")
    assert same(everything(open_model(tmp_path / "back")), weights)
    assert read_architecture(str(tmp_path / "back")) == read_architecture(str(tmp_path / "hf"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_experts"] == 128


def test_what_is_written_is_what_slow_loops_make(tmp_path: Path) -> None:
    """Shapes, canonical names, and zero padding are compared with stacks of shards built row by row."""
    model = random_model("qwen2")
    folder = tmp_path / "m"
    write_distributed(open_model(save(model, tmp_path / "hf")), folder, layout_of(2, 2))
    index = read_index(folder)
    expected = stacked(model.state_dict(), "qwen2", tied=False)
    assert index.tensors.keys() == expected.keys()

    for key, value in expected.items():
        found = torch.full(index.tensors[key].shape, float("nan"))
        for chunk in index.tensors[key].chunks:
            found[chunk.tensor_slice.index] = read_chunk(folder, chunk)
        if "word_embeddings" in key or "output_layer" in key:
            assert found.shape[0] == 256
            assert not found[VOCAB:].any()
            found = found[:VOCAB]
            value = value[:VOCAB]
        assert torch.equal(found, value), key

    description = read_description(folder)
    assert (description.head, description.dtype, description.step) == ("lm", "float32", None)
    assert description.layout == layout_of(2, 2)


def test_each_item_is_a_file_of_torch_save_with_true_checksums(tmp_path: Path, llama: Path) -> None:
    folder = tmp_path / "m"
    write_distributed(open_model(llama), folder, layout_of(2), torch.bfloat16)
    index = read_index(folder)

    for item in index.items():
        content = (folder / item.file).read_bytes()[item.position : item.position + item.nbytes]
        assert zipfile.ZipFile(BytesIO(content)).testzip() is None, item.key
        loaded = torch.load(BytesIO(content), weights_only=True)
        if item.key in index.tensors:
            assert torch.equal(loaded, read_chunk(folder, item))
            assert item.nbytes < loaded.nbytes + 2000  # nothing but the tensor
        else:
            assert loaded == [None]


def test_a_rank_fills_several_files(tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_writer, "FILE_BYTES", 20_000)
    source = open_model(llama)
    num_files, _ = write_distributed(source, tmp_path / "m", layout_of(2), max_item_bytes=8_000)
    assert num_files > 4
    index = read_index(tmp_path / "m")
    chunks = [
        (chunk.file, prod(chunk.shape) * tensor.dtype.itemsize)
        for tensor in index.tensors.values()
        for chunk in tensor.chunks
    ]
    assert max(nbytes for _, nbytes in chunks) <= 8_000
    files = {file: sum(nbytes for name, nbytes in chunks if name == file) for file, _ in chunks}
    assert max(files.values()) < 20_000 + 8_000
    assert {name.split("_")[2] for name in files} == {"0", "1"}  # __<rank>_<part>.distcp
    assert same(everything(open_model(tmp_path / "m")), everything(source))


def test_a_row_is_not_cut() -> None:
    with pytest.raises(ValueError, match=r"a row of 32 elements does not fit into an item of 25"):
        plan_distributed(architecture_of("llama"), "lm", layout_of(), torch.float32, max_item_bytes=100)


def test_the_rest_of_the_folder_goes_along(tmp_path: Path, llama: Path) -> None:
    write_distributed(open_model(llama), tmp_path / "m", layout_of(2), torch.bfloat16)
    write_hugging_face(open_model(tmp_path / "m"), tmp_path / "back", max_shard_bytes=20_000)
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"} < names
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert files == {name for name in names if name.endswith(".safetensors")}
    assert all(
        sum(value.nbytes for value in load_file(tmp_path / "back" / name).values()) <= 20_000
        for name in files
    )


CLASSES = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_critics_and_reward_models(kind: str, tmp_path: Path) -> None:
    """transformers loads the result of a round trip without missing or unexpected tensors."""
    config = config_of("qwen2")
    config.num_labels = 1
    model: PreTrainedModel = CLASSES[kind].from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter) if name != "score.bias" else torch.nn.init.zeros_(parameter)
    source = open_model(save(model, tmp_path / "hf"))
    assert source.head == "value"
    write_distributed(source, tmp_path / "m", layout_of(2, 2))
    write_hugging_face(open_model(tmp_path / "m"), tmp_path / "back")
    loaded, info = CLASSES[kind].from_pretrained(tmp_path / "back", output_loading_info=True, dtype="auto")
    assert not any(info.values())
    assert type(loaded) is type(model)
    assert same(loaded.state_dict(), model.state_dict())


def test_another_dtype(tmp_path: Path, llama: Path) -> None:
    source = open_model(llama)
    write_distributed(source, tmp_path / "m", layout_of(2), torch.bfloat16)
    assert same(
        everything(open_model(tmp_path / "m")),
        {name: value.bfloat16() for name, value in everything(source).items()},
    )
    stored = load_file(llama / "model.safetensors")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_text((llama / "config.json").read_text())
    stored["model.norm.weight"] = stored["model.norm.weight"].bfloat16()
    save_file(stored, mixed / "model.safetensors")

    with pytest.raises(
        CheckpointError, match=r"mixed: model\.norm\.weight is torch\.bfloat16 and most .*; choose .* --dtype"
    ):
        write_hugging_face(open_model(mixed), tmp_path / "out")

    stored["model.norm.weight"] = torch.full_like(stored["model.norm.weight"], 1e5)
    save_file(stored, mixed / "model.safetensors")

    for write in (
        write_hugging_face,
        lambda source, folder, dtype: write_distributed(source, folder, layout_of(), dtype),
    ):
        with pytest.raises(
            CheckpointError, match=r"model\.norm\.weight has elements that float16 cannot represent"
        ):
            write(open_model(mixed), tmp_path / "out", torch.float16)

    assert not (tmp_path / "out").exists()


def to_megatron(source: ModelSource, folder: Path, progress: Progress = no_progress) -> None:
    write_distributed(source, folder, layout_of(2), None, progress)


def to_hugging_face(source: ModelSource, folder: Path, progress: Progress = no_progress) -> None:
    write_hugging_face(source, folder, progress=progress)


WRITERS = pytest.mark.parametrize("write", [to_megatron, to_hugging_face])


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@WRITERS
def test_a_disk_that_takes_no_more(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    (tmp_path / "all").mkdir()
    with (
        largest_file(60_000),
        pytest.raises(CheckpointError, match=r"all/new/\S+: cannot be written: File too large") as raised,
    ):
        write(open_model(llama), tmp_path / "all" / "new")

    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "all").iterdir())


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root may mount a small disk")

    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@WRITERS
def test_a_disk_that_fills_up_meanwhile(
    write: Callable[..., None], tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread writes, because a second one could write all the rest while the first fills the disk."""
    monkeypatch.setattr(streaming, "MAX_THREADS", 1)

    def fill(nbytes: int, total: int) -> None:
        if not (disk / "of another").exists():
            with suppress(OSError), (disk / "of another").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass

    with small_disk(tmp_path / "disk", "size=1m") as disk:
        with pytest.raises(
            CheckpointError, match=r"disk/new/\S+: cannot be written: No space left on device"
        ) as raised:
            write(open_model(llama), disk / "new", fill)
        assert "\n" not in str(raised.value)
        assert [path.name for path in disk.iterdir()] == ["of another"]


@WRITERS
def test_a_disk_without_permission(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    """The folder is on a file system that no user may write, because root ignores permissions."""
    with small_disk(tmp_path / "disk", "size=1m,ro") as disk:
        with pytest.raises(CheckpointError, match=r"disk\S*: Read-only file system$") as raised:
            write(open_model(llama), disk / "new")
        assert "\n" not in str(raised.value)


@WRITERS
def test_a_full_disk_is_seen_before_anything_is_written(
    write: Callable[..., None], tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("megarl.checkpoints.convert.streaming.shutil.disk_usage", lambda path: Usage)
    with pytest.raises(CheckpointError, match=r"new: needs \d+,\d+ bytes, but only 1,000 are free"):
        write(open_model(llama), tmp_path / "new")
    assert not list(tmp_path.iterdir())


@WRITERS
def test_folders_that_cannot_be_written(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    source = open_model(llama)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()

    for folder, says in {
        "full": r"full: already exists and is not empty",
        "file": r"file: already exists and is not a folder",
        "file/new": r"file: (File exists|Not a directory)",
    }.items():
        with pytest.raises(CheckpointError, match=says) as raised:
            write(source, tmp_path / folder)
        assert "\n" not in str(raised.value)

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "mine"]
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    write(source, tmp_path / "empty")
    assert same(everything(open_model(tmp_path / "empty")), everything(source))


@WRITERS
def test_an_interrupt_leaves_nothing(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    once = threading.Lock()

    def interrupt(nbytes: int, total: int) -> None:
        if once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        write(open_model(llama), tmp_path / "new", interrupt)
    assert not list(tmp_path.iterdir())


@WRITERS
def test_a_source_that_fails_half_way(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    source = open_model(llama)
    name = "model.layers.2.mlp.up_proj.weight"

    def fail() -> Any:
        raise CheckpointError("model.safetensors: cannot be read: Input/output error")

    broken = replace(
        source.tensors[name], pieces=tuple((place, fail) for place, _ in source.tensors[name].pieces)
    )
    with pytest.raises(CheckpointError, match=r"cannot be read: Input/output error"):
        write(replace(source, tensors={**source.tensors, name: broken}), tmp_path / "new")
    assert not list(tmp_path.iterdir())


@WRITERS
def test_progress_is_every_byte_once(write: Callable[..., None], tmp_path: Path, llama: Path) -> None:
    calls: list[tuple[int, int]] = []
    write(open_model(llama), tmp_path / "new", lambda nbytes, total: calls.append((nbytes, total)))
    assert {total for _, total in calls} == {sum(nbytes for nbytes, _ in calls)}


def test_a_layout_that_does_not_divide_the_model(tmp_path: Path, llama: Path) -> None:
    source = open_model(llama)
    with pytest.raises(ValueError, match=r"4 key-value heads cannot be sharded by tensor_parallel_size 3"):
        write_distributed(source, tmp_path / "new", layout_of(3))

    with pytest.raises(
        ValueError, match=r"num_hidden_layers 4 is not a multiple of pipeline_parallel_size 3"
    ):
        write_distributed(source, tmp_path / "new", layout_of(1, 3))

    assert not list(tmp_path.iterdir())
