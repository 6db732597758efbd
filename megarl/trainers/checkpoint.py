"""The life of a run's checkpoints: begun after a step, written while training goes on, committed when all of it is on the disk.

    models copy their state -> files are written -> models complete their folders -> trainer.json, config.yaml, checkpoint.json,
    all to the disk -> rename -> `latest` -> old ones are removed

The first arrow is all that a step waits for. Only after a step's metrics are in their files can its checkpoint become the latest:
so a run that goes on from it has every line up to that step, and cuts those that follow.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megarl import __version__
from megarl.checkpoints.role_folder import HUGGING_FACE_FOLDER
from megarl.checkpoints.run_folder import CheckpointFolder
from megarl.config.errors import CheckpointError, RunError
from megarl.config.load import dump_config
from megarl.config.schema import PPOConfig, SFTConfig
from megarl.machine.files import write_whole
from megarl.tracking.run_files import CONFIG_FILE

STATE_FILE = "trainer.json"
_LOOK_AGAIN_S = 0.05

State = dict[str, Any]


class Models(Protocol):
    """roles/saved_models.py."""

    @property
    def names(self) -> list[str]: ...

    def begin_save(self, folder: Path) -> None: ...

    def is_written(self) -> bool: ...

    def finish_save(self, folder: Path, step: int) -> None: ...

    def save_policy(self, folder: Path) -> None: ...


class RunFiles(Protocol):
    """What a save needs of the run's monitor (trainers/monitor.py)."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def flush(self) -> None: ...


@dataclass
class _Save:
    """One that is under way. sealing: of the driver's part, once the models' parts are complete."""

    step: int
    folder: Path
    started_s: float
    blocked_s: float = 0.0
    sealing: Future[int] | None = None


class Checkpointer:
    """Saves after the steps that the configuration names, after the last one, and after the one in which the run is told to end."""

    def __init__(
        self,
        config: PPOConfig | SFTConfig,
        folder: CheckpointFolder,
        models: Models,
        monitor: RunFiles,
        *,
        first_step: int = 1,
        seconds_before: float = 0.0,
        is_told_to_end: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = print,
    ) -> None:
        self._config, self._folder, self._models, self._monitor = config, folder, models, monitor
        self._first_step, self._is_told_to_end, self._say = first_step, is_told_to_end, say
        self._started_s = time.monotonic() - seconds_before
        self._under_way: _Save | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.stopped_after: int | None = None  # the step after which the run was told to end

    @property
    def is_at_start(self) -> bool:
        """No step was made before this process."""
        return self._first_step == 1

    @property
    def seconds(self) -> float:
        """That the run has taken, over all its processes, what they lost apart."""
        return time.monotonic() - self._started_s

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are still to be made. What was begun is committed between them, and awaited at the end."""
        for step in range(self._first_step, self._config.trainer.total_steps + 1):
            if self._is_told_to_end() and step == self._first_step:
                self.stopped_after = step - 1
            if self.stopped_after is not None:
                break
            yield step
            self._go_on(wait=not self._config.checkpoint.asynchronous)
        self._go_on(wait=True)

    def save(self, step: int, state: Callable[[], State]) -> None:
        """Called at the end of every step, within it; saves after some. `state`: of the trainer, as JSON can hold it.

        Raises CheckpointError, of this save or of the one before it; then nothing of it is left.
        """
        if self._is_told_to_end():
            self.stopped_after = step
        elif not self._is_due(step):
            return
        with self._monitor.phase("save_checkpoint"):
            self._go_on(wait=True)  # one at a time
            self._begin(step, state())

    def _is_due(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return every > 0 and (step % every == 0 or step == self._config.trainer.total_steps)

    def _begin(self, step: int, state: State) -> None:
        save = _Save(step, self._folder.path, time.monotonic())
        with self._or_nothing(save):
            save.folder = self._folder.begin(step)
            self._models.begin_save(save.folder)
            if self._config.checkpoint.save_hf:
                self._models.save_policy(save.folder / HUGGING_FACE_FOLDER)
            dump_config(self._config, save.folder / CONFIG_FILE)
            write_whole(save.folder / STATE_FILE, json.dumps({"step": step, "seconds": self.seconds, **state}, indent=2) + "\n")
            if not self._config.checkpoint.asynchronous:
                self._models.finish_save(save.folder, step)
        save.blocked_s = time.monotonic() - save.started_s
        self._under_way = save

    def _go_on(self, wait: bool) -> None:
        """Takes the save that is under way as far as it goes without waiting, or to its end."""
        save = self._under_way
        if save is None:
            return
        with self._or_nothing(save):
            if save.sealing is None:
                if not (wait or self._models.is_written()):
                    return
                if self._config.checkpoint.asynchronous:
                    self._models.finish_save(save.folder, save.step)
                self._monitor.flush()
                save.sealing = self._thread.submit(self._commit, save.step)
            if not (wait or save.sealing.done()):
                return
            nbytes = save.sealing.result()
        self._under_way = None
        background_s = time.monotonic() - save.started_s - save.blocked_s
        self._say(
            f"checkpoint of step {save.step}: {nbytes / 2**20:,.1f} MiB in {self._folder.path}, "
            f"training waited {save.blocked_s:.2f} s, written in {background_s:.2f} s more"
        )

    def _commit(self, step: int) -> int:
        """In a thread of its own: making sure that bytes are on a disk can take long."""
        nbytes = self._folder.seal(step, {"roles": self._models.names, "versions": versions()})
        self._folder.commit(step)
        self._folder.remove_old(self._config.checkpoint.keep)
        return nbytes

    @contextmanager
    def _or_nothing(self, save: _Save) -> Iterator[None]:
        """A save that fails leaves nothing half written; the checkpoint before it is still the latest."""
        try:
            yield
        except (RunError, OSError) as error:
            self._under_way = None
            self._folder.abandon(save.step)
            if isinstance(error, OSError):
                place = error.filename or self._folder.path
                raise CheckpointError(
                    f"{place}: the checkpoint of step {save.step} cannot be written ({error.strerror or error}); "
                    "make room, or give another checkpoint.dir"
                ) from error
            raise


def versions() -> Mapping[str, str]:
    """Of what wrote a checkpoint."""
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core", "transformers", "ray")}
    return {"megarl": __version__, **libraries, "python": platform.python_version()}
