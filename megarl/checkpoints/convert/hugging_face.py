"""Reads a Hugging Face folder as a `ModelSource`: safetensors, mapped where they lie."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, StoredPiece, checked_tensors
from megarl.checkpoints.torch_file import mapped
from megarl.config.architecture import read_architecture
from megarl.weights.boxes import Rectangle
from megarl.weights.manifest import (
    check_index,
    check_tied_head,
    check_value_bias,
    is_harmless_extra,
    manifest_of,
    read_checkpoint_index,
)
from megarl.weights.name_mapping import VALUE_HEAD_TENSOR, Head, weights_of

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def open_hugging_face(folder: Path, trust_remote_code: bool = False) -> ModelSource:
    """A folder with `score.weight` is a critic or a reward model. Raises ConfigError, WeightTransferError."""
    architecture = read_architecture(str(folder), trust_remote_code)
    index = read_checkpoint_index(folder)
    head: Head = "value" if VALUE_HEAD_TENSOR in index.tensors else "lm"
    check_index(index, manifest_of(architecture, torch.float32, head), lambda name: is_harmless_extra(name, architecture, head))
    if head == "lm" and architecture.tie_word_embeddings:
        check_tied_head(index)
    if head == "value":
        check_value_bias(index)
    starts = {file: _data_starts(file) for file in {stored.file for stored in index.tensors.values()}}
    pieces: dict[str, list[StoredPiece]] = {}
    dtypes = {}
    for weight in weights_of(architecture, head):
        for hf in weight.tensors:
            stored = index.tensors[hf.name]
            dtypes[hf.name] = _DTYPES[stored.dtype]
            opened = partial(mapped, stored.file, starts[stored.file][hf.name], hf.view, dtypes[hf.name])
            pieces[hf.name] = [StoredPiece(place=Rectangle.whole(hf.view), open=opened)]
    return ModelSource(
        folder=folder,
        kind="Hugging Face",
        layout=f"{len(starts)} safetensors files",
        companions=folder,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, pieces),
    )


def _data_starts(file: Path) -> dict[str, int]:
    """Where each tensor lies in a file whose header safetensors has checked."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
