"""Groups, which are a prompt with its samples: their composition, their state, and the groups of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import groupby
from typing import Any, NamedTuple

from megarl.batch.data_proto import DataProto
from megarl.config.schema import SamplingConfig
from megarl.rollout.driver.sample_rows import RolloutOutput, num_samples, select_samples
from megarl.rollout.interface import GenerationRequest

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
