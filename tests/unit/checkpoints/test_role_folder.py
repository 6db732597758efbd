"""A distributed checkpoint written by PyTorch, read as plain files, and the errors for damaged ones."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from megarl.checkpoints.role_folder import (
    Description,
    Layout,
    check_folder,
    item_checksums,
    read_description,
    write_manifest,
)
from megarl.checkpoints.torch_dist import TORCH_DIST, read_chunk, read_index
from megarl.checkpoints.torch_file import refuse_code
from megarl.machine.errors import CheckpointError
from megarl.weights.tensors import TensorSlice, chunks_fault

LAYOUT = Layout(
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    virtual_pipeline_parallel_size=None,
    data_parallel_size=1,
)
DESCRIPTION = Description(head="lm", dtype="bfloat16", layout=LAYOUT, step=7)


class Opens:
    """A malicious pickle that runs code."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.system, ("true",)


def state() -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    return {
        "decoder.weight": torch.randn(3, 5, 7, generator=generator).bfloat16(),
        "decoder.bias": torch.randn(1, 5, generator=generator),
        "optimizer.state.exp_avg.decoder.weight": torch.randn(3, 5, 7, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5),
        "rng_state": (np.random.get_state(), random.getstate()),
    }


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "actor"
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps(TORCH_DIST))
    torch.save(
        {"iteration": 7, "optimizer": {"param_groups": [{"lr": 1e-6, "betas": (0.9, 0.95)}]}},
        folder / "common.pt",
    )
    write_manifest(folder, DESCRIPTION, item_checksums(folder, [path.name for path in folder.iterdir()]))

    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "actor"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_chunks_are_what_was_saved(written: Path) -> None:
    index = read_index(written)
    expected = {key: value for key, value in state().items() if isinstance(value, torch.Tensor)}
    assert set(index.tensors) == set(expected)

    for key, tensor in index.tensors.items():
        (chunk,) = tensor.chunks
        assert tensor.dtype == expected[key].dtype
        assert torch.equal(read_chunk(written, chunk), expected[key])

    assert list(index.objects) == ["rng_state"]


def test_a_whole_folder_passes_in_any_number_of_parts(written: Path) -> None:
    for num_parts in (1, 2, 5):
        for number in range(num_parts):
            check_folder(written, (number, num_parts))
    assert read_description(written) == DESCRIPTION


def test_a_flipped_bit_is_found_by_exactly_one_of_the_parts(folder: Path) -> None:
    index = read_index(folder)
    chunk = index.tensors["optimizer.state.exp_avg.decoder.weight"].chunks[0]
    flip(folder / chunk.file, chunk.position + chunk.nbytes // 2)
    found = []

    for number in range(4):
        try:
            check_folder(folder, (number, 4))
        except CheckpointError as error:
            found.append(str(error))

    assert len(found) == 1
    assert f"{folder}/{chunk.file}: optimizer.state.exp_avg.decoder.weight at bytes" in found[0]


def truncated(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 100)


def another_shape(folder: Path) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)  # written by this test
    metadata.state_dict_metadata["decoder.bias"].size = torch.Size([5, 1])
    metadata.state_dict_metadata["decoder.bias"].chunks[0].sizes = torch.Size([5, 1])
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def a_chunk_less(folder: Path) -> None:
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["decoder.bias"].size = torch.Size([2, 5])
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


def code_in_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Opens()))


def code_in_common(folder: Path) -> None:
    torch.save({"iteration": Opens()}, folder / "common.pt")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, r"__0_0\.distcp: truncated: it has \d+ bytes, but \S+ is at bytes \d+ to \d+"),
        (
            lambda folder: (folder / "__0_0.distcp").unlink(),
            r"__0_0\.distcp: the file is missing; it contains \S+",
        ),
        (
            a_chunk_less,
            r"\.metadata: the chunks of decoder\.bias do not cover it exactly once: along the first dimension: 1 of 2",
        ),
        (code_in_metadata, r"\.metadata: its pickle names posix\.system, which is not on the list"),
        (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04garbage"), r"\.metadata: damaged"),
        (lambda folder: (folder / ".metadata").unlink(), r"\.metadata: the file is missing"),
        (lambda folder: (folder / "metadata.json").unlink(), r"metadata\.json: the file is missing"),
        (
            lambda folder: (folder / "metadata.json").write_text("{}"),
            r"metadata\.json: contains \{\}; only Megatron's format torch_dist",
        ),
    ],
)
def test_damage_that_needs_no_manifest_is_found_on_reading_the_index(
    folder: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as raised:
        read_index(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, r"__0_0\.distcp: truncated"),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            r"manifest\.json: the file is missing; it is written last",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 1}'),
            r"manifest\.json: damaged: KeyError",
        ),
        (
            lambda folder: (folder / "manifest.json").write_text('{"format": 9}'),
            r"manifest\.json: has format 9",
        ),
        (lambda folder: (folder / "common.pt").unlink(), r"common\.pt: the file is missing"),
        (lambda folder: flip(folder / "common.pt", 200), r"common\.pt: is not what was written"),
        (another_shape, r"\.metadata: is not what was written"),
        (code_in_metadata, r"\.metadata: is not what was written"),
    ],
)
def test_damage_is_found_against_the_manifest(
    folder: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=says) as raised:
        check_folder(folder)
    assert "\n" not in str(raised.value)


def test_an_item_that_is_another_tensor_is_refused(folder: Path) -> None:
    another_shape(folder)
    index = read_index(folder)
    with pytest.raises(
        CheckpointError, match=r"decoder\.bias at \(0, 0\): the item has shape \(1, 5\) .* specifies \(5, 1\)"
    ):
        read_chunk(folder, index.tensors["decoder.bias"].chunks[0])


def test_code_is_refused_also_where_a_manifest_vouches_for_it(folder: Path) -> None:
    code_in_common(folder)
    write_manifest(folder, DESCRIPTION, item_checksums(folder, [path.name for path in folder.iterdir()]))
    with pytest.raises(CheckpointError, match=r"common\.pt: its pickle names posix\.system"):
        check_folder(folder)


def test_code_in_an_object_is_refused(tmp_path: Path) -> None:
    dcp.save({"rng_state": Opens()}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps(TORCH_DIST))
    torch.save({}, tmp_path / "common.pt")
    write_manifest(
        tmp_path, DESCRIPTION, item_checksums(tmp_path, [path.name for path in tmp_path.iterdir()])
    )
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: rng_state: its pickle names posix\.system"):
        check_folder(tmp_path)


def test_what_runs_hold_passes_as_data(tmp_path: Path) -> None:
    torch.save(
        {**state(), "dtype": torch.bfloat16, "shape": torch.Size([2]), "device": torch.device("cpu")},
        tmp_path / "data.pt",
    )
    refuse_code(tmp_path / "data.pt")
    (tmp_path / "text.pt").write_text("no zip")
    with pytest.raises(CheckpointError, match=r"text\.pt: damaged, or not in the zip format"):
        refuse_code(tmp_path / "text.pt")


def test_a_checksum_is_missing(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checksum was computed for __0_0\.distcp@\d+"):
        write_manifest(
            folder, DESCRIPTION, item_checksums(folder, [".metadata", "common.pt", "metadata.json"])
        )


def test_metadata_of_megatron_core_0_15_which_has_a_class_of_its_own(folder: Path) -> None:
    path = folder / ".metadata"
    with path.open("rb") as file:
        content = pickle.dumps(pickle.load(file), protocol=2)  # written by this test
    names = (
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n",
    )
    assert content.count(names[0]) == 1
    expected = read_index(folder)
    path.write_bytes(content.replace(*names))
    assert read_index(folder) == expected


def tensor_slice(*bounds: tuple[int, int]) -> TensorSlice:
    return TensorSlice(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


@pytest.mark.parametrize(
    ("shape", "slices", "good"),
    [
        (
            (2, 4),
            [tensor_slice((0, 1), (0, 4)), tensor_slice((1, 2), (0, 2)), tensor_slice((1, 2), (2, 4))],
            True,
        ),
        (
            (2, 4),
            [tensor_slice((0, 2), (0, 2)), tensor_slice((0, 1), (2, 4)), tensor_slice((1, 2), (2, 4))],
            True,
        ),  # slices that do not match any group of layers
        ((2, 4), [tensor_slice((0, 1), (0, 4)), tensor_slice((1, 2), (0, 2))], False),
        (
            (2, 4),
            [tensor_slice((0, 1), (0, 4)), tensor_slice((1, 2), (0, 3)), tensor_slice((1, 2), (2, 4))],
            False,
        ),
        (
            (2, 4),
            [tensor_slice((0, 1), (0, 4)), tensor_slice((0, 1), (0, 4)), tensor_slice((1, 2), (0, 4))],
            False,
        ),
        ((4,), [tensor_slice((0, 2)), tensor_slice((2, 4)), tensor_slice((2, 4))], False),
        ((4,), [tensor_slice((0, 2)), tensor_slice((2, 5))], False),
        ((), [TensorSlice((), ())], True),
        ((3,), [tensor_slice((0, 3), (0, 1))], False),
    ],
)
def test_chunks_make_a_tensor_once(shape: tuple[int, ...], slices: list[TensorSlice], good: bool) -> None:
    assert (chunks_fault(shape, slices) is None) == good


def test_thousands_of_chunks_are_judged_at_once() -> None:
    slices = [
        tensor_slice((layer, layer + 1), (rank, rank + 1)) for layer in range(200) for rank in range(32)
    ]
    assert chunks_fault((200, 32), slices) is None
