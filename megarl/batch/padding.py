"""Padding a batch to a multiple of the number of parts, and taking the padding off again."""

from __future__ import annotations

import numpy as np

from megarl.batch.data_proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Appends copies of the first rows (again from the start when there are too few) until `divisor` divides
    the length.

    Copies of real rows, not zeros: every shape and mask stays one that the models can take. Returns the batch
    and the number of rows appended. Raises ValueError for an empty batch.
    """
    if len(data) == 0:
        raise ValueError(f"an empty batch cannot be padded to a multiple of {divisor}")
    pad_size = -len(data) % divisor
    if pad_size == 0:
        return data, 0

    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Takes off the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data
