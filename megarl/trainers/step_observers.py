"""Observe the steps of a run: slow ranks, profiler traces, and predicted times.

megarl/cli/run/session.py passes their methods to the monitor (monitor.py), which calls them in each step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from megarl.config.schema import PPOConfig, ProfileConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.models.architecture import Architecture
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.step_time.device import DeviceProfile
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts
from megarl.roles.megatron_worker import MegatronWorker
from megarl.tracking.timeline import Span

_log = logging.getLogger(__name__)
PROBE = "measure_speed"  # the phase of an update in which every rank does the same work
NUM_UPDATES = 8  # in a row, before a rank counts as slow, or as fast again
PROFILE_FOLDER = "profile"  # in `trainer.output_dir`
_PROMPT = "prompt_length/mean"
_RESPONSE = "response_length/mean"


class SpeedHistory:
    """The speeds of a group's ranks.

    A rank is slow once it has taken `factor` times as long as the median of its peers in each of the last
    NUM_UPDATES updates, until it has not in as many. Noise, such as that of a busy CPU, makes single
    measurements long, but does not stay with one rank.

    Args:
        factor: The ratio above which a measurement counts, larger than 1.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._ratios: dict[int, list[float]] = defaultdict(list)
        self._slow: set[int] = set()

    def see(self, seconds: Mapping[int, float]) -> list[tuple[int, float]]:
        """Record how long the same work took in an update, by rank.

        Returns each rank that has become slow, and how many times as long as its peers it takes.
        """
        found = []
        in_order = sorted(seconds.values())

        for rank, own_s in seconds.items():
            ratio = own_s / _median_of_others(in_order, own_s)
            last = self._ratios[rank] = [*self._ratios[rank], ratio][-NUM_UPDATES:]
            num_slow = sum(ratio > self._factor for ratio in last)

            if num_slow == NUM_UPDATES and rank not in self._slow:
                self._slow.add(rank)
                found.append((rank, median(last)))
            elif num_slow == 0 and len(last) == NUM_UPDATES:
                # A rank that is slow only from time to time is not reported again before this.
                self._slow.discard(rank)

        return found

    def largest_ratio(self, num_updates: int) -> float:
        """Return the largest median of a rank's ratios over the last updates, at most NUM_UPDATES."""
        return max(median(ratios[-num_updates:]) for ratios in self._ratios.values())


def _median_of_others(in_order: Sequence[float], own: float) -> float:
    """Return the median of sorted values without one of them, without sorting the others again."""
    position = bisect_left(in_order, own)
    num_others = len(in_order) - 1
    middle = ((num_others - 1) // 2, num_others // 2)
    # From its own position on, the next index is used, which leaves its own value out.
    return sum(in_order[index + (index >= position)] for index in middle) / 2


class Stragglers:
    """Warns of slow ranks of a run's models, and measures how slow the slowest ones are.

    Args:
        factor: See SpeedHistory.
        groups: The processes of the run, of which those of models are used.
    """

    def __init__(self, factor: float, groups: Iterable[object]) -> None:
        self._groups = {group.role: group for group in groups if isinstance(group, RoleGroup)}
        self._histories: dict[str, SpeedHistory] = defaultdict(lambda: SpeedHistory(factor))

    def see(self, spans: Sequence[Span]) -> dict[str, float]:
        """Look at the spans of a step.

        Returns `perf/slowest_rank_ratio/<role>`: the time of the slowest rank for the same work, divided by
        the median of its peers, median over the step's updates.
        """
        seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for span in spans:
            if span.name == PROBE:
                seconds[span.role][span.rank].append(span.end_s - span.start_s)

        metrics = {}
        for role, by_rank in seconds.items():
            history = self._histories[role]
            # After the loss of a rank, an update may have measurements of only some ranks.
            updates = list(zip(*by_rank.values(), strict=False))
            for update in updates:
                for rank, ratio in history.see(dict(zip(by_rank, update, strict=True))):
                    _log.warning(
                        "%s rank %d (%s) is slow: it takes %.1f times as long as its peers for the same "
                        "work, median over the last %d updates; look for other processes on the device, and "
                        "at its temperature and clock",
                        role,
                        rank,
                        self._groups[role].where(rank),
                        ratio,
                        NUM_UPDATES,
                    )
            metrics[f"perf/slowest_rank_ratio/{role}"] = history.largest_ratio(len(updates))
        return metrics


class StepProfiler:
    """Profiles the steps of `config` on its ranks.

    Args:
        config: The steps, roles and ranks.
        groups: The processes of the run. Those without a chosen role are ignored.
        output_dir: The folder of the run, which all nodes see.
    """

    def __init__(self, config: ProfileConfig, groups: Iterable[object], output_dir: Path) -> None:
        self._steps = frozenset(config.steps)
        self._folder = output_dir.absolute() / PROFILE_FOLDER
        self._ranks = [
            (group, rank)
            for group in groups
            if isinstance(group, RoleGroup) and group.role in config.roles
            for rank in config.ranks
            if rank < group.world_size
        ]

    @contextmanager
    def step(self, number: int) -> Generator[None]:
        """Profile the block if this step is chosen, and write the traces after it.

        If an error ends the block, no trace is written. A rank that is lost before or after the block has no
        trace: the next call of its model finds the loss again, where the run can recover from it.
        """
        if number not in self._steps:
            yield
            return

        with _tolerates_losses():
            gather(*(group.call_rank(rank, MegatronWorker.begin_profile) for group, rank in self._ranks))
        yield
        folder = self._folder / f"step_{number:08d}"
        names: list[str] = []
        with _tolerates_losses():
            ended = [
                group.call_rank(rank, MegatronWorker.end_profile, str(folder)) for group, rank in self._ranks
            ]
            names += [name for name in gather(*ended) if name is not None]
        if names:
            _log.info("profile of step %d: %s in %s", number, ", ".join(names), folder)
        else:
            _log.warning("step %d has no profile, because processes were lost meanwhile", number)


@contextmanager
def _tolerates_losses() -> Generator[None]:
    """Log the loss of a rank instead of raising it."""
    try:
        yield
    except PhaseTimeoutError as error:
        _log.warning("a rank was lost as its profiler started or ended: %s", error.problem)
    except WorkerError as error:
        if not error.kind.is_loss:
            raise
        _log.warning("a rank was lost as its profiler started or ended: %s", str(error).partition("\n")[0])


def predicted_metrics(
    config: PPOConfig,
    plan: PlacementPlan,
    architectures: Mapping[str, Architecture],
    device: DeviceProfile,
    measured: Mapping[str, float],
) -> dict[str, float]:
    """Return `perf/predicted_step_s` and `predicted_s/<phase>` of a step.

    It is predicted from the mean lengths of its samples.

    Args:
        measured: The metrics of the step. Without lengths, because a step trained no samples, nothing is
            predicted.
    """
    if _PROMPT not in measured or _RESPONSE not in measured:
        return {}

    # Episodes of agents may be longer than one response.
    prompt = min(max(1.0, measured[_PROMPT]), config.longest_prompt)
    response = min(max(1.0, measured[_RESPONSE]), config.longest_response)
    costs = PredictedCosts(device, expected_lengths(config, prompt, response))
    step = costs.predict_step(config, plan, architectures)

    phases = {f"predicted_s/{name}": seconds for name, seconds in step.driver_s.items()}
    return {"perf/predicted_step_s": step.seconds, **phases}
