"""The tensors of a Hugging Face folder that are kept without being trained.

They belong to layers that predict further tokens (multi-token prediction, MTP), or to the vision tower of a
model whose images megarl does not read. Folders of a trained or converted model get a copy of those of the
original folder. What layers of MTP store of the model themselves,
such as the embedding and the output layer in DeepSeek-V3, is copied unchanged too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.models.architecture import Architecture
from megarl.models.families import FAMILIES
from megarl.models.fp8 import SCALE_SUFFIX, scale_name
from megarl.models.mapping import HF_LAYER
from megarl.models.tensor_table import Head
from megarl.weights.checkpoint_index import (
    SCALE_DTYPES,
    TORCH_DTYPES,
    Packing,
    TensorInFile,
    read_checkpoint_index,
)
from megarl.weights.manifest import format_fault, is_kept
from megarl.weights.safetensors_file import Elements, OpenFiles, SafetensorsFile
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError, contiguous_blocks

MTP_LAYERS = "the layers that predict further tokens"
_BLOCK_ELEMENTS = 2**22  # copied at a time


@dataclass(frozen=True, kw_only=True)
class KeptTensors:
    """The stored tensors. Their values are not loaded.

    Attributes:
        tensors: The tensors by name.
        dequantized: The dtype that tensors in block-scaled FP8 are converted to. None: they are copied with
            their scales.
        missing: Why the layers that `config.json` promises are not among the tensors, None if they are.
    """

    tensors: Mapping[str, TensorInFile]
    dequantized: torch.dtype | None
    missing: str | None = None

    @property
    def has_mtp(self) -> bool:
        """Whether all layers are there that predict further tokens."""
        return self.missing is None

    @property
    def manifests(self) -> list[Manifest]:
        """The tensors to write: each with its scales, if they are copied."""
        return [self._manifest(name, stored) for name, stored in self.tensors.items()]

    def _manifest(self, name: str, stored: TensorInFile) -> Manifest:
        if stored.scales is None:
            return {name: TensorMeta(stored.shape, TORCH_DTYPES[stored.dtype])}
        if self.dequantized is not None:
            return {name: TensorMeta(stored.shape, self.dequantized)}
        return {
            name: TensorMeta(stored.shape, torch.float8_e4m3fn),
            scale_name(name): TensorMeta(stored.scales.shape, SCALE_DTYPES[stored.scales.dtype]),
        }

    def write(self, path: Path, manifest: Manifest) -> None:
        """Write the tensors of `manifest` to a new safetensors file, a few million elements at a time.

        Raises:
            OSError: The disk is full.
        """
        output = SafetensorsFile(path, manifest)

        try:
            with OpenFiles() as files:
                for name, meta in manifest.items():
                    elements = self._open(files, name)
                    for offset, place in contiguous_blocks(meta.shape, _BLOCK_ELEMENTS):
                        # Only elements that were dequantized to float32 have another dtype.
                        output.write(name, offset, elements[place.index].to(meta.dtype).reshape(-1))
        # Close the file on interrupts too.
        except BaseException:
            output.abandon()
            raise
        output.close()

    def _open(self, files: OpenFiles, name: str) -> Elements:
        if self.dequantized is not None:
            return files.open(name, self.tensors[name])
        stored = self.tensors.get(name) or self.tensors[name.removesuffix(SCALE_SUFFIX)].scales
        assert stored is not None
        return files[stored.file].get_tensor(name)


def kept_parts(architecture: Architecture) -> str:
    """Return what a folder may have that is kept, as words: "the vision tower"."""
    named = list(FAMILIES[architecture.model_type].kept.values())
    if architecture.num_mtp_layers > 0:
        named.append(MTP_LAYERS)
    return " and ".join(named)


def read_kept_tensors(
    folder: Path, architecture: Architecture, head: Head, dtype: torch.dtype
) -> KeptTensors | None:
    """Find the tensors in the original folder of a model.

    Args:
        folder: The original folder.
        architecture: The model, as `config.json` of the folder describes it.
        head: The head of the model that is written. Critics and reward models keep nothing.
        dtype: The dtype of the folder that is written. float8_e4m3fn: block-scaled FP8.

    Returns:
        None if there are none.

    Raises:
        WeightTransferError: They cannot be copied: the folder no longer has its weights, is damaged, or has
            them in a format that does not fit into the folder that is written.
    """
    may_have = architecture.num_mtp_layers > 0 or FAMILIES[architecture.model_type].kept
    if head == "value" or not may_have:
        return None

    stored = read_checkpoint_index(folder)
    tensors = {name: tensor for name, tensor in stored.items() if is_kept(name, architecture)}
    missing = _missing_layers(folder, tensors, architecture)
    if not tensors:
        if missing is not None:
            raise WeightTransferError(missing)
        return None

    faults = [
        fault for name, tensor in tensors.items() if (fault := kept_format_fault(name, tensor)) is not None
    ]
    if faults:
        raise WeightTransferError(f"{folder}: " + "; ".join(faults[:8]))

    to_fp8 = dtype == torch.float8_e4m3fn
    if to_fp8 and all(tensor.scales is None for tensor in tensors.values()):
        raise WeightTransferError(
            f"{folder}: has them without block scales, and a folder in FP8 needs such scales; write it with "
            "--dtype bfloat16 to keep them"
        )
    return KeptTensors(tensors=tensors, dequantized=None if to_fp8 else dtype, missing=missing)


def _missing_layers(
    folder: Path, tensors: Mapping[str, TensorInFile], architecture: Architecture
) -> str | None:
    """Return which layer `config.json` promises that is not stored, None if there is none."""
    first = architecture.num_hidden_layers
    for layer in range(first, first + architecture.num_mtp_layers):
        if not any(name.startswith(HF_LAYER.format(layer=layer)) for name in tensors):
            return (
                f"{folder}: config.json has num_nextn_predict_layers={architecture.num_mtp_layers}, but "
                f"layer {layer} is not stored"
            )
    return None


def kept_format_fault(name: str, stored: TensorInFile) -> str | None:
    """Return what prevents a tensor of these layers from being read, None if it can be read."""
    if stored.packing is not None and stored.packing is not Packing.block_fp8:
        return f"{name} is stored in {stored.packing.value}, which cannot be copied"
    return format_fault(name, stored)
