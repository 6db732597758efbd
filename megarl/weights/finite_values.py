"""Find NaN and infinity in weights when they are read."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.weights.tensors import WeightTransferError


def nonfinite_problem(values: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor, or a part of it, that has NaN or infinity; None if it has none."""
    # The sum is finite if all elements are, unless they are very large. It needs no memory.
    if not values.is_floating_point() or bool(values.sum(dtype=torch.float32).isfinite()):
        return None
    # torch has no isfinite for all 8-bit types.
    if bool((values.float() if values.dtype.itemsize == 1 else values).isfinite().all()):
        return None
    return "has elements that are NaN or infinite; use another copy of the folder, or an earlier checkpoint"


def check_finite(values: torch.Tensor, name: str, file: Path) -> None:
    """Refuse a tensor that was read from a file if it has NaN or infinity.

    Raises:
        WeightTransferError: It has. The message names the file and the tensor.
    """
    if (problem := nonfinite_problem(values)) is not None:
        raise WeightTransferError(f"{file}: {name} {problem}")
