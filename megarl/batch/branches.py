"""Episodes that consist of several rows.

An agent that rewrites its history, or has sub-agents, leaves several conversations: the branches of an
episode, each a row of the batch. Rows of an episode are consecutive, in the order of their last turns.
Merged, the responses of an episode are one row again: what was sampled in it, in order, so that scores,
advantages and group statistics count episodes and not rows.
"""

from __future__ import annotations

import numpy as np
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import RESPONSE_KEYS

# Array (B,): position of a row among the rows of its episode, from 0. A batch without it has one row each.
BRANCH = "branch"
# Array (B,): the kind of the failure of an episode, which then has one row without a loss, or None.
FAILURE = "failure"
# Column: for each token, the number of tokens with a loss in all rows of its episode.
EPISODE_TOKENS = "episode_tokens"
_MERGED = ("responses", *RESPONSE_KEYS)


def episode_numbers(batch: DataProto) -> np.ndarray:
    """Return the number of each row's episode, (B,), from 0."""
    if BRANCH not in batch.non_tensor_batch:
        return np.arange(len(batch))
    places = batch.non_tensor_batch[BRANCH].astype(np.int64)
    # In a batch of the last rows of episodes, a row would count as one of the episode before it.
    follows = places == np.append(-1, places[:-1]) + 1
    assert (follows | (places == 0)).all(), "rows of an episode are missing"
    return np.cumsum(places == 0) - 1


def rows_of_episodes(batch: DataProto) -> list[np.ndarray]:
    """Return the numbers of the rows of each episode."""
    return np.split(np.arange(len(batch)), np.flatnonzero(ends_episode(batch))[:-1] + 1)


def branch_column(batch: DataProto) -> list[str]:
    """Return the name of the array BRANCH, if the batch has it."""
    return [BRANCH] if BRANCH in batch.non_tensor_batch else []


def episode_tokens(batch: DataProto, mask: RaggedTensor) -> dict[str, RaggedTensor]:
    """Return the column EPISODE_TOKENS of the rows with this mask; none if each episode has one row."""
    numbers = episode_numbers(batch)
    if bool(ends_episode(batch).all()):
        return {}
    of_episodes = np.bincount(numbers, [int(row.sum()) for row in mask.each()])
    counts = torch.from_numpy(of_episodes[numbers]).to(torch.float32)
    return {EPISODE_TOKENS: RaggedTensor.packed_rows(counts.repeat_interleave(mask.lengths), mask.lengths)}


def ends_episode(batch: DataProto) -> np.ndarray:
    """Return whether each row is the last one of its episode, (B,) bool."""
    numbers = episode_numbers(batch)
    return np.append(numbers[1:] != numbers[:-1], True)[: len(batch)]


def last_rows(batch: DataProto) -> DataProto:
    """Return the last row of each episode; the batch itself if each episode has one row."""
    ends = ends_episode(batch)
    return batch if bool(ends.all()) else batch.select_idxs(ends)


def merge_branches(batch: DataProto) -> DataProto:
    """Return a batch with one row per episode; the batch itself if each episode has one row.

    Responses, and columns with a value for each of their tokens, are the concatenated rows of the episode.
    All else is that of its last row.
    """
    ends = ends_episode(batch)
    if bool(ends.all()):
        return batch
    merged = batch.select_idxs(ends)
    numbers = torch.from_numpy(episode_numbers(batch))

    for key in _MERGED:
        if key in batch.ragged:
            column = batch.ragged[key]
            lengths = torch.zeros(len(merged), dtype=torch.int64).index_add(0, numbers, column.lengths)
            merged.ragged[key] = RaggedTensor.packed_rows(
                column.flat(), lengths, column.padding, column.on_left
            )
    return merged


def split_branches(columns: dict[str, RaggedTensor], batch: DataProto) -> dict[str, RaggedTensor]:
    """Return columns of a merged batch with the rows of `batch`."""
    lengths = batch.ragged["response_mask"].lengths
    return {
        key: RaggedTensor.packed_rows(column.flat(), lengths, column.padding, column.on_left)
        for key, column in columns.items()
    }
