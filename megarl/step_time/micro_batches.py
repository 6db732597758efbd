"""The typical micro-batch of a pass, and the number of micro-batches that packing yields. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megarl.config.batch_arithmetic import (
    Row,
    micro_batch_room,
    padded_length,
    rows_of_prompt,
    rows_of_replica,
)
from megarl.config.roles import ModelRole
from megarl.config.schema import RunConfig
from megarl.step_time.lengths import Lengths

# Rows that are packed one by one; a replica with more of them is scaled up.
_MOST_PACKED = 512


class MicroBatches(NamedTuple):
    """The micro-batches of one replica in one pass.

    Attributes:
        count: Their number.
        rows: The rows of a typical one.
    """

    count: int
    rows: tuple[Row, ...]


def micro_batches_of(config: RunConfig, role: ModelRole, lengths: Lengths, *, trains: bool) -> MicroBatches:
    """Return the micro-batches of a mini-batch if the role trains, otherwise of a whole step."""
    num_rows = rows_of_replica(config, role, trains=trains)
    together = min(rows_of_prompt(config, role), num_rows)
    size = role.parallel.context_parallel_size
    room = micro_batch_room(role.micro_batch, role.parallel)

    if room is None:
        assert role.micro_batch.sequences is not None
        count = ceil(num_rows / role.micro_batch.sequences)
    else:
        # Rows of one prompt are next to each other and share its tokens.
        of_prompt = padded_length(lengths.prompt, size) / together
        packed = min(num_rows, _MOST_PACKED)
        sizes = tuple(round(padded_length(response, size) + of_prompt) for response in lengths.spread(packed))
        count = max(1, round(num_bins(sizes, room) * num_rows / packed))

    # Interleaved pipelines run whole rounds of micro-batches.
    multiple = role.parallel.micro_batch_multiple
    in_each = max(1, round(num_rows / count))
    rows = tuple(
        Row(lengths.prompt, response, index // together)
        for index, response in enumerate(lengths.spread(in_each))
    )
    return MicroBatches(ceil(count / multiple) * multiple, rows)


@lru_cache(maxsize=1024)
def num_bins(sizes: tuple[int, ...], room: int) -> int:
    """Return the number of bins that best-fit decreasing packing fills. A larger item has its own bin."""
    left: list[int] = []  # room of open bins, ascending
    count = 0
    for size in sorted(sizes, reverse=True):
        place = bisect_left(left, size)
        if place < len(left):
            insort(left, left.pop(place) - size)
        else:
            count += 1
            if size < room:
                insort(left, room - size)
    return count
