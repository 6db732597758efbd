"""Compare the tensors of an architecture with those stored in a folder, before loading."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.machine.files import read_json_object
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.mapping import HF_LAYER
from megarl.models.tensor_table import (
    LM_HEAD_TENSOR,
    VALUE_BIAS_TENSOR,
    VALUE_HEAD_TENSOR,
    Head,
    Weight,
    embedding_tensor,
    stored_weights,
    unique_tensors,
    weights_of,
)
from megarl.weights.mxfp4 import BLOCKS, SCALES, unpacked_shape
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
# rows of each matrix in memory at a time, when a tied output layer is compared with the embedding
_COMPARED_ROWS = 4096

TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LAYER_TENSOR = re.compile(HF_LAYER.replace(".", r"\.").format(layer=r"(\d+)"))


@dataclass(frozen=True, kw_only=True)
class TensorInFile:
    """The metadata of a tensor in a safetensors file. The values are not loaded.

    Attributes:
        file: The file that contains the tensor.
        shape: The shape of the tensor.
        dtype: The dtype as the format names it, such as BF16.
        scales_file: The file of the scales, if the tensor is stored in MXFP4 (see mxfp4.py). Its shape and
            dtype are those that it is read with.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    scales_file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    folder: Path
    tensors: dict[str, TensorInFile]


def manifest_of(architecture: Architecture, dtype: torch.dtype, head: Head = "lm") -> Manifest:
    """Return every Hugging Face tensor of the model once. A tied output layer is not included.

    Args:
        architecture: The model.
        dtype: The dtype of the model. Rows of the table may have another.
        head: The head of the model.

    Raises:
        ValueError: The model family has no tensor table.
    """
    weights = weights_of(architecture, head)
    return {
        tensor.name: TensorMeta(tensor.shape, dtype_of(weight, dtype))
        for weight in weights
        if not weight.is_copy
        for tensor in weight.tensors
    }


def stored_manifest(index: CheckpointIndex, architecture: Architecture, head: Head) -> Manifest:
    """Return the tensors that a folder must have, which may hold experts fused, unlike `manifest_of`."""
    weights = stored_weights(architecture, head, index.tensors)
    return {tensor.name: TensorMeta(tensor.shape, torch.float32) for tensor in unique_tensors(weights)}


def dtype_of(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model of dtype `dtype`."""
    return dtype if weight.dtype is None else getattr(torch, weight.dtype)


def read_checkpoint_index(folder: str | Path) -> CheckpointIndex:
    """Read the headers of `model.safetensors`, or of the files listed in `model.safetensors.index.json`.

    Raises:
        WeightTransferError: There are no weights, a file is missing, truncated or corrupt, or the index
            disagrees with its files. The message names the file and the tensor.
    """
    folder = Path(folder)
    index_path = folder / INDEX_FILE

    if index_path.is_file():
        return CheckpointIndex(folder=folder, tensors=_unpacked(_read_sharded(folder, index_path)))

    if (folder / SINGLE_FILE).is_file():
        return CheckpointIndex(folder=folder, tensors=_unpacked(_read_header(folder / SINGLE_FILE)))

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


def _unpacked(tensors: dict[str, TensorInFile]) -> dict[str, TensorInFile]:
    """List blocks and scales in MXFP4 as the tensor that they form."""
    found: dict[str, TensorInFile] = {}
    for name, stored in tensors.items():
        scales = tensors.get(name.removesuffix(BLOCKS) + SCALES)
        if name.endswith(BLOCKS) and stored.dtype == "U8" and scales is not None:
            found[name.removesuffix(BLOCKS)] = TensorInFile(
                file=stored.file,
                shape=unpacked_shape(stored.shape),
                dtype="BF16",
                scales_file=scales.file,
            )
        elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in tensors):
            found[name] = stored

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


def check_index(index: CheckpointIndex, manifest: Manifest, is_ignored: Callable[[str], bool]) -> None:
    """Compare the stored names, shapes and dtypes with the manifest.

    Args:
        index: The stored tensors.
        manifest: The tensors of the architecture.
        is_ignored: Returns whether a tensor that is not in the manifest may be stored anyway.

    Raises:
        WeightTransferError: They disagree. The message names the file and up to eight tensors.
    """
    faults = []
    for name, meta in manifest.items():
        stored = index.tensors.get(name)
        if stored is None:
            faults.append(f"{name} is missing" + _hint_for_missing(name))
        elif stored.shape != meta.shape:
            faults.append(
                f"{name} in {stored.file.name} has shape {stored.shape}, but config.json implies {meta.shape}"
            )
        elif stored.dtype not in TORCH_DTYPES:
            faults.append(
                f"{name} in {stored.file.name} is stored as {stored.dtype}, not one of "
                f"{', '.join(TORCH_DTYPES)}"
            )

    # A tensor that no parameter uses is a sign of another architecture.
    for name, stored in index.tensors.items():
        if name not in manifest and not is_ignored(name):
            faults.append(f"{name} in {stored.file.name} is not a tensor of this architecture")

    if faults:
        raise WeightTransferError(
            f"{index.folder}: {len(faults)} tensors do not match config.json: " + "; ".join(faults[:8])
        )


def _hint_for_missing(name: str) -> str:
    if name == LM_HEAD_TENSOR:
        return " (no output layer is stored: should tie_word_embeddings be true for this model?)"
    if name == VALUE_HEAD_TENSOR:
        return (
            " (a language model has no value head: it can initialize a critic, but not serve as a reward "
            "model)"
        )

    return ""


def is_harmless_extra(name: str, architecture: Architecture, head: Head) -> bool:
    """Return whether a tensor outside the manifest may be stored without being used.

    These are rotary tables (computed, not learned), the output layer of a tied model (see `check_tied_head`)
    or of a language model that a critic is made from, the bias of a value head (see `check_value_bias`),
    layers after the last one that predict further tokens, and what the family names.
    """
    layer = _LAYER_TENSOR.match(name)
    if layer is not None:
        after_last = int(layer[1]) - architecture.num_hidden_layers
        return 0 <= after_last < architecture.num_mtp_layers or name.endswith("rotary_emb.inv_freq")
    if name == LM_HEAD_TENSOR:
        return head == "value" or architecture.tie_word_embeddings
    if name == VALUE_BIAS_TENSOR:
        return head == "value"
    if name.startswith(FAMILIES[architecture.model_type].unused):
        return True
    return name.endswith("rotary_emb.inv_freq")


def check_tied_head(index: CheckpointIndex, architecture: Architecture) -> None:
    """Check that the output layer stored with a tied model equals the embedding.

    If they differ, config.json is wrong about tying. Two blocks of rows are in memory at a time.

    Raises:
        WeightTransferError: They differ; the message names the file.
    """
    head = index.tensors.get(LM_HEAD_TENSOR)
    embedding_name = embedding_tensor(architecture)
    embedding = index.tensors[embedding_name]
    if head is None:
        return
    equal = head.shape == embedding.shape and head.dtype == embedding.dtype

    # Compare blocks of rows, so that neither matrix has to fit in memory.
    if equal:
        with (
            safe_open(head.file, framework="pt") as head_file,
            safe_open(embedding.file, framework="pt") as embedding_file,
        ):
            head_rows = head_file.get_slice(LM_HEAD_TENSOR)
            embedding_rows = embedding_file.get_slice(embedding_name)
            equal = all(
                torch.equal(
                    head_rows[start : start + _COMPARED_ROWS], embedding_rows[start : start + _COMPARED_ROWS]
                )
                for start in range(0, head.shape[0], _COMPARED_ROWS)
            )

    if not equal:
        raise WeightTransferError(
            f"{head.file}: {LM_HEAD_TENSOR} differs from {embedding_name}, but config.json has "
            f"tie_word_embeddings=true; set it to false, or remove the tensor"
        )


def check_value_bias(index: CheckpointIndex) -> None:
    """Check that a stored value-head bias is zero, because value heads have no bias in megarl.

    Raises:
        WeightTransferError: The folder contains a nonzero bias.
    """
    stored = index.tensors.get(VALUE_BIAS_TENSOR)
    if stored is None:
        return

    with safe_open(stored.file, framework="pt") as file:
        if bool(file.get_tensor(VALUE_BIAS_TENSOR).any()):
            raise WeightTransferError(
                f"{stored.file}: {VALUE_BIAS_TENSOR} is not zero, and megarl's value heads have no bias; "
                f"train the head without one"
            )
