"""Adapters in conversions: a checkpoint of adapters, a PEFT folder, and a base model with adapters merged."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.convert.hugging_face import open_hugging_face
from megarl.checkpoints.convert.source import ModelSource, SourceTensor, refuse_nonfinite
from megarl.checkpoints.convert.streaming import Progress, new_folder, no_progress
from megarl.machine.errors import CheckpointError
from megarl.machine.files import read_json_object
from megarl.machine.wording import counted
from megarl.models.adapters import adapter_names
from megarl.models.architecture import Architecture
from megarl.models.families import REWARD_CLASS, read_architecture
from megarl.models.tensor_table import VALUE_HEAD_TENSOR, Head, hf_tensors
from megarl.weights.hf_folder import CONFIG_FILE as CONFIG_OF_MODEL
from megarl.weights.packed_tensors import LazyTensor
from megarl.weights.peft_folder import (
    CONFIG_FILE,
    SEQUENCE_TASK,
    WEIGHTS_FILE,
    adapter_tensors,
    has_adapter,
    read_adapter,
    read_lora,
    write_adapter,
)
from megarl.weights.piece import Piece
from megarl.weights.shards import MergedAdapters
from megarl.weights.tensors import TensorSlice, WeightTransferError


def with_stored_adapters(architecture: Architecture, companions: Path) -> Architecture:
    """Return the architecture with the adapters that the folder of config.json describes, if it does.

    Raises:
        CheckpointError: The description is damaged.
    """
    if not has_adapter(companions):
        return architecture
    try:
        return replace(architecture, lora=read_lora(companions))
    except WeightTransferError as error:
        raise CheckpointError(str(error)) from error


def open_adapter_folder(folder: Path, base: Path, trust_remote_code: bool = False) -> ModelSource:
    """Open an adapter in PEFT's format.

    Args:
        base: The Hugging Face folder of its base model. Its weights are not read.
        trust_remote_code: Accept a base with its own model code.

    Raises:
        CheckpointError: The folder is damaged, or belongs to another model.
    """
    try:
        architecture = replace(read_architecture(str(base), trust_remote_code), lora=read_lora(folder))
        stored = read_adapter(folder)
    except WeightTransferError as error:
        raise CheckpointError(str(error)) from error

    head: Head = "value" if VALUE_HEAD_TENSOR in stored else "lm"
    shapes = adapter_tensors(architecture, head)
    found = {name: tuple(value.shape) for name, value in stored.items()}
    if found != shapes:
        wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: is not an adapter of {base}: it differs in "
            f"{counted(len(wrong), 'tensor')}, such as {wrong[0]}"
        )

    return ModelSource(
        folder=folder,
        kind="PEFT adapter",
        layout="one file",
        companions=base,
        architecture=architecture,
        head=head,
        tensors={
            hf.name: SourceTensor(
                hf=hf,
                dtype=stored[hf.name].dtype,
                pieces=((TensorSlice.whole(hf.view), partial(stored.__getitem__, hf.name)),),
            )
            for hf in hf_tensors(architecture, head)
            if hf.name in stored
        },
    )


def whole_tensors(source: ModelSource, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter, with the modules that it saves."""
    tensors = {}
    for name, tensor in source.tensors.items():
        place = TensorSlice.whole(tensor.hf.view)
        tensors[name] = tensor.block(place, dtype or tensor.dtype).reshape(tensor.hf.shape)
        refuse_nonfinite(tensors[name], name)
    return tensors


def write_peft(
    source: ModelSource, folder: Path, dtype: torch.dtype | None = None, progress: Progress = no_progress
) -> tuple[int, int]:
    """Write an adapter in PEFT's format.

    Args:
        folder: Must not exist or be empty.
        dtype: None: the dtype of the source.
        progress: Is told the written bytes.

    Returns:
        The number of weight files, and their bytes.

    Raises:
        CheckpointError: The source is damaged or the disk cannot store the result. No files remain.
    """
    tensors = whole_tensors(source, dtype)
    nbytes = sum(value.nbytes for value in tensors.values())
    with new_folder(folder, nbytes) as unfinished:
        fields = _adapter_fields(source)
        base = str(fields.get("base_model_name_or_path") or source.companions)  # PEFT may write null
        value_class = REWARD_CLASS if fields.get("task_type") == SEQUENCE_TASK else None
        write_adapter(unfinished, tensors, source.architecture, base, source.head, value_class)
    progress(nbytes, nbytes)
    return 1, nbytes


def _adapter_fields(source: ModelSource) -> dict[str, Any]:
    """Return the adapter's configuration; empty if there is none."""
    for folder in (source.companions, source.folder):
        if has_adapter(folder):
            return read_json_object(folder / CONFIG_FILE)
    return {}


def _merged(tensor: SourceTensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> LazyTensor:
    """Return a tensor of the base model with an adapter added to the slices that are read."""
    name = tensor.hf.name
    view = tensor.hf.view
    module = name.removesuffix(".weight").rpartition(".")[2]
    whole = TensorSlice.whole(view)
    piece = Piece(name, view, whole, view, whole, is_source=True)
    adapters = MergedAdapters({f"x.lora.{module}.a": a, f"x.lora.{module}.b": b}, scale)

    def read(place: TensorSlice) -> torch.Tensor:
        base = torch.empty(place.shape, dtype=tensor.dtype)
        tensor.fill(base, place)
        return adapters.apply("x.weight", piece, place.index, base)

    return LazyTensor(read, view, view)


def merged_source(adapter: ModelSource, base: ModelSource) -> ModelSource:
    """Return the base model with an adapter merged, in the base model's dtype.

    Raises:
        CheckpointError: The two do not belong together.
    """
    if base.architecture != adapter.architecture.base:
        raise CheckpointError(f"{adapter.folder}: is not an adapter of {base.folder}, which is another model")

    assert adapter.architecture.lora is not None
    matrices = whole_tensors(adapter)
    scale = adapter.architecture.lora.scale
    tensors: dict[str, SourceTensor] = {}

    for name, tensor in base.tensors.items():
        a, b = adapter_names(name)
        if a in matrices:
            merged = partial(_merged, tensor, matrices[a], matrices[b], scale)
            tensors[name] = replace(tensor, pieces=((TensorSlice.whole(tensor.hf.view), merged),))
        elif name in adapter.tensors:
            # A module that trained in full replaces the base model's, in the dtype of the latter.
            tensors[name] = replace(adapter.tensors[name], dtype=tensor.dtype)
        else:
            tensors[name] = tensor

    # The head of a critic is trained, and replaces that of a language model.
    if adapter.head == "value":
        tensors = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
        tensors[VALUE_HEAD_TENSOR] = adapter.tensors[VALUE_HEAD_TENSOR]
    return replace(base, tensors=tensors, head=adapter.head, kind=f"{base.kind} with a merged adapter")


def with_merged_adapter(source: ModelSource) -> ModelSource:
    """Return a model that can compute: a checkpoint of adapters is merged into its base model.

    Raises:
        CheckpointError: The base model is not on this machine, or has changed.
    """
    if source.architecture.lora is None:
        return source

    base = _base_model(source.folder, _adapter_fields(source))
    merged = merged_source(source, open_hugging_face(base))
    return replace(merged, folder=source.folder, step=source.step)


def base_of_adapter(folder: Path) -> Path | None:
    """Return the base model that an adapter in PEFT's format names; None for another folder.

    Raises:
        CheckpointError: The base model is not on this machine.
    """
    if not has_adapter(folder) or (folder / CONFIG_OF_MODEL).is_file():
        return None
    return _base_model(folder, read_json_object(folder / CONFIG_FILE))


def _base_model(folder: Path, fields: dict[str, Any]) -> Path:
    name = fields.get("base_model_name_or_path")
    if not isinstance(name, str) or not (Path(name) / CONFIG_OF_MODEL).is_file():
        raise CheckpointError(
            f"{folder}: has adapters only, and their base model {name!r} is not on this machine; run "
            f"`megarl convert {folder} MERGED_DIR --base HF_DIR`, and give MERGED_DIR"
        )
    return Path(name)
