"""Pads a batch to a multiple of the number of parts, and removes the padding."""

from __future__ import annotations

import numpy as np

from megarl.batch.data_proto import DataProto


def pad_dataproto_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """Append copies of the first rows, repeatedly if necessary, until the length is a multiple of `divisor`.

    Copies of real rows, unlike zeros, keep every shape and mask valid for the models.

    Returns:
        The batch, and the number of appended rows.

    Raises:
        ValueError: The batch is empty.
    """
    if len(data) == 0:
        raise ValueError(f"an empty batch cannot be padded to a multiple of {divisor}")
    pad_size = -len(data) % divisor
    if pad_size == 0:
        return data, 0

    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Remove the last `pad_size` rows."""
    return data[: len(data) - pad_size] if pad_size else data
