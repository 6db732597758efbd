"""What a model's tensors are, by its architecture, and what a folder has stored: compared before anything is
loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megarl.machine.files import read_json_object
from megarl.models.architecture import Architecture
from megarl.models.tensor_table import (
    EMBEDDING_TENSOR,
    LM_HEAD_TENSOR,
    VALUE_BIAS_TENSOR,
    VALUE_HEAD_TENSOR,
    Head,
    weights_of,
)
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
_COMPARED_ROWS = 4096  # of the two matrices that a tied model may have stored, held in memory at a time

_FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
TORCH_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FusedSlice(NamedTuple):
    """shape: of the tensor `name` of the file. start: (expert, row)."""

    name: str
    shape: tuple[int, int, int]
    start: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TensorInFile:
    """A tensor in a safetensors file, not loaded. `dtype` is the format's own name, such as BF16.

    fused: where one tensor of the file holds those of all experts of a layer, which one, and the index in it
    at which this one begins.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    fused: FusedSlice | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    folder: Path
    tensors: dict[str, TensorInFile]


def manifest_of(architecture: Architecture, dtype: torch.dtype, head: Head = "lm") -> Manifest:
    """Every Hugging Face tensor of the model once: a tied output layer is not one of them.

    Raises ValueError for a family without a table.
    """
    weights = weights_of(architecture, head)
    return {
        tensor.name: TensorMeta(tensor.shape, dtype)
        for weight in weights
        if not weight.is_copy
        for tensor in weight.tensors
    }


def read_checkpoint_index(folder: str | Path) -> CheckpointIndex:
    """Reads the headers of `model.safetensors`, or of the files that `model.safetensors.index.json` names.
    Experts that lie fused in them are there each by itself.

    Raises WeightTransferError that names the file (and tensor) for: no weights, a file that is missing,
    truncated or corrupt, an index that disagrees with its files.
    """
    folder = Path(folder)
    index_path = folder / INDEX_FILE

    if index_path.is_file():
        return CheckpointIndex(
            folder=folder, tensors=_with_separate_experts(_read_sharded(folder, index_path))
        )

    if (folder / SINGLE_FILE).is_file():
        return CheckpointIndex(
            folder=folder, tensors=_with_separate_experts(_read_header(folder / SINGLE_FILE))
        )

    raise WeightTransferError(
        f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}; weights in another format must first be saved as "
        f"safetensors "
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
            f"{index_path}: not a safetensors index with a weight_map: that is {file_of!r}"
        )

    tensors: dict[str, TensorInFile] = {}

    # Refuse paths that lead out of the folder before any file is opened.
    for name, file in file_of.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise WeightTransferError(
                f"{index_path}: places {name} in {file!r}, but only a file of this folder can be named"
            )

    for name, file in file_of.items():
        if not (folder / file).is_file():
            raise WeightTransferError(f"{folder / file}: file is missing; it holds {name}")

    # Headers and index must agree: neither may have a tensor that the other lacks.
    for file in sorted(set(file_of.values())):
        for name, stored in _read_header(folder / file).items():
            if file_of.get(name) != file:
                raise WeightTransferError(
                    f"{folder / file}: holds {name!r}, which {INDEX_FILE} places in {file_of.get(name)!r}"
                )
            tensors[name] = stored

    for name, file in file_of.items():
        if name not in tensors:
            raise WeightTransferError(f"{folder / file}: lacks {name!r}, which {INDEX_FILE} places there")

    return tensors


def _with_separate_experts(tensors: dict[str, TensorInFile]) -> dict[str, TensorInFile]:
    """transformers v5 has a layer's experts in two tensors in memory, `gate_up_proj` (E, 2M, H) and
    `down_proj` (E, H, M); what writes its memory as it is leaves them so."""
    separate: dict[str, TensorInFile] = {}
    for name, stored in tensors.items():
        prefix, found, what = name.rpartition(".mlp.experts.")
        parts = _FUSED_EXPERTS.get(what, ())
        if not found or not parts or len(stored.shape) != 3 or stored.shape[1] % len(parts):
            separate[name] = stored
            continue
        # Each expert gets an entry of its own, as if the file held it by itself.
        num_experts, rows, columns = stored.shape
        each = rows // len(parts)
        for expert in range(num_experts):
            for number, part in enumerate(parts):
                fused = FusedSlice(name, (num_experts, rows, columns), (expert, number * each))
                own = TensorInFile(file=stored.file, shape=(each, columns), dtype=stored.dtype, fused=fused)
                separate[f"{prefix}{found}{expert}.{part}.weight"] = own

    return separate


def _read_header(path: Path) -> dict[str, TensorInFile]:
    try:
        # what the library says of a file that it may not read does not name the reason
        with path.open("rb") as opened:
            if opened.read(len(_LFS)) == _LFS:
                raise WeightTransferError(
                    f"{path}: is a pointer of Git LFS and not the weights; run `git lfs pull`"
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
    """Of a file that ends too early: the first tensor that is not whole, in words."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        encoded = file.read(min(length, path.stat().st_size))

    try:
        # Byte ranges in the header count from its end, and eight bytes before it give its length.
        ends = {
            name: 8 + length + entry["data_offsets"][1]
            for name, entry in json.loads(encoded).items()
            if name != "__metadata__"
        }
        lost = [name for name, end in ends.items() if end > path.stat().st_size]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # the header itself is damaged
        return ""

    first = min(lost, key=lambda name: ends[name], default=None)
    return "" if first is None else f"; {first} is not all there ({len(lost)} of {len(ends)} tensors are not)"


def check_index(index: CheckpointIndex, manifest: Manifest, is_ignored: Callable[[str], bool]) -> None:
    """Compares names, shapes and the kind of number; `is_ignored(name)` lists the extras that may lie there
    unused.

    Raises WeightTransferError that names the file and every tensor at fault (up to eight).
    """
    faults = []
    for name, meta in manifest.items():
        stored = index.tensors.get(name)
        if stored is None:
            faults.append(f"{name} is missing" + _hint_for_missing(name))
        elif stored.shape != meta.shape:
            faults.append(
                f"{name} in {stored.file.name} has shape {stored.shape}, config.json makes it {meta.shape}"
            )
        elif stored.dtype not in TORCH_DTYPES:
            faults.append(
                f"{name} in {stored.file.name} is stored as {stored.dtype}, not one of "
                f"{', '.join(TORCH_DTYPES)}"
            )

    # A tensor that no parameter takes is a sign of another architecture.
    for name, stored in index.tensors.items():
        if name not in manifest and not is_ignored(name):
            faults.append(f"{name} in {stored.file.name} is not a tensor of this architecture")

    if faults:
        raise WeightTransferError(
            f"{index.folder}: {len(faults)} tensors do not fit config.json: " + "; ".join(faults[:8])
        )


def _hint_for_missing(name: str) -> str:
    if name == LM_HEAD_TENSOR:
        return " (stored without an output layer: is tie_word_embeddings true for this model?)"
    if name == VALUE_HEAD_TENSOR:
        return (
            " (a language model has no value head: it can start a critic, but does not score as a reward "
            "model)"
        )

    return ""


def is_harmless_extra(name: str, architecture: Architecture, head: Head) -> bool:
    """Extras that real folders hold: rotary tables (computed, not learnt), and the output layer of a tied
    model (compared by `check_tied_head`) or of a language model of which a critic is made, a value head's
    bias (`check_value_bias`)."""
    if name == LM_HEAD_TENSOR:
        return head == "value" or architecture.tie_word_embeddings
    if name == VALUE_BIAS_TENSOR:
        return head == "value"
    return name.endswith("rotary_emb.inv_freq")


def check_tied_head(index: CheckpointIndex) -> None:
    """For a tied model: a stored output layer must equal the embedding, else the config is wrong about tying.

    Raises WeightTransferError that names the files. Holds two blocks of rows in memory.
    """
    head = index.tensors.get(LM_HEAD_TENSOR)
    embedding = index.tensors[EMBEDDING_TENSOR]
    if head is None:
        return
    equal = head.shape == embedding.shape and head.dtype == embedding.dtype

    # Compare blocks of rows, so that neither matrix has to be in memory as a whole.
    if equal:
        with (
            safe_open(head.file, framework="pt") as head_file,
            safe_open(embedding.file, framework="pt") as embedding_file,
        ):
            head_rows = head_file.get_slice(LM_HEAD_TENSOR)
            embedding_rows = embedding_file.get_slice(EMBEDDING_TENSOR)
            equal = all(
                torch.equal(
                    head_rows[start : start + _COMPARED_ROWS], embedding_rows[start : start + _COMPARED_ROWS]
                )
                for start in range(0, head.shape[0], _COMPARED_ROWS)
            )

    if not equal:
        raise WeightTransferError(
            f"{head.file}: {LM_HEAD_TENSOR} differs from {EMBEDDING_TENSOR}, but config.json has "
            f"tie_word_embeddings=true; "
            "set it to false, or remove the tensor"
        )


def check_value_bias(index: CheckpointIndex) -> None:
    """A value head here has no bias. Raises WeightTransferError where the folder has one that is not zero."""
    stored = index.tensors.get(VALUE_BIAS_TENSOR)
    if stored is None:
        return

    with safe_open(stored.file, framework="pt") as file:
        if bool(file.get_tensor(VALUE_BIAS_TENSOR).any()):
            raise WeightTransferError(
                f"{stored.file}: {VALUE_BIAS_TENSOR} is not zero, and megarl's value heads have no bias; "
                f"train the head without one"
            )
