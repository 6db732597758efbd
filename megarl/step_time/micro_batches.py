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
from megarl.models.architecture import Architecture
from megarl.step_time.lengths import Lengths
from megarl.step_time.packed_batch import PackedBatch, pack, rank_multiple

# Rows that are packed one by one; a replica with more of them is scaled up.
_MOST_PACKED = 512
# Rows that represent the lengths of a pass.
_SAMPLED = 16


class MicroBatches(NamedTuple):
    """The micro-batches of one replica in one pass.

    Attributes:
        count: Their number.
        typical: The mean micro-batch: times `count`, it has the tokens and the attention of the pass.
    """

    count: int
    typical: PackedBatch


def micro_batches_of(
    config: RunConfig, role: ModelRole, architecture: Architecture, lengths: Lengths, *, trains: bool
) -> MicroBatches:
    """Return the micro-batches of a mini-batch if the role trains, otherwise of a whole step.

    The time of a pass is linear in the tokens of its micro-batches and in their pairs of a query and a key,
    so the mean micro-batch gives the time of all of them.
    """
    num_rows = rows_of_replica(config, role, trains=trains)
    together = min(rows_of_prompt(config, role), num_rows)

    # Interleaved pipelines run whole rounds of micro-batches. Each one has a row, if need be a repeated one.
    multiple = role.parallel.micro_batch_multiple
    count = ceil(_num_filled(role, lengths, num_rows, together) / multiple) * multiple
    rows_of_each = max(1.0, num_rows / count)

    # Without packing, rows are padded to the longest one, so the number of sampled rows is a micro-batch's.
    if config.engine.packing:
        rows = sampled_rows(lengths, rows_of_each, together)
    else:
        rows = sampled_rows(lengths, 1.0, 1, round(rows_of_each))
    whole = pack(config, role, architecture, rows)
    return MicroBatches(count, whole.scaled(rows_of_each / len(rows), rank_multiple(role)))


def _num_filled(role: ModelRole, lengths: Lengths, num_rows: int, together: int) -> int:
    """Return the number of micro-batches that rows fill, `together` of which share a prompt."""
    room = micro_batch_room(role.micro_batch, role.parallel)
    if room is None:
        assert role.micro_batch.sequences is not None
        return ceil(num_rows / role.micro_batch.sequences)

    size = role.parallel.context_parallel_size
    prompt = padded_length(lengths.prompt, size)
    packed = min(num_rows, _MOST_PACKED)
    responses = [padded_length(response, size) for response in lengths.spread(packed)]

    # Rows of one prompt are next to each other and share its tokens.
    count = num_bins(tuple(round(response + prompt / together) for response in responses), room)
    # Micro-batches with fewer rows than a prompt has need its tokens each.
    if packed < count * together:
        count = num_bins(tuple(responses), room - prompt)
    return max(1, round(count * num_rows / packed))


def sampled_rows(
    lengths: Lengths, rows_of_each: float, together: int, least: int = _SAMPLED
) -> tuple[Row, ...]:
    """Return rows with the mean and the mean square of all responses, and with as many prompts per row.

    Args:
        rows_of_each: The mean number of rows of a micro-batch.
        together: The number of rows that share a prompt if they are in one micro-batch.
        least: The least number of rows.
    """
    # A micro-batch with fewer rows than a prompt has contains a single prompt.
    of_prompt = min(rows_of_each, together)
    fewest = ceil(least / of_prompt)
    num_prompts = min(
        range(fewest, 2 * fewest + 1),
        key=lambda count: abs(round(count * of_prompt) / (count * of_prompt) - 1),
    )
    num_rows = round(num_prompts * of_prompt)
    return tuple(
        Row(lengths.prompt, response, index * num_prompts // num_rows)
        for index, response in enumerate(lengths.sample(num_rows))
    )


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
