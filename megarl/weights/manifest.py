"""Compare the tensors of an architecture with those stored in a folder, before loading."""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash
from safetensors import safe_open

from megarl.machine.wording import counted
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
)
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError

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
    weights = weights_of(architecture, head)
    return {
        tensor.name: TensorMeta(tensor.shape, dtype_of(weight, dtype))
        for weight in weights
        if not weight.is_copy
        for tensor in weight.tensors
    }


def manifest_name(manifest: Manifest) -> str:
    """Return a name of the manifest, which another one with the same tensors has too, in any process."""
    lines = (f"{name} {tuple(meta.shape)} {meta.dtype}" for name, meta in sorted(manifest.items()))
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def stored_manifest(index: CheckpointIndex, architecture: Architecture, head: Head) -> Manifest:
    """Return the tensors that a folder must have, which may hold experts fused, unlike `manifest_of`."""
    weights = stored_weights(architecture, head, index.shapes)
    return {tensor.name: TensorMeta(tensor.shape, torch.float32) for tensor in unique_tensors(weights)}


def dtype_of(weight: Weight, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model of dtype `dtype`."""
    return dtype if weight.dtype is None else getattr(torch, weight.dtype)


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
        elif (fault := format_fault(name, stored)) is not None:
            faults.append(fault)

    # A tensor that no parameter uses is a sign of another architecture.
    for name, stored in index.tensors.items():
        if name not in manifest and not is_ignored(name):
            faults.append(f"{name} in {stored.file.name} is not a tensor of this architecture")

    if faults:
        raise WeightTransferError(
            f"{index.folder}: config.json does not match {counted(len(faults), 'tensor')}: "
            + "; ".join(faults[:8])
        )


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
