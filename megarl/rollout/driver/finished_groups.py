"""Finished groups that wait to be trained, and their checkpoint format."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from megarl.agents.protocol import CallErrorKind
from megarl.agents.trajectory import (
    Author,
    EpisodeEnd,
    Sample,
    Segment,
    Trajectory,
    VersionSpan,
    session_trajectory,
)
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import Column, RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS

RolloutOutput = Sample | Trajectory

_OF_TOKENS = ("token_ids", "log_probs", "token_versions")
_OF_ROWS = ("version", "is_dropped", "uid")
# is_model and rewards have one value per token
_OF_EPISODES = ("episode_end", "num_calls", "call_errors", "tool_s")


class FinishedGroup(NamedTuple):
    """All samples of a prompt.

    Attributes:
        uid: The uid of the prompt.
        version: Version of the weights that started them.
        is_dropped: Whether they are excluded from training.
    """

    uid: str
    version: int
    samples: list[RolloutOutput]
    is_dropped: bool = False


def to_bytes(groups: Sequence[FinishedGroup]) -> bytes:
    """Serialize groups. There must be at least one, and their samples must be of one kind."""
    whole = [(group, sample) for group in groups for sample in group.samples]
    # An episode of several branches has a row for each.
    rows = [(group, row) for group, sample in whole for row in _rows(sample)]
    written = [row for _, row in rows]

    # One row per sample; the values of the group are repeated on each of its rows.
    tensors: dict[str, Column] = {
        "token_ids": RaggedTensor.of_rows([sample.token_ids for sample in written], torch.int32),
        "log_probs": RaggedTensor.of_rows([sample.log_probs for sample in written], torch.float32),
        "token_versions": RaggedTensor.of_rows([sample.token_versions for sample in written], torch.int32),
        "version": torch.tensor([group.version for group, _ in rows]),
        "is_dropped": torch.tensor([group.is_dropped for group, _ in rows]),
    }
    arrays: dict[str, list] = {"uid": [group.uid for group, _ in rows]}

    # A sample is a single response of an engine; an episode also needs its turns and tool calls.
    if samples := [sample for sample in written if isinstance(sample, Sample)]:
        arrays["finish_reason"] = [sample.finish_reason for sample in samples]
        tensors |= route_column(samples)
    else:
        branches = [row for row in written if isinstance(row, Trajectory)]
        tensors["is_model"] = RaggedTensor.of_rows([row.mask for row in branches], torch.bool)
        tensors["rewards"] = RaggedTensor.of_rows([row.rewards for row in branches], torch.float32)
        episodes = [sample for _, sample in whole if isinstance(sample, Trajectory) for _ in sample.rows]
        if any(episode.branches or episode.failure for episode in episodes):
            tensors["prompt"] = RaggedTensor.of_rows([row.prompt for row in branches], torch.int32)
            arrays["branch"] = [
                place if sample.branches else None
                for _, sample in whole
                if isinstance(sample, Trajectory)
                for place in range(len(sample.rows))
            ]
            arrays["failure"] = [episode.failure for episode in episodes]
        arrays["episode_end"] = [None if episode.end is None else episode.end.value for episode in episodes]
        arrays["num_calls"] = [episode.num_calls for episode in episodes]
        arrays["call_errors"] = [
            {kind.value: count for kind, count in episode.call_errors.items()} for episode in episodes
        ]
        arrays["tool_s"] = [episode.tool_s for episode in episodes]

    return DataProto.from_dict(tensors, arrays).to_bytes()


def route_column(samples: Sequence[Sample]) -> dict[str, RaggedTensor]:
    """Return the column ROUTED_EXPERTS if samples have routes; either all or none of them must."""
    routes = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not routes:
        return {}
    return {
        ROUTED_EXPERTS: RaggedTensor.of_rows(routes, torch.from_numpy(np.empty(0, routes[0].dtype)).dtype)
    }


def from_bytes(data: bytes) -> dict[str, FinishedGroup]:
    """Return the groups by uid. Raises ValueError if `to_bytes` did not write the data."""
    rows = DataProto.from_bytes(data)

    # The file may be damaged or of another version, so check for all columns before reading anything.
    there = rows.ragged.keys() | rows.tensors.keys() | rows.non_tensor_batch.keys()
    of_kind = ("is_model", "rewards", *_OF_EPISODES) if "is_model" in there else ("finish_reason",)
    if missing := {*_OF_TOKENS, *_OF_ROWS, *of_kind} - there:
        raise ValueError(f"there is no {', '.join(sorted(missing))}")
    written: Sequence[RolloutOutput] = _episodes(rows) if "is_model" in there else _samples(rows)
    versions, are_dropped = (rows.tensors[key].tolist() for key in ("version", "is_dropped"))
    uids = rows.non_tensor_batch["uid"].tolist()
    groups: dict[str, FinishedGroup] = {}

    # Branches of an episode are consecutive, and the first one begins it.
    if "prompt" in there:
        places = rows.non_tensor_batch["branch"].tolist()
        begins = [number for number, place in enumerate(places) if not place]
        written = _sessions(rows, cast("list[Trajectory]", written), begins)
        uids, versions, are_dropped = (
            [values[begin] for begin in begins] for values in (uids, versions, are_dropped)
        )

    # Rows of a group are consecutive and in order, so the samples keep their positions.
    for uid, version, is_dropped, sample in zip(uids, versions, are_dropped, written, strict=True):
        groups.setdefault(uid, FinishedGroup(uid, version, [], is_dropped)).samples.append(sample)

    return groups


def _rows(sample: RolloutOutput) -> Sequence[RolloutOutput]:
    return sample.rows if isinstance(sample, Trajectory) else (sample,)


def _sessions(rows: DataProto, branches: list[Trajectory], begins: list[int]) -> list[Trajectory]:
    """Join the branches of each episode, which begins at the rows `begins`."""
    for branch, (prompt,) in zip(branches, _tokens(rows, "prompt"), strict=True):
        branch.prompt = prompt.tolist()
    episodes = []

    for begin, end in itertools.pairwise([*begins, len(branches)]):
        own = branches[begin:end]
        first = own[0]
        first_failure = rows.non_tensor_batch["failure"][begin]
        # A failed episode has one row, and no end.
        if first_failure is not None:
            first.failure = first_failure
            episodes.append(first)
            continue
        assert first.end is not None
        episodes.append(session_trajectory(first.prompt, own, first.end, first.num_calls))

    return episodes


def _tokens(rows: DataProto, *keys: str) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the columns of each row as copies, so that a row does not keep the memory of the others."""
    return zip(*([row.numpy().copy() for row in rows.ragged[key].each()] for key in keys), strict=True)


def _samples(rows: DataProto) -> list[Sample]:
    samples = []
    reasons = rows.non_tensor_batch["finish_reason"]
    routes = (
        [routes for (routes,) in _tokens(rows, ROUTED_EXPERTS)]
        if ROUTED_EXPERTS in rows.ragged
        else [None] * len(rows)
    )

    for (ids, log_probs, versions), reason, experts in zip(
        _tokens(rows, *_OF_TOKENS), reasons, routes, strict=True
    ):
        # Convert runs of equal versions back to spans.
        ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
        spans = tuple(VersionSpan(int(versions[end - 1]), end) for end in ends)
        samples.append(Sample(ids, log_probs, reason, spans, experts))

    return samples


def _episodes(rows: DataProto) -> list[Trajectory]:
    """Read episodes without their prompts, which the loader provides."""
    episodes = []
    arrays = zip(*(rows.non_tensor_batch[key] for key in _OF_EPISODES), strict=True)

    for (*tokens, is_model, rewards), (end, num_calls, errors, tool_s) in zip(
        _tokens(rows, *_OF_TOKENS, "is_model", "rewards"), arrays, strict=True
    ):
        # A segment begins wherever the author changes, and at the first token.
        starts = np.flatnonzero(np.diff(is_model, prepend=not is_model[0]))
        parts = zip(starts, *(np.split(values, starts[1:]) for values in tokens), strict=True)
        segments = [
            Segment(
                author=Author.model if is_model[start] else Author.environment,
                token_ids=ids,
                log_probs=own,
                token_versions=versions,
            )
            for start, ids, own, versions in parts
        ]
        # The reward of a turn was stored on its last token.
        ends = np.flatnonzero(is_model & ~np.append(is_model[1:], False))
        episodes.append(
            Trajectory(
                prompt=(),
                segments=segments,
                turn_rewards=rewards[ends].tolist(),
                end=EpisodeEnd(end),
                num_calls=num_calls,
                call_errors=Counter({CallErrorKind(kind): count for kind, count in errors.items()}),
                tool_s=tool_s,
            )
        )

    return episodes
