"""Read the headers of the safetensors files in a folder: which tensors they store, and in which format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.machine.files import read_json_object
from megarl.models.fp8 import SCALE_SUFFIX
from megarl.weights.tensors import WeightTransferError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
_LFS = b"version https://git-lfs"

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOAT8 = "F8_E4M3"
# The suffixes of the names under which a tensor in MXFP4 is stored.
BLOCKS = "_blocks"
SCALES = "_scales"
MXFP4_BLOCK = 32  # numbers that share a scale
# Dtypes in which folders in block-scaled FP8 store their scales.
SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}


class Packing(Enum):
    """The formats of fewer bits that are converted to bfloat16 when they are read."""

    mxfp4 = "MXFP4"  # see safetensors_file.py
    block_fp8 = "block-scaled FP8"  # see models/fp8.py


@dataclass(frozen=True, kw_only=True)
class TensorInFile:
    """The metadata of a tensor in a safetensors file. The values are not loaded.

    Attributes:
        file: The file that contains the tensor.
        shape: The shape of the tensor.
        dtype: The dtype as the format names it, such as BF16.
        packing: The format of a packed tensor, whose shape and dtype are those that it is read with.
        scales: The scales of a packed tensor. None exactly if `packing` is.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    packing: Packing | None = None
    scales: TensorInFile | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the tensor and of its scales."""
        return (self.file,) if self.scales is None else (self.file, self.scales.file)


# The tensors of a folder, by name.
CheckpointIndex = Mapping[str, TensorInFile]


def shapes_of(index: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a folder."""
    return {name: stored.shape for name, stored in index.items()}


def read_checkpoint_index(folder: str | Path) -> CheckpointIndex:
    """Read the headers of `model.safetensors`, or of the files listed in `model.safetensors.index.json`.

    Raises:
        WeightTransferError: There are no weights or two sets of them, a file is missing, truncated or
            corrupt, or the index disagrees with its files. The message names the file and the tensor.
    """
    folder = Path(folder)
    index_path = folder / INDEX_FILE

    # transformers would load the base model of the adapter instead of the weights next to it.
    if (folder / ADAPTER_CONFIG_FILE).is_file():
        raise WeightTransferError(
            f"{folder}: has an adapter ({ADAPTER_CONFIG_FILE}) next to the weights of a model; move the "
            "adapter to a folder of its own, or delete its files"
        )

    if index_path.is_file():
        tensors = _read_sharded(folder, index_path)
        # transformers would load the single file.
        single = folder / SINGLE_FILE
        if single.is_file() and single not in {stored.file for stored in tensors.values()}:
            raise WeightTransferError(
                f"{folder}: has two sets of weights, {SINGLE_FILE} and the files that {INDEX_FILE} lists; "
                "delete the one that is out of date (of the second set, the index too)"
            )
        return _unpacked(tensors)

    if (folder / SINGLE_FILE).is_file():
        return _unpacked(_read_header(folder / SINGLE_FILE))

    raise WeightTransferError(
        f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; convert weights in another format to safetensors "
        "(transformers: model.save_pretrained)"
    )


def _read_sharded(folder: Path, index_path: Path) -> dict[str, TensorInFile]:
    try:
        file_of = read_json_object(index_path).get("weight_map")
    except (OSError, ValueError) as error:
        raise WeightTransferError(
            f"{index_path}: not a safetensors index with a weight_map: {error}"
        ) from error

    if not isinstance(file_of, dict):
        raise WeightTransferError(
            f"{index_path}: not a safetensors index with a weight_map: weight_map is {file_of!r}"
        )

    tensors: dict[str, TensorInFile] = {}

    # Refuse paths outside the folder before any file is opened.
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightTransferError(
                f"{index_path}: maps {name} to {file!r}; only files in this folder are allowed"
            )

    for name, file in file_of.items():
        if not (folder / file).is_file():
            raise WeightTransferError(f"{folder / file}: file is missing; it should contain {name}")

    # Headers and index must agree: neither may list a tensor that the other lacks.
    for file in sorted(set(file_of.values())):
        for name, stored in _read_header(folder / file).items():
            if file_of.get(name) != file:
                raise WeightTransferError(
                    f"{folder / file}: contains {name!r}, which {INDEX_FILE} maps to {file_of.get(name)!r}"
                )
            tensors[name] = stored

    for name, file in file_of.items():
        if name not in tensors:
            raise WeightTransferError(
                f"{folder / file}: does not contain {name!r}, which {INDEX_FILE} maps to it"
            )

    return tensors


# Packed tensors: the format, the suffixes of the values and of the scales, and the dtype of the values.
_STORED_AS = (
    (Packing.mxfp4, BLOCKS, SCALES, "U8"),
    (Packing.block_fp8, "", SCALE_SUFFIX, FLOAT8),
)


def _unpacked(tensors: dict[str, TensorInFile]) -> dict[str, TensorInFile]:
    """List packed tensors and their scales as the tensors that they form."""
    found = dict(tensors)
    for stored_name, scales in tensors.items():
        for packing, of_values, of_scales, dtype in _STORED_AS:
            name = stored_name.removesuffix(of_scales)
            values = tensors.get(name + of_values)
            if not stored_name.endswith(of_scales) or values is None or values.dtype != dtype:
                continue
            shape = values.shape
            if packing is Packing.mxfp4:
                *leading, rows, groups, _ = shape
                shape = (*leading, groups * MXFP4_BLOCK, rows)
            del found[stored_name], found[name + of_values]
            found[name] = TensorInFile(
                file=values.file, shape=shape, dtype="BF16", packing=packing, scales=scales
            )
    return found


def _read_header(path: Path) -> dict[str, TensorInFile]:
    try:
        # Open the file first: the error of safetensors for an unreadable file does not contain the reason.
        with path.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise WeightTransferError(
                    f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull`"
                )
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
            return {
                name: TensorInFile(file=path, shape=tuple(s.get_shape()), dtype=s.get_dtype())
                for name, s in slices.items()
            }
    except OSError as error:
        raise WeightTransferError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        size = f"{path.stat().st_size:,} bytes"
        raise WeightTransferError(
            f"{path}: truncated or not a safetensors file, {size}: {error}{_cut_off(path)}"
        ) from error


def _cut_off(path: Path) -> str:
    """Describe the first incomplete tensor of a truncated file. Empty if the header itself is damaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        encoded = file.read(min(length, path.stat().st_size))

    try:
        # Offsets in the header count from its end; the eight bytes before the header give its length.
        ends = {
            name: 8 + length + entry["data_offsets"][1]
            for name, entry in json.loads(encoded).items()
            if name != "__metadata__"
        }
        lost = [name for name, end in ends.items() if end > path.stat().st_size]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # damaged header
        return ""

    first = min(lost, key=lambda name: ends[name], default=None)
    return "" if first is None else f"; {first} is incomplete ({len(lost)} of {len(ends)} tensors are)"
