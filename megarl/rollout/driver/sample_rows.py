"""Groups (a prompt with its samples), and the rows of their samples.

Rows are what is kept of a finished group, in memory and in checkpoints:

    samples -> sample_rows -> rows -> with_prompts -> the batch that Rollout.generate returns
                              |  ^
                        to_bytes  from_bytes

Rows have the columns that nothing else determines; `with_prompts` adds those that follow from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.agents.trajectory import EpisodeEnd, Sample, Trajectory
from megarl.batch.branches import BRANCH, FAILURE, episode_numbers, rows_of_episodes
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import Column, RaggedTensor
from megarl.batch.token_rows import ROUTED_EXPERTS
from megarl.config.schema import SamplingConfig
from megarl.rollout.interface import GenerationRequest

RolloutOutput = Sample | Trajectory

# The names of columns in the file of a checkpoint, where they differ.
_NAMES = {
    "responses": "token_ids",
    "rollout_log_probs": "log_probs",
    "response_mask": "is_model",
    "environment_rewards": "rewards",
    "prompts": "prompt",
}
# The oldest version of the weights that wrote a row, None for a failed episode. It is no column of the file.
_OLDEST = "weight_version"
_OF_ROWS = ("token_ids", "log_probs", "token_versions", "version", "is_dropped", "uid")
_OF_EPISODES = ("is_model", "rewards", "episode_end", "num_calls", "call_errors", "tool_s")


class FinishedGroup(NamedTuple):
    """All samples of a prompt.

    Attributes:
        uid: The uid of the prompt.
        version: Version of the weights that started them.
        rows: Their rows, in order.
        is_dropped: Whether they are excluded from training.
    """

    uid: str
    version: int
    rows: DataProto
    is_dropped: bool = False


def sample_rows(samples: Sequence[RolloutOutput]) -> DataProto:
    """Return the rows of samples, which are all responses of engines, or all episodes.

    An episode of several branches has a row for each, with the branch's own `prompts`.
    """
    written = [row for sample in samples for row in _rows(sample)]
    responses = RaggedTensor.of_rows([row.token_ids for row in written], torch.int32)
    tensors = {
        "responses": responses,
        "rollout_log_probs": RaggedTensor.of_rows([row.log_probs for row in written], torch.float32),
        "token_versions": _token_versions(written, responses.lengths),
    }

    # The oldest version is known here; to find it in the rows takes a pass over all tokens.
    oldest = [min(row.weight_versions, default=None) for row in written]

    # A sample is a single response of an engine; an episode also needs its turns and tool calls.
    branches = [row for row in written if isinstance(row, Trajectory)]
    if not branches:
        of_engines = [sample for sample in samples if isinstance(sample, Sample)]
        return DataProto.from_dict(
            {**tensors, **_route_column(of_engines)},
            {"finish_reason": [sample.finish_reason for sample in of_engines], _OLDEST: oldest},
        )
    tensors["response_mask"] = RaggedTensor.of_rows([row.mask for row in branches], torch.bool)
    tensors["environment_rewards"] = RaggedTensor.of_rows([row.rewards for row in branches], torch.float32)

    # Arrays describe the whole episode on each of its rows.
    episodes = [sample for sample in samples if isinstance(sample, Trajectory) for _ in sample.rows]
    arrays: dict[str, list[Any]] = {
        "episode_end": [None if each.end is None else each.end.value for each in episodes],
        "num_calls": [each.num_calls for each in episodes],
        "call_errors": [{kind.value: count for kind, count in each.call_errors.items()} for each in episodes],
        "tool_s": [each.tool_s for each in episodes],
        _OLDEST: oldest,
    }
    if any(episode.branches or episode.failure for episode in episodes):
        tensors["prompts"] = RaggedTensor.of_rows([row.prompt for row in branches], torch.int32)
        arrays[BRANCH] = [place for sample in samples for place in range(len(_rows(sample)))]
        arrays[FAILURE] = [episode.failure for episode in episodes]
        arrays["episode_metrics"] = [dict(episode.metrics) for episode in episodes]

    return DataProto.from_dict(tensors, arrays)


def _rows(sample: RolloutOutput) -> Sequence[RolloutOutput]:
    return sample.rows if isinstance(sample, Trajectory) else (sample,)


def _token_versions(samples: Sequence[RolloutOutput], lengths: torch.Tensor) -> RaggedTensor:
    versions = {sample.weight_versions if isinstance(sample, Sample) else () for sample in samples}

    # Usually a single version sampled all tokens; then no array per sample is needed.
    if len(versions) == 1 and len(only := next(iter(versions))) == 1:
        return RaggedTensor.constant(only[0], lengths, torch.int32)
    return RaggedTensor.of_rows([sample.token_versions for sample in samples], torch.int32)


def _route_column(samples: Sequence[Sample]) -> dict[str, RaggedTensor]:
    """Return the column ROUTED_EXPERTS if samples have routes. The row of one without them is empty."""
    found = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not found:
        return {}
    empty = np.empty(0, found[0].dtype)
    routes = [empty if sample.routed_experts is None else sample.routed_experts for sample in samples]
    return {ROUTED_EXPERTS: RaggedTensor.of_rows(routes, torch.from_numpy(empty).dtype)}


def num_samples(rows: DataProto) -> int:
    """Return the number of samples, of which an episode may have several rows."""
    return int(episode_numbers(rows)[-1]) + 1 if len(rows) else 0


def select_samples(rows: DataProto, numbers: Sequence[int]) -> DataProto:
    """Return the rows of the samples with these numbers, in this order."""
    of_samples = rows_of_episodes(rows)
    return rows.select_idxs([row for number in numbers for row in of_samples[number].tolist()])


def with_prompts(prompts: DataProto, rows: DataProto, version: int, pad_token_id: int) -> DataProto:
    """Build the batch that Rollout.generate returns.

    Args:
        rows: The rows of samples, with as many samples of each prompt, in the order of the prompts.
        version: That of the last weight sync.
        pad_token_id: Padding of the responses.
    """
    numbers = episode_numbers(rows)
    size, rest = divmod(num_samples(rows), max(1, len(prompts)))
    assert rest == 0, (num_samples(rows), len(prompts))
    of_prompts = prompts.select_idxs(numbers // max(1, size))
    columns = dict(rows.ragged)
    columns["token_versions"] = replace(columns["token_versions"], padding=-1)
    columns["responses"] = replace(columns["responses"], padding=pad_token_id)
    oldest = rows.non_tensor_batch[_OLDEST]
    arrays: dict[str, Any] = {_OLDEST: [version if each is None else each for each in oldest]}
    if "episode_end" in rows.non_tensor_batch:
        mask = columns["response_mask"]
        arrays |= _of_episodes(rows, mask, numbers)
        # The last turn is the answer: the tokens after the last one that the model did not write.
        columns["answer_mask"] = RaggedTensor.of_rows(
            [row.int().flip(0).cumprod(0).flip(0).numpy() for row in mask.each()], torch.bool
        )
    else:
        columns["response_mask"] = RaggedTensor.constant(True, columns["responses"].lengths, torch.bool)
    if "prompts" in columns:
        columns["prompts"] = replace(columns["prompts"], on_left=True)

    return DataProto.from_dict(
        {**of_prompts.columns, **columns},
        {**of_prompts.non_tensor_batch, **rows.non_tensor_batch, **arrays},
        {**prompts.meta_info, "weight_version": version},
    )


def _of_episodes(rows: DataProto, mask: RaggedTensor, numbers: np.ndarray) -> dict[str, list[Any]]:
    """Return the arrays that follow from the masks and ends of episodes."""
    # The environment's result is between two turns, so a turn begins where the author changes to the model.
    turns = [np.count_nonzero(np.diff(row.int().numpy(), prepend=0) == 1) for row in mask.each()]
    ends = rows.non_tensor_batch["episode_end"]
    return {
        "num_turns": np.bincount(numbers, turns).astype(int)[numbers].tolist(),
        "finish_reason": ["length" if end == EpisodeEnd.length.value else "stop" for end in ends],
    }


def to_bytes(groups: Sequence[FinishedGroup]) -> bytes:
    """Serialize groups. There must be at least one, and their samples must be of one kind."""
    rows = DataProto.concat([group.rows for group in groups])
    of_rows = [group for group in groups for _ in range(len(group.rows))]
    tensors: dict[str, Column] = {_NAMES.get(key, key): column for key, column in rows.columns.items()}
    tensors["version"] = torch.tensor([group.version for group in of_rows])
    tensors["is_dropped"] = torch.tensor([group.is_dropped for group in of_rows])
    arrays: dict[str, Any] = {**rows.non_tensor_batch, "uid": [group.uid for group in of_rows]}
    del arrays[_OLDEST]
    if FAILURE in arrays:
        places = zip(arrays[BRANCH], arrays[FAILURE], strict=True)
        arrays[BRANCH] = [place if failure is None else None for place, failure in places]
    return DataProto.from_dict(tensors, arrays).to_bytes()


def from_bytes(data: bytes) -> dict[str, FinishedGroup]:
    """Return the groups by uid. Raises ValueError if `to_bytes` did not write the data."""
    read = DataProto.from_bytes(data)
    arrays: dict[str, Any] = dict(read.non_tensor_batch)

    # The file may be damaged or of another version, so check for all columns before reading anything.
    there = read.columns.keys() | arrays.keys()
    of_kind = _OF_EPISODES if "is_model" in there else ("finish_reason",)
    if missing := {*_OF_ROWS, *of_kind} - there:
        raise ValueError(f"there is no {', '.join(sorted(missing))}")
    names = {name: key for key, name in _NAMES.items()}
    versions, are_dropped = (read.tensors[key].tolist() for key in ("version", "is_dropped"))
    uids = arrays.pop("uid").tolist()
    drawn = [row[row >= 0] for row in read.ragged["token_versions"].each()]
    arrays[_OLDEST] = [int(row.min()) if len(row) else None for row in drawn]
    if BRANCH in arrays:
        arrays[BRANCH] = [place or 0 for place in arrays[BRANCH]]
        arrays.setdefault("episode_metrics", [{}] * len(uids))  # files of earlier versions have none
    rows = DataProto.from_dict({names.get(key, key): column for key, column in read.ragged.items()}, arrays)

    # Rows of a group are consecutive and in order, so the samples keep their positions.
    groups: dict[str, FinishedGroup] = {}
    first = 0
    for uid, count in Counter(uids).items():
        # A copy, so that a group does not keep the memory of the others.
        group_rows = DataProto.concat([rows[first : first + count]])
        groups[uid] = FinishedGroup(uid, versions[first], group_rows, are_dropped[first])
        first += count

    return groups


# ---- groups

GREEDY = SamplingConfig(n=1, temperature=0.0)


class GroupRules(NamedTuple):
    """Composition of a group, and the rules for dropping it.

    Attributes:
        sampling: Sampling configuration of its samples.
        greedy: Whether it also contains the greedy response to its prompt (ReMax).
        max_without_signal: Maximum number of groups that may be dropped for a step because all their samples
            have the same score (DAPO). None disables this filter.
        max_error_rate: Share of a step's groups that may be dropped because an engine cannot generate their
            samples.
        scores_early: Whether groups are scored while others are generated, even if no filter needs it.
        have_branches: Whether samples are the conversations of an agent program.
    """

    sampling: SamplingConfig
    greedy: bool = False
    max_without_signal: int | None = None
    max_error_rate: float = 0.0
    scores_early: bool = True
    have_branches: bool = False

    @property
    def size(self) -> int:
        return self.sampling.n + self.greedy


class StepGroups(NamedTuple):
    """The groups of a step in data order, including dropped and surplus ones.

    Attributes:
        prompts: The prompts, one row per group.
        rows: The rows of their samples, equally many of each prompt; the greedy one comes last.
        versions: Version of the weights that started each group.
        is_trained: Whether each group is trained. The others were dropped, or are not needed.
        num_surplus: Number of groups that are not needed.
        num_rounds: Rounds of generation (see StalenessController).
        num_ahead: Number of groups that had been started for later steps.
    """

    prompts: DataProto
    rows: DataProto
    versions: list[int]
    is_trained: list[bool]
    num_surplus: int = 0
    num_rounds: int = 1
    num_ahead: int = 0

    @property
    def trained(self) -> StepGroups:
        """The groups that are trained."""
        if all(self.is_trained):
            return self
        return self.select([number for number, trained in enumerate(self.is_trained) if trained])

    def select(self, numbers: Sequence[int]) -> StepGroups:
        """Return the groups with these numbers, in this order."""
        size = num_samples(self.rows) // len(self.prompts)
        samples = [size * number + place for number in numbers for place in range(size)]
        return self._replace(
            prompts=self.prompts.select_idxs(numbers),
            rows=select_samples(self.rows, samples),
            versions=[self.versions[number] for number in numbers],
            is_trained=[self.is_trained[number] for number in numbers],
        )


class GroupState(Enum):
    """State of a group. The rollout buffer's docstring has the transitions.

    Attributes:
        generating: Samples are missing.
        undecided: It has all samples, and its scores decide whether it is trained.
        finished: It waits for its step. Its scores may still be missing.
        dropped: It is excluded from training.
        taken: It is trained.
    """

    generating = auto()
    undecided = auto()
    finished = auto()
    dropped = auto()
    taken = auto()


@dataclass(eq=False)
class Group:
    """A prompt and its samples so far, from its draw to the step that trains it.

    Attributes:
        prompts: The prompts that were drawn together with its prompt.
        place: The index of its prompt among them.
        position: The position of the loader before they were drawn.
        serial: The position of its prompt in the data.
        requests: The requests of its samples.
        number: Its position among the admitted groups; -1 before it is admitted.
        version: Version of the weights that started it; -1 before it is started.
        samples: Its samples by their index in the group, until there are all.
        rows: The rows of all its samples; None as long as samples are missing.
        is_unscored: Whether it has all its samples, and must still be sent for scoring.
        request_numbers: The numbers of its requests at their runner.
    """

    prompts: DataProto
    place: int
    position: Any
    serial: int
    requests: Sequence[GenerationRequest]
    number: int = -1
    version: int = -1
    samples: dict[int, RolloutOutput] = field(default_factory=dict)
    rows: DataProto | None = None
    state: GroupState = GroupState.generating
    is_unscored: bool = False
    request_numbers: Sequence[int] = ()

    @property
    def uid(self) -> str:
        return str(self.prompts.non_tensor_batch["uid"][self.place])


def rows_of(groups: Sequence[Group]) -> DataProto:
    """Returns the prompts of the groups, one row per group, in order."""
    parts = []

    # Groups of the same drawn batch share one selection.
    for _, together in groupby(groups, key=lambda group: id(group.prompts)):
        of_it = list(together)
        rows = of_it[0].prompts
        places = [group.place for group in of_it]
        parts.append(rows if places == list(range(len(rows))) else rows.select_idxs(places))

    return parts[0] if len(parts) == 1 else DataProto.concat(parts)
