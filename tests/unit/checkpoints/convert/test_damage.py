"""Damaged folders passed to the commands: one line that names the file and tensor, status 2, and nothing at
--output."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.convert.distributed_writer import write_distributed
from megarl.checkpoints.convert.open import open_model
from megarl.checkpoints.role_folder import Layout
from megarl.checkpoints.torch_dist import read_index
from megarl.cli.main import main
from tests.unit.checkpoints.test_role_folder import Opens, flip
from tests.unit.weights.models import random_model, save

LAYOUT = Layout(
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    virtual_pipeline_parallel_size=None,
    data_parallel_size=1,
)
FC2 = "decoder.layers.mlp.linear_fc2.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write `hf`, in several files, and `megatron`, in four."""
    root = tmp_path_factory.mktemp("originals")
    save(random_model("llama"), root / "hf", max_shard_size="30KB")
    write_distributed(open_model(root / "hf"), root / "megatron", LAYOUT)
    return root


def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "input"))


def refused(capsys: pytest.CaptureFixture[str], command: str, folder: Path) -> str:
    """Return the one-line error about `folder`."""
    assert main(["convert", command, "--input", str(folder), "--output", str(folder.parent / "output")]) == 2

    # There is no output, and no partial output next to it.
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err

    return printed.err


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def swap(left: Path, right: Path) -> None:
    other = left.with_name("other")
    os.rename(left, other)
    os.rename(right, left)
    os.rename(other, right)


def truncate(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def reshape_in_file(folder: Path) -> None:
    path = shard_of(folder, DOWN)
    tensors = load_file(path)
    tensors[DOWN] = tensors[DOWN].T.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def bins_only(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({"x": Opens()}, folder / "pytorch_model.bin")


HUGGING_FACE: list[tuple[str, Callable[[Path], Any], str]] = [
    (
        "truncated shard",
        lambda folder: truncate(shard_of(folder, DOWN), 9),
        r"model-\d+-of-\d+\.safetensors: truncated .*; model\.\S+ is incomplete",
    ),
    (
        "missing shard",
        lambda folder: shard_of(folder, DOWN).unlink(),
        r"model-\d+-of-\d+\.safetensors: file is missing; .* model\.",
    ),
    (
        "missing index",
        lambda folder: (folder / "model.safetensors.index.json").unlink(),
        r"no model\.safetensors and no model\.saf",
    ),
    (
        "wrong shape",
        reshape_in_file,
        r"model\.layers\.1\.mlp\.down_proj\.weight in model-\S+ has shape \(20, 32\), but config\.json implies "
        r"\(32, 20\)",
    ),
    (
        "swapped files",
        lambda folder: swap(*sorted(folder.glob("*.safetensors"))[:2]),
        r"model-00001-of-\d+\.safetensors: contains 'model\.\S+', which model\.safetensors\.index\.json maps "
        r"to",
    ),
    (
        "flipped bit in a header",
        lambda folder: flip(shard_of(folder, DOWN), 12),
        r"model-\d+-of-\d+\.safetensors: ",
    ),
    (
        "a pickle for weights",
        bins_only,
        r"no model\.safetensors .*convert weights in another format to safetensors",
    ),
]


@pytest.mark.parametrize(
    ("damage", "says"), [row[1:] for row in HUGGING_FACE], ids=[row[0] for row in HUGGING_FACE]
)
def test_hugging_face(
    originals: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any],
    says: str,
) -> None:
    folder = copied(originals / "hf", tmp_path)
    damage(folder)
    line = refused(capsys, "hf-to-megatron", folder)
    assert re.search(says, line), line


def metadata_says(folder: Path, change: Callable[[Any], None]) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # written by this test
    change(metadata)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def widen(metadata: Any) -> None:
    metadata.state_dict_metadata[FC2].size = torch.Size([4, 20, 32])
    for chunk in metadata.state_dict_metadata[FC2].chunks:
        chunk.sizes = torch.Size([1, 10, 32])
        chunk.offsets = torch.Size([chunk.offsets[0], chunk.offsets[2], 0])


def flip_in(folder: Path, key: str) -> None:
    chunk = read_index(folder).tensors[key].chunks[1]
    flip(folder / chunk.file, chunk.position + chunk.nbytes // 2)


def without_manifest(damage: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Remove the manifest, as in a folder of Megatron's own programs."""

    def both(folder: Path) -> None:
        (folder / "manifest.json").unlink()
        damage(folder)

    return both


MEGATRON: list[tuple[str, Callable[[Path], Any], str, str]] = [
    # (damage, how it is done, error with a manifest, error without one)
    (
        "truncated file",
        lambda folder: truncate(folder / "__1_0.distcp", 9),
        r"__1_0\.distcp: truncated: .* bytes, but decoder\.\S+ is at",
        "",
    ),
    (
        "missing file",
        lambda folder: (folder / "__2_0.distcp").unlink(),
        r"__2_0\.distcp: the file is missing; it contains \S+",
        "",
    ),
    (
        "swapped files",
        lambda folder: swap(folder / "__0_0.distcp", folder / "__1_0.distcp"),
        r"__\d_0\.distcp: \S+ at bytes \d+ to \d+ is not what was written|__\d_0\.distcp: truncated",
        "-",  # files and items have equal sizes and shapes, so only checksums distinguish them
    ),
    (
        "wrong shape",
        lambda folder: metadata_says(folder, widen),
        r"\.metadata: is not what was written",
        r"the chunks of decoder\.layers\.mlp\.linear_fc2\.weight|does not contain the location of the chunk of "
        r"decoder\.layers\.mlp\.linear_fc2\.weight",
    ),
    (
        "flipped bit",
        lambda folder: flip_in(folder, FC2),
        r"__\d_0\.distcp: decoder\.layers\.mlp\.linear_fc2\.weight at bytes \d+ to \d+ is not what was "
        r"written",
        r"__\d_0\.distcp: decoder\.layers\.mlp\.linear_fc2\.weight at \(.*\) is not what was written \(its "
        r"CRC-32 differs\)",
    ),
    (
        "code in common.pt",
        lambda folder: torch.save({"args": Opens()}, folder / "common.pt"),
        r"common\.pt: is not what was written",
        r"common\.pt: its pickle names posix\.system, which is not on the list",
    ),
    (
        "code in .metadata",
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Opens())),
        r"\.metadata: is not what was written",
        r"\.metadata: its pickle names posix\.system, which is not on the list",
    ),
    (
        "no .metadata",
        lambda folder: (folder / ".metadata").unlink(),
        r"\.metadata: the file is missing",
        r"which is not a model",
    ),
]
CASES = [(name, damage, says) for name, damage, says, _ in MEGATRON] + [
    (f"{name}, no manifest", without_manifest(damage), plain or says)
    for name, damage, says, plain in MEGATRON
    if plain != "-"
]


@pytest.mark.parametrize(("damage", "says"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_megatron(
    originals: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], Any],
    says: str,
) -> None:
    folder = copied(originals / "megatron", tmp_path)
    damage(folder)
    line = refused(capsys, "megatron-to-hf", folder)
    assert re.search(says, line), line


def test_safetensors_have_no_checksums(
    originals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped bit in a weight is a different weight to every reader.

    `verify` detects it by comparing with a folder converted before.
    """
    folder = copied(originals / "hf", tmp_path)
    path = shard_of(folder, DOWN)
    flip(path, path.stat().st_size - 1)
    assert main(["convert", "verify", str(originals / "hf"), str(originals / "megatron")]) == 0
    assert main(["convert", "verify", str(folder), str(originals / "megatron")]) == 1
    assert "different: 38 tensors bitwise identical, 1 tensor different" in capsys.readouterr().out
