"""The tensors of a Hugging Face folder, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.weights.receipt import WeightTransferError


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor (on the host, contiguous) of every tensor in the folder's safetensors files.

    Raises WeightTransferError where there is no such file, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightTransferError(f"{folder} holds no *.safetensors file to load weights from")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a file, not a mapping)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightTransferError(f"{path} is no whole safetensors file ({error}); write it again") from error
