"""Tensors as numpy arrays and back, without a copy: numpy is what Ray keeps in shared memory."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import torch

# numpy has no type for these; an integer of the same width carries the bits.
_CARRIER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


class TensorArray(NamedTuple):
    """`array` holds the bits of a tensor of `dtype`; it shares memory with a contiguous tensor on the host."""

    array: np.ndarray
    dtype: torch.dtype


def tensor_to_array(tensor: torch.Tensor) -> TensorArray:
    """Copies only what is not contiguous or not on the host. Gradients stay behind."""
    tensor = tensor.detach().cpu().contiguous()
    carrier = _CARRIER.get(tensor.dtype)
    return TensorArray((tensor if carrier is None else tensor.view(carrier)).numpy(), tensor.dtype)


def array_to_tensor(packed: TensorArray) -> torch.Tensor:
    """Shares memory with the array. PyTorch cannot mark a tensor read-only: whoever passes a read-only array vouches that nobody writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(packed.array)
    return tensor.view(packed.dtype) if packed.dtype in _CARRIER else tensor


def array_to_private_tensor(packed: TensorArray) -> torch.Tensor:
    """Copies a read-only array. Ray hands every process of a node the same memory as read-only arrays, and a tensor
    over it can be written without an error: one rank's in-place operation would change the batch of the others."""
    if packed.array.flags.writeable:
        return array_to_tensor(packed)
    return array_to_tensor(TensorArray(packed.array.copy(), packed.dtype))
