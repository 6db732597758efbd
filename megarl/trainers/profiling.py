"""Profiler traces of chosen steps, by role and rank."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from megarl.config.schema import ProfileConfig
from megarl.controller.errors import PhaseTimeoutError, WorkerError
from megarl.controller.futures import gather
from megarl.controller.group import RoleGroup
from megarl.roles.megatron_worker import MegatronWorker

PROFILE_FOLDER = "profile"  # in `trainer.output_dir`
_log = logging.getLogger(__name__)


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
