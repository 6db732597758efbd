"""Rows and values of a batch: numbering rows, comparing values of any kind, and tensors as numpy arrays,
without a copy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


def object_array(rows: np.ndarray | Sequence[Any]) -> np.ndarray:
    """(B,) object array with one element per row; an array of more dimensions gives one sub-array per row."""
    if isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1:
        return rows.copy()
    array = np.empty(len(rows), dtype=object)

    # one by one: numpy would read rows that are lists as a second dimension
    for index, row in enumerate(rows):
        array[index] = row
    return array


def row_index(index: Sequence[Any] | np.ndarray | torch.Tensor, num_rows: int) -> np.ndarray:
    """Row numbers in [0, num_rows), int64, from row numbers or a mask. Raises ValueError for others or a mask
    of another length."""
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise ValueError(f"rows are picked by a one-dimensional index, not one of shape {array.shape}")

    if array.dtype == bool:
        if len(array) != num_rows:
            raise ValueError(f"a mask of {len(array)} values cannot pick from {num_rows} rows")
        return np.flatnonzero(array)

    # An empty list becomes a float array, so its dtype says nothing.
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"rows are picked by integers or bools, not by {array.dtype}")
    array = array.astype(np.int64)
    # Check before negative numbers are wrapped: one below the range would stay negative and look valid.
    outside = array[(array < -num_rows) | (array >= num_rows)]
    if len(outside):
        raise ValueError(f"row {outside[0]} does not exist in a batch of {num_rows} rows")

    return np.where(array < 0, array + num_rows, array)


def same(left: Any, right: Any) -> bool:
    """Equal in type of container, shape, dtype and value; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _same_tensors(left, right)

    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)) or left.shape != right.shape:
            return False
        return all(same(a, b) for a, b in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True))

    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float) and isinstance(right, float) and left != left:
        return right != right

    return bool(left == right)


def _same_tensors(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    equal = left == right
    if left.dtype.is_floating_point:
        equal |= left.isnan() & right.isnan()

    return bool(equal.all())


def merge_equal(mappings: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """All keys of all mappings. Raises ValueError that names a key with two different values."""
    merged: dict[str, Any] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            if key in merged and not same(merged[key], value):
                raise ValueError(
                    f"{what} {key!r} has two different values: {_brief(merged[key])} and {_brief(value)}"
                )
            merged.setdefault(key, value)

    return merged


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# numpy has no type for these; an integer of the same width carries the bits.
_CARRIER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


class TensorArray(NamedTuple):
    """`array` holds the bits of a tensor of `dtype`; it shares memory with a contiguous tensor on the
    host."""

    array: np.ndarray
    dtype: torch.dtype


def tensor_to_array(tensor: torch.Tensor) -> TensorArray:
    """Copies only what is not contiguous or not on the host. Gradients stay behind."""
    tensor = tensor.detach().cpu().contiguous()
    carrier = _CARRIER.get(tensor.dtype)
    return TensorArray((tensor if carrier is None else tensor.view(carrier)).numpy(), tensor.dtype)


def array_to_tensor(packed: TensorArray) -> torch.Tensor:
    """Shares memory with the array. PyTorch cannot mark a tensor read-only: whoever passes a read-only array
    vouches that nobody writes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(packed.array)
    return tensor.view(packed.dtype) if packed.dtype in _CARRIER else tensor


def array_to_private_tensor(packed: TensorArray) -> torch.Tensor:
    """Copies a read-only array. Ray hands every process of a node the same memory as read-only arrays, and a
    tensor over it can be written without an error: one rank's in-place operation would change the batch of
    the others."""
    if packed.array.flags.writeable:
        return array_to_tensor(packed)
    return array_to_tensor(TensorArray(packed.array.copy(), packed.dtype))
