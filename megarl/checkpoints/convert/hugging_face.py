"""Opens Hugging Face folders, adapters in PEFT's format, and models with merged adapters, as a `ModelSource`.

Safetensors are memory-mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.convert.source import (
    ModelSource,
    SourceTensor,
    StoredPiece,
    checked_tensors,
    refuse_nonfinite,
)
from megarl.checkpoints.convert.streaming import Progress, new_folder, no_progress
from megarl.machine.errors import CheckpointError, counted
from megarl.machine.files import read_json_object
from megarl.models.adapters import adapter_names
from megarl.models.architecture import Architecture
from megarl.models.families import REWARD_CLASS, read_architecture
from megarl.models.tensor_table import (
    VALUE_HEAD_TENSOR,
    Head,
    HFTensor,
    hf_tensors,
    stored_weights,
    weights_of,
)
from megarl.weights.checkpoint_index import (
    TORCH_DTYPES,
    CheckpointIndex,
    read_checkpoint_index,
    shapes_of,
)
from megarl.weights.hf_folder import CONFIG_FILE as CONFIG_OF_MODEL
from megarl.weights.kept_tensors import kept_format_fault
from megarl.weights.manifest import check_names, check_values, is_kept
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
from megarl.weights.safetensors_file import Elements, LazyTensor, OpenFiles
from megarl.weights.shard_layout import pieces as shard_pieces
from megarl.weights.shard_layout import whole_layout
from megarl.weights.shards import MergedAdapters
from megarl.weights.tensors import TensorSlice, WeightTransferError

HUGGING_FACE = "Hugging Face"  # the format, as `ModelSource.kind`


def open_hugging_face(folder: Path, trust_remote_code: bool = False) -> ModelSource:
    """Open a Hugging Face folder. One with `score.weight` is a critic or a reward model.

    Raises:
        ConfigError: The configuration is unusable.
        WeightTransferError: The tensors do not match it.
    """
    architecture = read_architecture(str(folder), trust_remote_code)
    index = read_checkpoint_index(folder)
    head: Head = "value" if VALUE_HEAD_TENSOR in index else "lm"
    check_names(folder, index, architecture, head)
    check_values(index, architecture, head)
    # Each header is read once, however many tensors its file has.
    files = OpenFiles()
    dtypes, pieces = _stored_pieces(index, architecture, head, files)

    num_files = len({file for stored in index.values() for file in stored.files})
    packings = {stored.packing for stored in index.values() if stored.packing is not None}
    return ModelSource(
        folder=folder,
        kind=HUGGING_FACE,
        layout=counted(num_files, "safetensors file") + "".join(f", in {each.value}" for each in packings),
        companions=folder,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, pieces),
        open_kept=partial(_kept_tensors, folder, index, architecture, files),
    )


def _kept_tensors(
    folder: Path, index: CheckpointIndex, architecture: Architecture, files: OpenFiles
) -> dict[str, SourceTensor]:
    tensors = {}
    for name, stored in index.items():
        if not is_kept(name, architecture):
            continue
        if (fault := kept_format_fault(name, stored)) is not None:
            raise WeightTransferError(f"{folder}: {fault}")
        hf = HFTensor(name, stored.shape, stored.shape)
        piece = (TensorSlice.whole(hf.view), partial(files.open, name, stored))
        tensors[name] = SourceTensor(hf=hf, dtype=TORCH_DTYPES[stored.dtype], pieces=(piece,))
    return tensors


def _stored_pieces(
    index: CheckpointIndex, architecture: Architecture, head: Head, files: OpenFiles
) -> tuple[dict[str, torch.dtype], dict[str, list[StoredPiece]]]:
    """Return the dtype and the pieces of each tensor, which the folder may store in other tensors."""
    dtypes: dict[str, torch.dtype] = {}
    pieces: dict[str, list[StoredPiece]] = {}
    layout = whole_layout(architecture)
    own_weights = weights_of(architecture, head)
    for own, read in zip(own_weights, stored_weights(architecture, head, shapes_of(index)), strict=True):
        if own.tensors == read.tensors:
            for hf in own.tensors:
                stored = index[hf.name]
                dtypes[hf.name] = TORCH_DTYPES[stored.dtype]
                opener = partial(files.open, hf.name, stored, hf.view)
                pieces[hf.name] = [(TensorSlice.whole(hf.view), opener)]
            continue

        # The same parameter consists of these tensors and of those: equal elements lie at the same place.
        for stored_piece, piece in product(shard_pieces(read, layout), shard_pieces(own, layout)):
            common = stored_piece.shard.intersect(piece.shard)
            if common is None:
                continue
            stored = index[stored_piece.hf_name]
            open_whole = partial(files.open, stored_piece.hf_name, stored, stored_piece.hf_view)
            dtypes[piece.hf_name] = TORCH_DTYPES[stored.dtype]
            for shard, source in stored_piece.matches(common):
                ((_, place),) = piece.matches(shard)
                opener = partial(_open_other, open_whole, stored_piece, source, shard.shape, piece, place)
                pieces.setdefault(piece.hf_name, []).append((place, opener))

    return dtypes, pieces


def _open_other(
    open_whole: Callable[[], Elements],
    stored_piece: Piece,
    source: TensorSlice,
    shape: tuple[int, ...],
    piece: Piece,
    place: TensorSlice,
) -> torch.Tensor:
    """Read elements, which are the slice `source` in the file and have `shape` in the parameter."""
    elements = open_whole()[source.index]
    if stored_piece.rearrangement is not None:
        elements = elements.permute(stored_piece.rearrangement.order).reshape(shape)
    return piece.in_hf_order(elements, place)


# ---- adapters


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
    return replace(merged_source(source, open_hugging_face(base)), folder=source.folder, step=source.step)


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
