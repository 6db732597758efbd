"""Training on given answers: `kind: sft`, `dpo` or `reward_model` of `megarl train`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.cli.run.context import RunContext
from megarl.cli.run.resumption import finish, is_complete, open_checkpoints, restore_models
from megarl.cli.run.session import Session, open_monitor, open_session, report_filtered
from megarl.cli.tables.console import print_line
from megarl.config.roles import model_roles
from megarl.config.schema import DPOConfig, PreferenceConfig, SFTConfig
from megarl.data.chat_clock import saved_chat_time, set_chat_time
from megarl.data.images import refuse_image_columns
from megarl.data.loader import BatchLoader, train_loader
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.machine.wording import counted
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.layers import reads_images
from megarl.roles.model_recovery import single_recovery
from megarl.roles.preferences import PairModel, PairPolicy, PairReference
from megarl.roles.saved_models import saved_models
from megarl.roles.start import start_pair_reference, start_preferences, start_sft
from megarl.tracking.run_files import writing
from megarl.trainers.memory_resume import find_newest
from megarl.trainers.preferences import REFERENCE_FILES, PreferenceTrainer, compute_reference, read_reference
from megarl.trainers.recovery import step_recovery
from megarl.trainers.sft import SFTTrainer

_TRAIN = "data.train_files"
_HELD_OUT = "data.val_files"


def train_on_answers(config: SFTConfig | PreferenceConfig, context: RunContext) -> int:
    """Train on conversations or pairs of answers, and return 0 at the end or 143 after SIGTERM."""
    resume = find_newest(config)
    if is_complete(config, resume):
        return 0
    architectures = {
        role.name: read_architecture(role.path, config.model.trust_remote_code)
        for role in model_roles(config)
    }
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    # A chat template that writes the date must use the date of the run's start.
    if resume is not None:
        set_chat_time(tokenizer, saved_chat_time(resume.state["data"]))
    if reads_images(architectures["actor"]):
        refuse_image_columns([*config.data.train_files, *config.data.val_files])
    data_sets = _read_data(config, tokenizer)
    loader = train_loader(data_sets[_TRAIN], config.data, config.prompts_per_step, config.batch_key)

    if resume is not None:
        loader.load_state_dict(resume.state["data"])  # refuses changed data before a process is started

    with open_session(context, resume) as session:
        report_filtered(session.console, data_sets)
        # What differs between the kinds: how the model starts, and the trainer's class.
        if isinstance(config, SFTConfig):
            model = start_sft(config, architectures["actor"], *session.processes)
            trainer = partial(SFTTrainer, config, model)
        else:
            step = 0 if resume is None else resume.step
            model = _start_on_pairs(config, session, architectures, data_sets, loader, step)
            trainer = partial(PreferenceTrainer, config, model)
        saved = saved_models(config, model)
        snapshots = restore_models(session, config, saved, resume)
        with open_monitor(session, config, [model.group], resume) as monitor:
            recovery = step_recovery(
                config,
                lambda: single_recovery(saved, snapshots, config.recovery),
                monitor,
                0 if resume is None else resume.step,
            )
            checkpoints = open_checkpoints(session, config, saved, monitor, resume, recovery)
            supervised = trainer(loader, data_sets.get(_HELD_OUT), monitor, checkpoints, recovery)
            if resume is not None:
                supervised.load_state_dict(resume.state)
            supervised.fit()
        unit = "samples" if isinstance(config, SFTConfig) else "pairs"
        return finish(session, config, model.save_hf, checkpoints, recovery, {unit: config.prompts_per_step})


def _read_data(
    config: SFTConfig | PreferenceConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, SFTDataset | PairDataset]:
    """Read the training files, and the validation files if there are any, by their keys."""
    read = (
        partial(SFTDataset, tokenizer=tokenizer, data=config.data)
        if isinstance(config, SFTConfig)
        else partial(PairDataset, encoder=pair_encoder(config, tokenizer))
    )
    files = {_TRAIN: config.data.train_files, _HELD_OUT: config.data.val_files}
    return {key: read(paths) for key, paths in files.items() if paths or key == _TRAIN}


def _start_on_pairs(
    config: PreferenceConfig,
    session: Session,
    architectures: Mapping[str, Architecture],
    data_sets: Mapping[str, SFTDataset | PairDataset],
    loader: BatchLoader,
    step: int,
) -> PairModel:
    """Start the model of a run on pairs, and compute the log-probs of its reference if it has one.

    Args:
        step: The last step that the run has made.
    """
    reference = None
    if isinstance(config, DPOConfig):
        numbers = loader.upcoming((config.trainer.total_steps - step) * config.prompts_per_step)
        reference = _Reference(config, session, data_sets, numbers)
        # A reference with a model of its own leaves the devices before the policy starts.
        if "reference" in architectures and reference.is_incomplete:
            scorer = start_pair_reference(config, architectures["reference"], *session.processes)
            try:
                reference.compute(scorer)
            finally:
                scorer.shutdown()

    model = start_preferences(config, architectures["actor"], *session.processes)
    # Otherwise it is the initial policy, so its log-probs come before a checkpoint is loaded.
    if reference is not None and reference.is_incomplete:
        assert isinstance(model, PairPolicy)
        reference.compute(model)

    return model


class _Reference:
    """The reference's log-probs of the pairs that a run will use. Some may be in the run's folder."""

    def __init__(
        self,
        config: DPOConfig,
        session: Session,
        data_sets: Mapping[str, SFTDataset | PairDataset],
        numbers: Sequence[int],
    ) -> None:
        """Read the stored log-probs.

        Args:
            numbers: The training pairs that the run will use. It uses all held-out pairs.
        """
        self._config = config
        self._session = session
        self._absent: dict[str, tuple[PairDataset, list[int]]] = {}

        for key, pairs in data_sets.items():
            assert isinstance(pairs, PairDataset)
            needed = numbers if key == _TRAIN else range(len(pairs))
            self._absent[key] = (pairs, read_reference(config, pairs, needed, self._file(key)))

    def _file(self, key: str) -> Path:
        return self._session.output_dir / REFERENCE_FILES[key]

    @property
    def is_incomplete(self) -> bool:
        """Whether pairs are still to be scored."""
        return any(numbers for _, numbers in self._absent.values())

    def compute(self, scorer: PairPolicy | PairReference) -> None:
        """Score the other pairs, and write the log-probs to the run's folder."""
        for key, (pairs, numbers) in self._absent.items():
            if not numbers:
                continue
            start_s = time.monotonic()
            with writing(self._session.output_dir):
                compute_reference(self._config, scorer, pairs, numbers, self._file(key))
            seconds = time.monotonic() - start_s
            print_line(
                self._session.console,
                f"reference: log-probs of {counted(len(numbers), 'pair')} of {key} in {seconds:.1f} s",
            )
        self._absent = {}
