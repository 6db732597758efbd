"""How far generation may run ahead of training: which group may be begun, and which are trained next. Pure.

Groups, a prompt with its samples each, are begun in the order of the prompts, and trained in it: step s trains the next
`prompts_per_step`, however long they take. A group is admitted only where the step that will train it is at most `max_staleness`
versions of the weights ahead of those that begin it, and where there is such a step. So nothing that is finished is ever thrown away for
its age, and long answers are trained as often as short ones. A group may be dropped, for its samples teach nothing or there will be none:
those behind it are then trained earlier, never later. Without `in_order` a step trains the oldest groups that are finished; those that are
late keep their room, and their age has no bound.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import islice


class AdmissionLedger:
    """next_step: the first that trains. version: of the weights which that step trains. step_pushes: whether new weights are pushed at
    the end of a step. Groups are numbered from 0."""

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
        self.in_order = in_order
        self.max_staleness, self.prompts_per_step = max_staleness, prompts_per_step
        self._total_steps, self._step_pushes = total_steps, step_pushes
        self.next_step = next_step
        self._next_version = version  # that `next_step` trains
        self._live: dict[int, tuple[int, bool]] = {}  # in order: group -> (version that began it, whether it is finished)
        self._dropped: list[int] = []  # since the last group that was taken; in order
        self._num_admitted = 0

    @property
    def live(self) -> dict[int, int]:
        """The groups that are begun and neither taken nor dropped, in order, with the versions that began them."""
        return {group: version for group, (version, _) in self._live.items()}

    def may_admit(self, version: int) -> bool:
        """Whether weights of `version` may begin the next group."""
        step = self.next_step + len(self._live) // self.prompts_per_step  # that would train it
        if len(self._live) >= (self.max_staleness + 1) * self.prompts_per_step or step > self._total_steps:
            return False
        return self.trained_version(step) - version <= self.max_staleness

    def trained_version(self, step: int) -> int:
        """Of the weights that `step` trains, one that is not before `next_step`."""
        return self._next_version + sum(map(self._step_pushes, range(self.next_step, step)))

    def admit(self, version: int) -> int:
        """Begins a group; its number. `may_admit` of the version has been asked."""
        group = self._num_admitted
        self._num_admitted += 1
        self._live[group] = (version, False)
        return group

    def finish(self, group: int) -> None:
        """It has all its samples."""
        self._live[group] = (self._live[group][0], True)

    def drop(self, group: int) -> None:
        """It is not trained."""
        del self._live[group]
        self._dropped.insert(bisect_left(self._dropped, group), group)

    @property
    def is_ready(self) -> bool:
        """All groups of the next step are finished."""
        first = self._next()
        return len(first) == self.prompts_per_step and all(self._live[group][1] for group in first)

    @property
    def num_dropped(self) -> int:
        """Groups that have been dropped among, or before, those of the next step that are begun."""
        first = self._next()
        return bisect_left(self._dropped, first[-1]) if len(first) == self.prompts_per_step else len(self._dropped)

    def take(self, version: int) -> list[int]:
        """The groups of the next step, which trains the weights of `version`, in order; it is ready."""
        assert self.is_ready
        assert version == self._next_version, (version, self._next_version)
        groups = self._next()
        self._dropped = self._dropped[self.num_dropped :]
        for group in groups:
            age = version - self._live.pop(group)[0]
            assert 0 <= age <= (self.max_staleness if self.in_order else age), (group, age)
        self._next_version += self._step_pushes(self.next_step)
        self.next_step += 1
        return groups

    def _next(self) -> list[int]:
        """The groups that the next step trains, as far as there are so many."""
        candidates = self._live if self.in_order else (group for group, (_, is_finished) in self._live.items() if is_finished)
        return list(islice(candidates, self.prompts_per_step))
