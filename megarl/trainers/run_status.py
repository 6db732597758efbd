"""Contents of `status.json` for a reinforcement learning run, and detection of stalls."""

from __future__ import annotations

import time
from collections import deque
from itertools import zip_longest

from megarl.config.schema import PPOConfig
from megarl.roles.start import PPORoles
from megarl.rollout.driver.scheduler import RequestState, SchedulerTotals
from megarl.rollout.driver.step_rollout import StepRollout
from megarl.tracking.status import EVERY_S, RUNNING, GroupStatus, ReplicaStatus, RunStatus
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import WAIT, Monitor
from megarl.trainers.recovery import NoRecovery, StepRecovery

_MOST_SHOWN = 10
_WINDOW = round(60 / EVERY_S)  # number of samples over which shares and rates are averaged
_STALLED_SHARE = 0.25  # share of the limit after which a replica is considered hung


class StatusReader:
    """Builds the status of a run from state owned by the trainer's threads.

    `look` is called by one thread every few seconds and blocks no other thread. It also records the status on
    the timeline.
    """

    def __init__(
        self,
        config: PPOConfig,
        roles: PPORoles,
        monitor: Monitor,
        prompts: StepRollout,
        recovery: StepRecovery | NoRecovery,
        checkpoints: Checkpointer,
    ) -> None:
        self._config = config
        self._roles = roles
        self._monitor = monitor
        self._prompts = prompts
        self._recovery = recovery
        self._checkpoints = checkpoints
        self._position = monitor.position
        self._moments: deque[tuple[float, SchedulerTotals, float]] = deque([self._moment()], maxlen=_WINDOW)

    def _moment(self) -> tuple[float, SchedulerTotals, float]:
        """Return the time, what the scheduler has done, and how long the trainer has waited for samples."""
        return time.monotonic(), self._roles.rollout.scheduler.totals(), self._position.seconds_in(WAIT)

    def snapshot(self) -> RunStatus:
        rollout = self._roles.rollout
        position = self._position
        requests, replicas = rollout.runner.snapshot()
        recovery = self._recovery.totals

        # Rates are averages over a sliding window of about a minute.
        first_s, first, first_waited_s = self._moments[0]
        self._moments.append(self._moment())
        now_s, now, waited_s = self._moments[-1]
        seconds = max(now_s - first_s, 1e-9)

        # Replicas may have joined or left within the window.
        num_tokens = [
            last - before for before, last in zip_longest(first.num_tokens, now.num_tokens, fillvalue=0)
        ]
        busy_s = sum(now.busy_s) - sum(first.busy_s)

        # Copy the list, because the trainer's thread changes it.
        begun = position.begun.copy()
        groups = _by_group(requests)
        num_groups = self._num_groups(groups)
        self._monitor.count("prompts", num_groups)
        self._monitor.count(
            "requests", {f"replica {number}": in_flight for number, (_, in_flight, _) in enumerate(replicas)}
        )
        self._monitor.count("weights", {"version": self._roles.weights.version})

        return RunStatus(
            state=RUNNING,
            # Between two steps and after the last one, it is the step that has been completed.
            step=position.step or self._checkpoints.last_step or None,
            total_steps=self._config.trainer.total_steps,
            phases=position.phases.copy(),
            phase_s=begun[-1].seconds() if begun else 0.0,
            weight_version=self._roles.weights.version,
            max_staleness=self._config.rollout.max_staleness,
            groups=num_groups,
            oldest=[_shown(uid, of_group) for uid, of_group in list(groups.items())[:_MOST_SHOWN]],
            replicas=[
                ReplicaStatus(
                    state=state, in_flight=in_flight, tokens_per_s=count / seconds, silent_s=silent_s
                )
                # Some may have left.
                for (state, in_flight, silent_s), count in zip(replicas, num_tokens, strict=False)
            ],
            num_restarts=rollout.num_restarts,
            num_recoveries=recovery.num_recoveries,
            recovery_lost_s=recovery.lost_s,
            goodput=recovery.goodput(self._checkpoints.seconds),
            excluded_nodes=list(recovery.excluded_nodes),
            tokens_per_s=sum(num_tokens) / seconds,
            trainer_idle=_share(waited_s - first_waited_s, seconds),
            engines_idle=1 - _share(busy_s, seconds * len(replicas)),
            stalled=self._stalled(requests, replicas),
        )

    def _num_groups(self, groups: dict[str, list[RequestState]]) -> dict[str, int]:
        # A group is waiting if none of its samples is at a replica or a tool.
        waiting = [
            all(one.replica is None and not one.waits_for_tools for one in of_group)
            for of_group in groups.values()
        ]
        training = self._position.step is not None and WAIT not in self._position.phases
        return {
            "waiting": sum(waiting),
            "generating": len(waiting) - sum(waiting),
            "finished": self._prompts.num_finished(),
            "training": self._config.trainer.prompts_per_step if training else 0,
        }

    def _stalled(self, requests: list[RequestState], replicas: list[tuple[str, int, float]]) -> str | None:
        limit_s = self._config.trainer.phase_time_limit_s
        if not replicas:
            return None
        silences = [silent_s for _, _, silent_s in replicas]
        number = silences.index(max(silences))
        _, in_flight, silent_s = replicas[number]

        # Warn well before the limit after which the replica is restarted. A replica without requests has
        # been silent for 0 s.
        if silent_s <= _STALLED_SHARE * limit_s:
            return None
        oldest = next((one for one in requests if one.replica == number), None)
        which = (
            ""
            if oldest is None
            else f"; the oldest is of prompt {oldest.uid or '-'}, submitted {oldest.seconds:.0f} s ago"
        )

        return (
            f"rollout replica {number} has finished none of its {in_flight} requests for "
            f"{silent_s:.0f} s{which}. After {limit_s:g} s (trainer.phase_time_limit_s) it is "
            "considered hung and restarted"
        )


def _by_group(requests: list[RequestState]) -> dict[str, list[RequestState]]:
    """Group the requests by the prompt's uid, oldest first."""
    groups: dict[str, list[RequestState]] = {}
    for request in requests:
        groups.setdefault(request.uid, []).append(request)
    return groups


def _shown(uid: str, requests: list[RequestState]) -> GroupStatus:
    oldest = requests[0]
    waits_for = "tools" if oldest.waits_for_tools else "a replica"
    where = f"waiting for {waits_for}" if oldest.replica is None else f"replica {oldest.replica}"
    return GroupStatus(uid=uid, missing=len(requests), where=where, seconds=oldest.seconds)


def _share(part_s: float, whole_s: float) -> float:
    """Return the share, clipped to [0, 1] because the clocks are not read at the same time."""
    return min(1.0, max(0.0, part_s / whole_s))
