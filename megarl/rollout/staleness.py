"""Staleness controller, which decides which groups may be started and which are trained next. It is pure.

Groups (a prompt with its samples) are started and trained in the order of the prompts: step s trains the next
`prompts_per_step` groups, however long they take. A group is admitted only if the step that will train it
exists, and if the weights of that step are at most `max_staleness` versions newer than those that start the
group. Finished groups are therefore never discarded for their age, and long responses are trained as often as
short ones. A group may be dropped because its samples carry no signal or cannot be generated; later groups
are then trained earlier, never later. Without `in_order` a step trains the oldest finished groups; late
groups keep their position, and their age is not bounded.

At `max_staleness` 0, no later group can replace a dropped one, because the next step trains newer weights. A
step is then generated in rounds: the first has as many groups as the step trains, and each further one
replaces dropped groups, with a margin. Groups of the last round that are not needed are discarded.

Dynamic sampling (DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2) drops groups whose samples all have the
same score, which carry no signal. The rollout buffer asks for each scored group whether it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import torch

from megarl.algorithms.groups import rows_with_signal
from megarl.batch.branches import episode_numbers
from megarl.batch.data_proto import DataProto
from megarl.machine.errors import RunError
from megarl.rollout.driver.sample_rows import Group, GroupState, StepGroups


class StalenessController:
    """Bounds the age of the weights that generated a training batch. Groups are numbered from 0.

    Args:
        max_staleness: Maximum number of versions between the weights that start a group and those that train
            it.
        prompts_per_step: Number of groups of a step.
        total_steps: Last step of the run.
        next_step: First step that trains.
        version: Version of the weights that `next_step` trains.
        step_pushes: Returns whether weights are synced at the end of a step.
        in_order: Whether groups are trained in the order of the prompts, as they always are at
            `max_staleness` 0.

    Attributes:
        runs_ahead: Whether groups of later steps may be started before a step is taken. Otherwise each step
            is generated in rounds.
        live: Groups that are neither taken nor dropped, in order.
        dropped: Dropped groups that have not left with a step, in order.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        prompts_per_step: int,
        total_steps: int,
        next_step: int,
        version: int,
        step_pushes: Callable[[int], bool],
        in_order: bool = True,
    ) -> None:
        self._max_staleness = max_staleness
        self.runs_ahead = max_staleness > 0
        self.in_order = in_order or not self.runs_ahead
        self.prompts_per_step = prompts_per_step
        self._total_steps = total_steps
        self._step_pushes = step_pushes
        self.next_step = next_step
        self._next_version = version  # version that `next_step` trains
        self.live: list[Group] = []
        self.dropped: list[Group] = []
        self._num_admitted = 0

        # the rounds of the next step, if no other step runs ahead of it
        self.num_rounds = 1
        self._num_wanted = prompts_per_step  # number of groups over all its rounds

    @property
    def num_finished(self) -> int:
        """Number of finished groups that are not taken."""
        return sum(group.state is GroupState.finished for group in self.live)

    @property
    def num_missing(self) -> int:
        """Number of groups of this round that have not been admitted yet, at `max_staleness` 0."""
        return self._num_wanted - len(self.live) - len(self.dropped)

    def may_admit(self, version: int) -> bool:
        """Return whether weights of `version` may start the next group."""
        if not self.runs_ahead:
            step = self.next_step
            has_room = self.num_missing > 0
        else:
            step = self.next_step + len(self.live) // self.prompts_per_step  # step that would train it
            has_room = len(self.live) < (self._max_staleness + 1) * self.prompts_per_step
        if not has_room or step > self._total_steps:
            return False

        # Dropped groups only move later ones forward, so this step gives the largest possible age.
        return self.trained_version(step) - version <= self._max_staleness

    def trained_version(self, step: int) -> int:
        """Return the version of the weights that `step` trains. `step` must not be before `next_step`."""
        return self._next_version + sum(map(self._step_pushes, range(self.next_step, step)))

    def admit(self, group: Group, version: int) -> None:
        """Admit a group that weights of `version` start. The caller has checked `may_admit`."""
        group.number = self._num_admitted
        group.version = version
        self._num_admitted += 1
        self.live.append(group)

    def finish(self, group: Group) -> None:
        """Mark a group as finished: it has all its samples, and may be trained."""
        group.state = GroupState.finished
        self._extend_round()

    def drop(self, group: Group) -> None:
        """Drop a group, which is then not trained."""
        group.state = GroupState.dropped
        self.live.remove(group)
        self.dropped = _in_order([*self.dropped, group])
        self._extend_round()

    @property
    def is_ready(self) -> bool:
        """Whether all groups of the next step are finished."""
        first = self._next()
        if len(first) < self.prompts_per_step:
            return False
        # Without a step that runs ahead, surplus groups of the last round are finished too.
        if not self.runs_ahead:
            return not self._is_open
        return all(group.state is GroupState.finished for group in first)

    @property
    def num_dropped(self) -> int:
        """Number of groups that were dropped among or before the groups of the next step."""
        first = self._next()
        if not self.runs_ahead or len(first) < self.prompts_per_step:
            return len(self.dropped)
        return sum(group.number < first[-1].number for group in self.dropped)

    def expect(self, version: int) -> None:
        """Declare the version of the weights that the next step trains.

        A user's own loop may sync weights less often than `step_pushes` specifies, which makes groups
        younger.

        Raises:
            RunError: It synced weights more often, so that groups for this step may be too old.
        """
        if self.runs_ahead and version > self._next_version:
            raise RunError(
                f"step {self.next_step} would train weights of version {version}, but its samples were begun "
                f"for version {self._next_version}: with rollout.max_staleness={self._max_staleness} push "
                f"weights once per step, or use max_staleness=0"
            )
        self._next_version = version

    def take(self, version: int) -> list[Group]:
        """Return the groups of the next step, and those that leave with them, in order.

        The step must be ready and train the weights of `version`. Its groups are `taken`. Groups that were
        dropped before the last of them leave with them, and at staleness 0 all others do.
        """
        assert self.is_ready
        assert version == self._next_version, (version, self._next_version)
        num_dropped = self.num_dropped  # depends on the groups that are taken below
        leaving = [*self._next(), *self.dropped[:num_dropped]]
        self.dropped = self.dropped[num_dropped:]

        for group in self._next():
            age = version - group.version
            assert 0 <= age <= (self._max_staleness if self.in_order else age), (group.number, age)
            group.state = GroupState.taken
            self.live.remove(group)

        # At staleness 0, remaining groups would be too old for the next step.
        if not self.runs_ahead:
            leaving += self.live
            self.live = []
            self.num_rounds = 1
            self._num_wanted = self.prompts_per_step

        self._next_version += self._step_pushes(self.next_step)
        self.next_step += 1
        return _in_order(leaving)

    def _next(self) -> list[Group]:
        """Return the groups that the next step trains, or as many of them as have been admitted."""
        candidates = (
            self.live
            if self.in_order
            else (group for group in self.live if group.state is GroupState.finished)
        )
        return list(islice(candidates, self.prompts_per_step))

    @property
    def _is_open(self) -> bool:
        """Whether groups of the round are missing, or neither finished nor dropped."""
        return self.num_missing > 0 or self.num_finished < len(self.live)

    def _extend_round(self) -> None:
        """Begin another round when all groups of this one are decided and too few remain."""
        if not self.runs_ahead and not self._is_open and len(self.live) < self.prompts_per_step:
            self.num_rounds += 1
            num_decided = len(self.live) + len(self.dropped)
            self._num_wanted += num_to_replace(self.prompts_per_step, len(self.live), num_decided)


def _in_order(groups: list[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.number)


_MARGIN = 1.2  # A few surplus groups cost less than one more round.


# ---- dynamic sampling


class NoSignalError(RunError):
    """Too few prompts of a step have samples that differ in score, and no further prompts may be dropped."""


class DynamicSampling:
    """Decides by the scores of groups which of them a step trains.

    Args:
        max_dropped: Maximum number of groups that may be dropped for a step.
    """

    def __init__(self, max_dropped: int) -> None:
        self.max_dropped = max_dropped
        self._scores: list[float] = []  # that have decided since the last step was taken

    def is_trained(self, uid: str, scores: Sequence[float]) -> bool:
        """Return whether a group is trained, given the scores of its scored samples."""
        self._scores += scores
        values = torch.tensor(scores, dtype=torch.float64)
        return bool(rows_with_signal(values, np.full(len(scores), uid)).any())

    def end_step(self) -> None:
        self._scores = []

    def error(self, step: int, wanted: int, num_kept: int, num_dropped: int) -> NoSignalError:
        """Return the error of a step for which too many groups were dropped.

        Args:
            wanted: Number of groups that the step trains.
        """
        scores = np.array(self._scores)

        # Scoring may have failed for every sample.
        spread = f"from {scores.min():.3g} to {scores.max():.3g}" if len(scores) else "no sample was scored"
        mean = f"{scores.mean():.3g}" if len(scores) else "unknown"

        return NoSignalError(
            f"step {step}: only {num_kept} of {num_kept + num_dropped} prompts have samples with different "
            f"scores, and {wanted} are needed; the mean score is {mean}, {spread}, and all "
            f"algorithm.dynamic_sampling.max_generations={self.max_dropped // wanted + 1} generations are "
            "used up. Raise it, or rollout.n, or train on prompts that are neither always solved nor out of "
            "reach"
        )


def num_to_replace(num_wanted: int, num_kept: int, num_decided: int) -> int:
    """Return the number of groups of a further round.

    The result exceeds the number that suffices at the current rate of kept groups by a margin, and is at most
    a whole step.
    """
    missing = _MARGIN * (num_wanted - num_kept)
    share = num_kept / num_decided
    return num_wanted if missing >= share * num_wanted else math.ceil(missing / share)


def select_trained(batch: DataProto, groups: StepGroups, n: int) -> tuple[DataProto, dict[str, float]]:
    """Return the samples of the groups that are trained, and the metrics of the step.

    The metrics are `dynamic_sampling/num_generations`, the rounds of generation; `num_prompts`, the prompts
    sampled; `num_without_signal`, those of them that were dropped; `num_surplus`, those that had a signal but
    were not needed; `score_mean`, the mean over all samples.

    Args:
        batch: The scored samples of all groups.
        n: Number of samples of a group.
    """
    num_prompts = len(groups.is_trained)
    metrics = {
        "num_generations": groups.num_rounds,
        "num_prompts": num_prompts,
        "num_without_signal": num_prompts - sum(groups.is_trained) - groups.num_surplus,
        "num_surplus": groups.num_surplus,
        "score_mean": batch.non_tensor_batch["score"].astype(np.float64).mean(),
    }

    return batch.select_idxs(np.repeat(groups.is_trained, n)[episode_numbers(batch)]), {
        f"dynamic_sampling/{name}": float(value) for name, value in metrics.items()
    }
