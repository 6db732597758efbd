"""Prepare the arguments of a call for sending them to ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from megarl.batch.data_proto import DataProto
from megarl.controller.dispatch import Arguments

_SMALL = (type(None), bool, int, float, str)


def uids_of(arguments: Arguments) -> np.ndarray | None:
    """Return the uids (B,) of the first batch among a call's arguments that has them."""
    batches = (value for value in arguments.values if isinstance(value, DataProto))
    return next((batch.non_tensor_batch["uid"] for batch in batches if "uid" in batch.non_tensor_batch), None)


def share(parts: Sequence[Arguments], part_of_rank: Sequence[int], *, stores_all: bool) -> list[Arguments]:
    """Put values that several ranks receive into the object store once, and replace them by references.

    Args:
        parts: The arguments.
        part_of_rank: The part that each rank receives.
        stores_all: Whether values that a single rank receives are put there too, so that no relay loads them.
    """
    # Count by identity: the same object for several ranks is one value.
    readers = Counter(id(value) for part in part_of_rank for value in parts[part].values)
    stored: dict[int, Any] = {}

    def sent(value: Any) -> Any:
        # Small values, and values that only one rank reads, are sent within the call.
        is_sent = readers[id(value)] == 1 and not stores_all
        if isinstance(value, _SMALL) or is_sent:
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return [
        Arguments(
            tuple(map(sent, part.positional)), {name: sent(value) for name, value in part.named.items()}
        )
        for part in parts
    ]
