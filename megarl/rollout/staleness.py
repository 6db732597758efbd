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
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import islice

from megarl.machine.errors import RunError

_MARGIN = 1.2  # A few surplus groups cost less than one more round.


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

        # in order: group -> (version that started it, whether it is finished)
        self._live: dict[int, tuple[int, bool]] = {}
        self._dropped: list[int] = []  # since the last taken group, in order
        self._num_admitted = 0

        # the rounds of the next step, if no other step runs ahead of it
        self.num_rounds = 1
        self._num_wanted = prompts_per_step  # number of groups over all its rounds

    @property
    def live(self) -> dict[int, int]:
        """Groups that are neither taken nor dropped, in order, with the versions that started them."""
        return {group: version for group, (version, _) in self._live.items()}

    @property
    def num_finished(self) -> int:
        """Number of finished groups that are not taken."""
        return sum(is_finished for _, is_finished in self._live.values())

    @property
    def num_missing(self) -> int:
        """Number of groups of this round that have not been admitted yet, at `max_staleness` 0."""
        return self._num_wanted - len(self._live) - len(self._dropped)

    def may_admit(self, version: int) -> bool:
        """Return whether weights of `version` may start the next group."""
        if not self.runs_ahead:
            step = self.next_step
            has_room = self.num_missing > 0
        else:
            step = self.next_step + len(self._live) // self.prompts_per_step  # step that would train it
            has_room = len(self._live) < (self._max_staleness + 1) * self.prompts_per_step
        if not has_room or step > self._total_steps:
            return False

        # Dropped groups only move later ones forward, so this step gives the largest possible age.
        return self.trained_version(step) - version <= self._max_staleness

    def trained_version(self, step: int) -> int:
        """Return the version of the weights that `step` trains. `step` must not be before `next_step`."""
        return self._next_version + sum(map(self._step_pushes, range(self.next_step, step)))

    def admit(self, version: int) -> int:
        """Admit a group and return its number. The caller has checked `may_admit`."""
        group = self._num_admitted
        self._num_admitted += 1
        self._live[group] = (version, False)
        return group

    def finish(self, group: int) -> None:
        """Mark a group as finished: it has all its samples."""
        self._live[group] = (self._live[group][0], True)
        self._extend_round()

    def drop(self, group: int) -> None:
        """Drop a group, which is then not trained."""
        del self._live[group]
        self._dropped.insert(bisect_left(self._dropped, group), group)
        self._extend_round()

    @property
    def is_ready(self) -> bool:
        """Whether all groups of the next step are finished."""
        first = self._next()
        if not self.runs_ahead:
            return len(first) == self.prompts_per_step and not self._is_open
        return len(first) == self.prompts_per_step and all(self._live[group][1] for group in first)

    @property
    def num_dropped(self) -> int:
        """Number of groups that were dropped among or before the groups of the next step."""
        first = self._next()
        if not self.runs_ahead or len(first) < self.prompts_per_step:
            return len(self._dropped)
        return bisect_left(self._dropped, first[-1])

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

    def take(self, version: int) -> list[int]:
        """Return the groups of the next step in order.

        The step must be ready and train the weights of `version`.
        """
        assert self.is_ready
        assert version == self._next_version, (version, self._next_version)
        groups = self._next()
        # Clear the drops among these groups now: `num_dropped` depends on `_live`, which changes below.
        self._dropped = self._dropped[self.num_dropped :]

        for group in groups:
            age = version - self._live.pop(group)[0]
            assert 0 <= age <= (self._max_staleness if self.in_order else age), (group, age)

        # At staleness 0, remaining groups would be too old for the next step.
        if not self.runs_ahead:
            self._live.clear()
            self.num_rounds = 1
            self._num_wanted = self.prompts_per_step

        self._next_version += self._step_pushes(self.next_step)
        self.next_step += 1
        return groups

    def _next(self) -> list[int]:
        """Return the groups that the next step trains, or as many of them as have been admitted."""
        candidates = (
            self._live
            if self.in_order
            else (group for group, (_, is_finished) in self._live.items() if is_finished)
        )
        return list(islice(candidates, self.prompts_per_step))

    @property
    def _is_open(self) -> bool:
        """Whether groups of the round are missing, or neither finished nor dropped."""
        return self.num_missing > 0 or not all(is_finished for _, is_finished in self._live.values())

    def _extend_round(self) -> None:
        """Begin another round when all groups of this one are decided and too few remain."""
        if not self.runs_ahead and not self._is_open and len(self._live) < self.prompts_per_step:
            self.num_rounds += 1
            num_decided = len(self._live) + len(self._dropped)
            self._num_wanted += _num_to_replace(self.prompts_per_step, len(self._live), num_decided)


def _num_to_replace(num_wanted: int, num_kept: int, num_decided: int) -> int:
    """Return the number of groups of a further round.

    The result exceeds the number that suffices at the current rate of kept groups by a margin, and is at most
    a whole step.
    """
    missing = _MARGIN * (num_wanted - num_kept)
    share = num_kept / num_decided
    return num_wanted if missing >= share * num_wanted else math.ceil(missing / share)
