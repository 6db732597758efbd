"""The manifest (`manifest.json`) of a role's folder in a checkpoint.

It lists the contents of the distributed checkpoint, with a checksum of each item.

It is written last, and verified before anything is loaded, because Megatron does not check what it reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from megarl.checkpoints.torch_dist import (
    BACKEND_FILE,
    COMMON_FILE,
    METADATA_FILE,
    StoredItem,
    TorchDistIndex,
    open_item,
    read_index,
)
from megarl.checkpoints.torch_file import refuse_code
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json, write_whole
from megarl.models.tensor_table import Head

MANIFEST_FILE = "manifest.json"
# Config, tokenizer and chat template of the role's model. The folder of this name next to the roles contains
# the complete policy.
HUGGING_FACE_FOLDER = "huggingface"
FORMAT = 1
WHOLE_FILES = (METADATA_FILE, BACKEND_FILE, COMMON_FILE)
_NUM_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of the ranks that wrote the folder. It can be loaded in any other layout."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    virtual_pipeline_parallel_size: int | None
    data_parallel_size: int
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1


@dataclass(frozen=True, kw_only=True)
class Description:
    """The folder's description of its model.

    Attributes:
        dtype: The dtype of the weights, such as bfloat16.
        step: None if the model was not saved by a run.
    """

    head: Head
    dtype: str
    layout: Layout
    step: int | None = None


def item_name(item: StoredItem) -> str:
    """Return the name of an item's checksum. Files that are a single item use their own name."""
    return f"{item.file}@{item.position}"


def item_checksums(folder: str | Path, files: Collection[str]) -> dict[str, str]:
    """Return name -> xxh3_64 in hex of every item in `files`.

    `files` are file names in the folder of a complete checkpoint.

    Ranks divide the work by files. The names are unique over all files.

    Raises:
        CheckpointError: A file is missing or too short.
    """
    folder = Path(folder)
    items = [item for item in read_index(folder).items() if item.file in files]
    items += [
        StoredItem(key=name, file=name, position=0, nbytes=(folder / name).stat().st_size)
        for name in WHOLE_FILES
        if name in files
    ]

    return _checksums(folder, items)


def _checksums(folder: Path, items: Iterable[StoredItem]) -> dict[str, str]:
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checksums") as threads:
        names = []
        sums = []
        for item in items:
            names.append(item.file if item.file in WHOLE_FILES else item_name(item))
            sums.append(threads.submit(_checksum, folder, item))
        return {name: each.result() for name, each in zip(names, sums, strict=True)}


def _checksum(folder: Path, item: StoredItem) -> str:
    try:
        with open_item(folder, item) as opened:
            return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{folder / item.file}: cannot be read: {error}") from error


def write_manifest(folder: str | Path, description: Description, checksums: Mapping[str, str]) -> None:
    """Write the manifest of a folder. `checksums` must cover all of its files.

    Raises:
        CheckpointError: Names an item without a checksum.
    """
    folder = Path(folder)
    index = read_index(folder)

    def checksum(name: str) -> str:
        if name not in checksums:
            raise CheckpointError(f"{folder}: no checksum was computed for {name}")
        return checksums[name]

    # Each chunk, object and whole file has the checksum that its writer computed.
    content = {"format": FORMAT, **asdict(description), **_entries(index, checksum)}
    # Write the manifest last: a folder without one is not a complete checkpoint.
    write_whole(folder / MANIFEST_FILE, json.dumps(content) + "\n")


def _entries(index: TorchDistIndex, checksum: Callable[[str], str | None]) -> dict[str, Any]:
    """Return the contents of the manifest that follow from `.metadata`, with checksums by name."""

    def place(item: StoredItem) -> dict[str, Any]:
        return {
            "file": item.file,
            "position": item.position,
            "nbytes": item.nbytes,
            "checksum": checksum(item_name(item)),
        }

    return {
        "tensors": {
            key: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "chunks": [
                    {
                        "offsets": list(chunk.tensor_slice.starts),
                        "shape": list(chunk.shape),
                        **place(chunk),
                    }
                    for chunk in tensor.chunks
                ],
            }
            for key, tensor in index.tensors.items()
        },
        "objects": {key: place(item) for key, item in index.objects.items()},
        "files": {
            name: {"nbytes": (index.folder / name).stat().st_size, "checksum": checksum(name)}
            for name in WHOLE_FILES
            if (index.folder / name).is_file()
        },
    }


def read_description(folder: str | Path) -> Description:
    """Return the description in a folder's manifest.

    Raises CheckpointError if it is missing (the folder is incomplete), damaged, or in another format.
    """
    description, _, _ = _read_manifest(folder)
    return description


def _read_manifest(folder: str | Path) -> tuple[Description, dict[str, dict[str, Any]], dict[str, str]]:
    """Return the description; "tensors", "objects" and "files" as in the JSON; the checksums of items."""
    path = Path(folder) / MANIFEST_FILE
    try:
        content = parse_json(path.read_text())
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: has format {content['format']!r}, this megarl reads {FORMAT}")
        layout = Layout(**content["layout"])
        description = Description(
            head=content["head"], dtype=content["dtype"], layout=layout, step=content["step"]
        )
        entries = {part: dict(content[part]) for part in ("tensors", "objects", "files")}
        chunks = [chunk for tensor in entries["tensors"].values() for chunk in tensor["chunks"]]
        items = [*chunks, *entries["objects"].values()]
        checksums = {f"{item['file']}@{item['position']}": item["checksum"] for item in items}
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: the file is missing; it is written last, so the folder is not a complete checkpoint"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged: {type(error).__name__}: {error}") from error

    return description, entries, checksums


def check_folder(folder: str | Path, part: tuple[int, int] = (0, 1)) -> None:
    """Verify that the folder is unchanged since it was written.

    Args:
        part: (index, count): the part of the items' bytes that this rank verifies, and the number of parts.

    Raises:
        CheckpointError: Names the file and tensor in one line. A file is missing, truncated or swapped, a bit
            has changed, or a pickle references something that is not data.
    """
    folder = Path(folder)
    _, entries, checksums = _read_manifest(folder)
    # Check the index files first: they locate all items, and are small enough for every rank to check.
    _check_whole_files(folder, entries)
    refuse_code(folder / COMMON_FILE)
    index = read_index(folder)
    _check_entries(folder, _entries(index, checksums.get), entries)
    # Divide only the bytes of the items among the ranks; they are nearly all of the work.
    mine = _share(sorted(index.items(), key=lambda item: (item.file, item.position)), *part)
    found = _checksums(folder, mine)

    for item in mine:
        if found[item_name(item)] != checksums[item_name(item)]:
            raise CheckpointError(
                f"{folder / item.file}: {item.key} at bytes {item.position} to "
                f"{item.position + item.nbytes} is not "
                "what was written (its checksum differs); use another checkpoint"
            )

    # Objects are pickles that Megatron will load, so none may contain code.
    for key, item in index.objects.items():
        with open_item(folder, item) as opened:
            refuse_code(opened, f"{folder / item.file}: {key}")


def _check_whole_files(folder: Path, entries: Mapping[str, Any]) -> None:
    for name, entry in entries["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: the file is missing")
        item = StoredItem(key=name, file=name, position=0, nbytes=path.stat().st_size)
        if item.nbytes != entry["nbytes"] or _checksum(folder, item) != entry["checksum"]:
            raise CheckpointError(
                f"{path}: is not what was written (its checksum differs); use another checkpoint"
            )


def _check_entries(folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Check that `.metadata` and the manifest agree."""
    for part in ("tensors", "objects"):
        for key in {**found[part], **expected[part]}:
            if found[part].get(key) != expected[part].get(key):
                raise CheckpointError(
                    f"{folder}: {METADATA_FILE} and {MANIFEST_FILE} differ in {key}: one of the two was "
                    f"changed"
                )


def _share(items: Sequence[StoredItem], number: int, num_parts: int) -> list[StoredItem]:
    """Return one of `num_parts` contiguous parts of the items, with about equal numbers of bytes."""
    total = sum(each.nbytes for each in items)
    mine = []
    before = 0

    for each in items:
        # An item belongs to the part in which its first byte lies, so each belongs to exactly one.
        if before * num_parts // max(total, 1) == number:
            mine.append(each)
        before += each.nbytes

    return mine
