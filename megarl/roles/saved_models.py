"""Trained models of a run for its checkpoints: all ranks of all roles save, or load, concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from megarl.checkpoints.role_folder import HUGGING_FACE_FOLDER, Description, Layout, write_manifest
from megarl.config.roles import model_roles
from megarl.config.schema import (
    DType,
    ParallelConfig,
    RunConfig,
    RunKind,
)
from megarl.controller.errors import WorkerError
from megarl.controller.futures import WorkerFuture, gather
from megarl.controller.group import RoleGroup
from megarl.controller.messages import qualified_name
from megarl.machine.errors import CheckpointError
from megarl.models.architecture import LoRA
from megarl.models.families import REWARD_CLASS, read_architecture
from megarl.models.tensor_table import Head
from megarl.roles.megatron_worker import MegatronWorker
from megarl.roles.models import ABSENT, Absent, Actor, Critic
from megarl.roles.preferences import PairModel
from megarl.weights.hf_folder import copy_companions
from megarl.weights.peft_folder import write_config

T = TypeVar("T")
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A trained model.

    Attributes:
        name: Role, and the folder of its part of the checkpoint.
        source: Hugging Face folder that defines its architecture.
        lora: Its adapters, which are then all that is saved.
        value_class: The class of its value head, see copy_companions.
    """

    name: str
    group: RoleGroup
    head: Head
    dtype: DType
    parallel: ParallelConfig
    source: Path
    lora: LoRA | None = None
    value_class: str | None = None


class SavedModels:
    """Checkpoint operations over all models; roles/megatron_worker.py has them for one rank.

    Errors of a rank about files that it cannot write or read are raised as CheckpointError, in one line.
    """

    def __init__(
        self, models: Sequence[SavedModel], save_policy: Callable[[Path], None], limit_s: float
    ) -> None:
        """Create the object.

        Args:
            save_policy: Writes the policy as a whole Hugging Face folder.
            limit_s: How long ranks may write; after that, their call and its limit tell which of them hang.
        """
        self.models = tuple(models)
        self._save_policy = save_policy
        self._limit_s = limit_s

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.models]

    def begin_save(self, folder: Path) -> None:
        """Start a save.

        Returns when the current state has been copied or written, so that training may change it.
        """
        self._on_all(
            lambda model: model.group.call(MegatronWorker.begin_save, str(folder.absolute() / model.name))
        )

    def is_written(self) -> bool:
        """Return whether all files are written. True if a rank has failed; `finish_save` raises its error."""
        return all(
            written
            for ranks in self._on_all(lambda model: model.group.call(MegatronWorker.save_is_written))
            for written in ranks
        )

    def finish_save(self, folder: Path, step: int) -> None:
        """Wait for pending writes, and complete each model's folder."""
        # No rank waits in a call: if one is lost meanwhile, the others can return to a snapshot at once.
        end_s = time.monotonic() + self._limit_s
        while not self.is_written() and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

        # A manifest is written only after all ranks of the model have returned their checksums.
        for model, ranks in zip(
            self.models, self._on_all(lambda model: model.group.call(MegatronWorker.finish_save)), strict=True
        ):
            _complete(model, folder / model.name, step, ranks)

    def save_policy(self, folder: Path) -> None:
        """Save the current policy as a whole Hugging Face folder."""
        with _in_their_words():
            self._save_policy(folder)

    def load(self, folder: Path) -> None:
        """Load every model's state from the checkpoint."""
        self._on_all(
            lambda model: model.group.call(
                MegatronWorker.load_checkpoint, str(folder.absolute() / model.name)
            )
        )

    def _on_all(self, ask: Callable[[SavedModel], WorkerFuture[list[T]]]) -> list[list[T]]:
        """Call all ranks of all models concurrently. Returns the results by model and rank."""
        with _in_their_words():
            return gather(*map(ask, self.models))


@contextmanager
def _in_their_words() -> Generator[None]:
    """Re-raise a rank's CheckpointError as the driver's."""
    try:
        yield
    except WorkerError as error:
        if error.error_type == qualified_name(CheckpointError):
            raise CheckpointError(
                error.summary.removeprefix(f"{error.error_type}: "), hint=error.hint
            ) from error
        raise


def _complete(model: SavedModel, folder: Path, step: int, ranks: Sequence[Mapping[str, str]]) -> None:
    """Write the model's name, configuration and tokenizer, and finally the manifest.

    The manifest contains the ranks' checksums.
    """
    # Add configuration and tokenizer, so that the folder can be read without the original model.
    companions = folder / HUGGING_FACE_FOLDER
    companions.mkdir(exist_ok=True)
    dtype = getattr(torch, model.dtype.value)
    copy_companions(model.source, companions, dtype, model.head, model.value_class)
    if model.lora is not None:
        adapted = replace(read_architecture(str(model.source), trust_remote_code=True), lora=model.lora)
        write_config(companions, adapted, str(model.source), model.head, model.value_class)
    layout = Layout(
        tensor_parallel_size=model.parallel.tensor_parallel_size,
        pipeline_parallel_size=model.parallel.pipeline_parallel_size,
        virtual_pipeline_parallel_size=model.parallel.virtual_pipeline_parallel_size,
        context_parallel_size=model.parallel.context_parallel_size,
        data_parallel_size=model.parallel.data_parallel_size,
        expert_parallel_size=model.parallel.expert_parallel_size,
        expert_tensor_parallel_size=model.parallel.expert_tensor_parallel_size,
    )

    # The manifest comes last: a folder without one is not complete.
    description = Description(head=model.head, dtype=model.dtype.value, layout=layout, step=step)
    write_manifest(folder, description, {name: checksum for rank in ranks for name, checksum in rank.items()})


def saved_models(
    config: RunConfig, actor: Actor | PairModel, critic: Critic | Absent = ABSENT
) -> SavedModels:
    """Return the models of a run that train."""
    groups = {name: handle.group for name, handle in (("actor", actor), ("critic", critic)) if handle}
    # Frozen models are not saved: a resumed run loads them from their own folders.
    models = [
        SavedModel(
            name=role.name,
            group=groups[role.name],
            head="value" if role.with_value_head else "lm",
            dtype=config.model.dtype,
            parallel=role.parallel,
            source=Path(role.path),
            lora=role.lora,
            value_class=REWARD_CLASS if config.kind is RunKind.reward_model else None,
        )
        for role in model_roles(config)
        if role.optim is not None
    ]
    return SavedModels(
        models,
        lambda folder: actor.save_hf(folder, config.model.path),
        config.trainer.phase_time_limit_s,
    )
