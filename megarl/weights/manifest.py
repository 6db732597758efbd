"""Compare the tensors of an architecture with those stored in a folder, before loading."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open

from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.fp8 import BLOCK, scale_name, scale_shape
from megarl.models.mapping import layer_of
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
from megarl.weights.checkpoint_index import (
    FLOAT8,
    SCALE_DTYPES,
    TORCH_DTYPES,
    CheckpointIndex,
    Packing,
    TensorInFile,
    read_checkpoint_index,
    shapes_of,
)
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError

ValueHead = Literal["stored", "initial"]
# rows of each matrix in memory at a time, when a tied output layer is compared with the embedding
_COMPARED_ROWS = 4096


def manifest_of(architecture: Architecture, dtype: torch.dtype, head: Head = "lm") -> Manifest:
    """Return every Hugging Face tensor of the model once. A tied output layer is not included.

    Args:
        architecture: The model.
        dtype: The dtype of the model. Rows of the table may have another.
        head: The head of the model.

    Raises:
        ValueError: The model family has no tensor table.
    """
    return {
        tensor.name: TensorMeta(tensor.shape, dtype_of(weight, dtype))
        for weight in weights_of(architecture, head)
        if not weight.is_copy
        for tensor in weight.tensors
    }


def manifest_of_folder(folder: Path) -> Manifest:
    """Return the tensors that a folder stores. Raises the errors of `read_checkpoint_index`."""
    index = read_checkpoint_index(folder)
    return {name: TensorMeta(stored.shape, TORCH_DTYPES[stored.dtype]) for name, stored in index.items()}


def dtype_of(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model of dtype `dtype`."""
    return dtype if weight.dtype is None else getattr(torch, weight.dtype)


# ---- checks of a folder


def value_head_of(index: CheckpointIndex, head: Head, trains: bool) -> ValueHead:
    """Return whether the value head is read from the folder or starts at V = 0.

    The folder of a critic made from a language model has no head. A model that is not trained must have one,
    because it would remain zero.
    """
    return "initial" if head == "value" and trains and VALUE_HEAD_TENSOR not in index else "stored"


def check_headers(
    folder: str | Path, architecture: Architecture, head: Head, trains: bool
) -> CheckpointIndex:
    """Check what the headers of a folder's files reveal about its tensors. No values are read.

    Raises:
        WeightTransferError: The folder and the architecture disagree, or a file is damaged. The message names
            the file and the tensor.
    """
    index = read_checkpoint_index(folder)
    check_names(folder, index, architecture, head, value_head_of(index, head, trains))
    return index


def check_names(
    folder: str | Path,
    index: CheckpointIndex,
    architecture: Architecture,
    head: Head,
    value_head: ValueHead = "stored",
) -> None:
    """Compare the stored names, shapes and dtypes with those that the architecture implies.

    Args:
        value_head: See load_into_shards.

    Raises:
        WeightTransferError: They disagree. The message names the file and up to eight tensors.
    """
    # A folder may hold experts fused, unlike `manifest_of`. A new value head is not read from it.
    skipped = VALUE_HEAD_TENSOR if head == "value" and value_head == "initial" else None
    tensors = unique_tensors(stored_weights(architecture, head, shapes_of(index)))
    shapes = {tensor.name: tensor.shape for tensor in tensors if tensor.name != skipped}
    faults = []

    for name, shape in shapes.items():
        stored = index.get(name)
        if stored is None:
            faults.append(f"{name} is missing" + _hint_for_missing(name))
        elif stored.shape != shape:
            faults.append(
                f"{name} in {stored.file.name} has shape {stored.shape}, but config.json implies {shape}"
            )
        elif (fault := format_fault(name, stored)) is not None:
            faults.append(fault)

    # A tensor that no parameter uses is a sign of another architecture.
    for name, stored in index.items():
        if name not in shapes and name != skipped and not is_harmless_extra(name, architecture, head):
            faults.append(f"{name} in {stored.file.name} is not a tensor of this architecture")

    if faults:
        raise WeightTransferError(
            f"{folder}: config.json does not match {counted(len(faults), 'tensor')}: " + "; ".join(faults[:8])
        )


def check_values(
    index: CheckpointIndex, architecture: Architecture, head: Head, value_head: ValueHead = "stored"
) -> None:
    """Check the stored values that the model cannot represent. The arguments are those of `check_names`.

    Raises:
        WeightTransferError: The output layer of a tied model differs from the embedding, or the value head
            has a bias.
    """
    if head == "lm" and architecture.tie_word_embeddings:
        _check_tied_head(index, architecture)
    if head == "value" and value_head == "stored":
        _check_value_bias(index)


def _hint_for_missing(name: str) -> str:
    if name == LM_HEAD_TENSOR:
        return " (no output layer is stored: should tie_word_embeddings be true for this model?)"
    if name == VALUE_HEAD_TENSOR:
        return (
            " (a language model has no value head: it can initialize a critic, but not serve as a reward "
            "model)"
        )

    return ""


def format_fault(name: str, stored: TensorInFile) -> str | None:
    """Return what prevents a tensor from being read, None if it can be read."""
    where = f"{name} in {stored.file.name}"
    if stored.dtype == FLOAT8:
        return f"{where} is stored as {FLOAT8}, but {scale_name(name)}, the scales of its blocks, is missing"
    if stored.dtype not in TORCH_DTYPES:
        return f"{where} is stored as {stored.dtype}, not one of {', '.join(TORCH_DTYPES)}"

    scales = stored.scales
    if scales is None or stored.packing is not Packing.block_fp8:
        return None
    if len(stored.shape) != 2:
        return f"{where} is stored as {FLOAT8} with {len(stored.shape)} axes; only matrices are supported"
    if scales.shape != scale_shape(stored.shape):
        implied = f"blocks of {BLOCK} x {BLOCK} of shape {stored.shape} have {scale_shape(stored.shape)}"
        return f"{scale_name(name)} in {scales.file.name} has shape {scales.shape}, but {implied}"
    if scales.dtype not in SCALE_DTYPES:
        allowed = ", ".join(SCALE_DTYPES)
        return f"{scale_name(name)} in {scales.file.name} is stored as {scales.dtype}, not one of {allowed}"
    return None


def is_harmless_extra(name: str, architecture: Architecture, head: Head) -> bool:
    """Return whether a tensor outside the manifest may be stored without being used.

    These are rotary tables (computed, not learned), the output layer of a tied model (see `_check_tied_head`)
    or of a language model that a critic is made from, the bias of a value head (see `_check_value_bias`),
    and tensors that are kept.
    """
    if name == LM_HEAD_TENSOR:
        return head == "value" or architecture.tie_word_embeddings
    if name == VALUE_BIAS_TENSOR:
        return head == "value"
    return is_kept(name, architecture) or name.endswith("rotary_emb.inv_freq")


def is_kept(name: str, architecture: Architecture) -> bool:
    """Return whether megarl keeps a tensor of a folder without training it (see kept_tensors.py).

    These are layers after the last one, and what the family names.
    """
    layer = layer_of(name)
    if layer is not None and layer >= architecture.num_hidden_layers:
        return layer - architecture.num_hidden_layers < architecture.num_mtp_layers
    return FAMILIES[architecture.model_type].keeps(name)


def _check_tied_head(index: CheckpointIndex, architecture: Architecture) -> None:
    """Check that the output layer stored with a tied model equals the embedding.

    If they differ, config.json is wrong about tying. Two blocks of rows are in memory at a time.

    Raises:
        WeightTransferError: They differ; the message names the file.
    """
    head = index.get(LM_HEAD_TENSOR)
    embedding_name = embedding_tensor(architecture)
    embedding = index[embedding_name]
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


def _check_value_bias(index: CheckpointIndex) -> None:
    """Check that a stored value-head bias is zero, because value heads have no bias in megarl.

    Raises:
        WeightTransferError: The folder contains a nonzero bias.
    """
    stored = index.get(VALUE_BIAS_TENSOR)
    if stored is None:
        return

    with safe_open(stored.file, framework="pt") as file:
        if bool(file.get_tensor(VALUE_BIAS_TENSOR).any()):
            raise WeightTransferError(
                f"{stored.file}: {VALUE_BIAS_TENSOR} is not zero, and megarl's value heads have no bias; "
                f"train the head without one"
            )
