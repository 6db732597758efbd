"""Rows and values of a batch: numbering rows, comparing values of any kind, merging what must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def object_array(rows: np.ndarray | Sequence[Any]) -> np.ndarray:
    """(B,) object array with one element per row; an array of more dimensions gives one sub-array per row."""
    array = np.empty(len(rows), dtype=object)
    for index, row in enumerate(rows):  # one by one: numpy would read rows that are lists as a second dimension
        array[index] = row
    return array


def row_index(index: Sequence[Any] | np.ndarray | torch.Tensor, num_rows: int) -> np.ndarray:
    """Row numbers in [0, num_rows), int64, from row numbers or a mask. Raises ValueError for others or a mask of another length."""
    array = index.cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise ValueError(f"rows are picked by a one-dimensional index, not one of shape {array.shape}")
    if array.dtype == bool:
        if len(array) != num_rows:
            raise ValueError(f"a mask of {len(array)} values cannot pick from {num_rows} rows")
        return np.flatnonzero(array)
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"rows are picked by integers or bools, not by {array.dtype}")
    array = array.astype(np.int64)
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
                raise ValueError(f"{what} {key!r} has two different values: {_brief(merged[key])} and {_brief(value)}")
            merged.setdefault(key, value)
    return merged


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
