"""Helpers for rows and values of a batch.

They convert row indices, compare values of any type, and convert between tensors and numpy arrays without a
copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megarl.machine.errors import counted


def object_array(rows: np.ndarray | Sequence[Any]) -> np.ndarray:
    """Return an object array (B,) with one element per row.

    An array with more dimensions is split into sub-arrays.
    """
    if isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1:
        return rows.copy()
    array = np.empty(len(rows), dtype=object)

    # Assign one by one, because numpy would turn rows that are lists into a second dimension.
    for index, row in enumerate(rows):
        array[index] = row
    return array


def row_index(index: Sequence[Any] | np.ndarray | torch.Tensor, num_rows: int) -> np.ndarray:
    """Convert row numbers or a bool mask to row numbers in [0, num_rows), int64.

    Negative numbers count from the end.

    Raises:
        ValueError: The index has more than one dimension or another type, a row does not exist, or the mask
            has another length.
    """
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise ValueError(f"rows are selected by a one-dimensional index, not one of shape {array.shape}")

    if array.dtype == bool:
        if len(array) != num_rows:
            raise ValueError(f"a mask of {len(array)} values cannot select from {counted(num_rows, 'row')}")
        return np.flatnonzero(array)

    # An empty list becomes a float array, so the dtype of an empty index is ignored.
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"rows are selected by integers or bools, not by {array.dtype}")
    array = array.astype(np.int64)
    # Check before negative numbers are wrapped, because one below the range would become a valid number.
    outside = array[(array < -num_rows) | (array >= num_rows)]
    if len(outside):
        raise ValueError(f"row {outside[0]} does not exist in a batch of {counted(num_rows, 'row')}")

    return np.where(array < 0, array + num_rows, array)


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal in container type, shape, dtype and value; NaN equals NaN."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return _same_tensors(left, right)

    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not (isinstance(left, np.ndarray) and isinstance(right, np.ndarray)) or left.shape != right.shape:
            return False
        # Arrays may contain objects, such as dicts or other arrays.
        return all(same(a, b) for a, b in zip(left.ravel().tolist(), right.ravel().tolist(), strict=True))

    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    # NaN is the only value that differs from itself.
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
    """Return the union of the mappings.

    Raises:
        ValueError: A key has two different values; the message names it.
    """
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


# numpy has no type for these dtypes, so an integer of the same width carries the bits.
_CARRIER = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


# The bits of a tensor as an array, which shares memory with the tensor if that is contiguous and on the host,
# and the tensor's dtype.
type TensorArray = tuple[np.ndarray, torch.dtype]


def tensor_to_array(tensor: torch.Tensor) -> TensorArray:
    """Convert a tensor without its gradient.

    The data is copied only if the tensor is not contiguous or not on the host.
    """
    tensor = tensor.detach().cpu().contiguous()
    carrier = _CARRIER.get(tensor.dtype)
    return (tensor if carrier is None else tensor.view(carrier)).numpy(), tensor.dtype


def array_to_tensor(packed: TensorArray) -> torch.Tensor:
    """Return a tensor that shares memory with the array.

    PyTorch cannot mark a tensor read-only, so the caller must ensure that a read-only array is not written
    through the tensor.
    """
    array, dtype = packed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype in _CARRIER else tensor


def array_to_private_tensor(packed: TensorArray) -> torch.Tensor:
    """Return a tensor over the array, copying it first if it is read-only.

    Ray gives all processes of a node the same memory as read-only arrays. A tensor over such an array can be
    written without an error, so an in-place operation of one rank would change the batch of the others.
    """
    array, dtype = packed
    return array_to_tensor(packed if array.flags.writeable else (array.copy(), dtype))
