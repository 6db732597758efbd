"""Runs that train on pairs of answers: `kind: dpo` and `kind: reward_model`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from megarl.cli.run.context import RunContext
from megarl.cli.run.resumption import finish, is_complete, open_checkpoints, restore_models
from megarl.cli.run.session import Session, open_monitor, open_session, report_filtered
from megarl.config.roles import model_roles
from megarl.config.schema import DPOConfig, PreferenceConfig
from megarl.data.chat_clock import saved_chat_time, set_chat_time
from megarl.data.images import refuse_image_columns
from megarl.data.loader import train_loader
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.tokenizer import load_tokenizer
from megarl.machine.wording import counted
from megarl.models.families import read_architecture
from megarl.models.layers import reads_images
from megarl.roles.model_recovery import single_recovery
from megarl.roles.preferences import PairPolicy, PairReference
from megarl.roles.saved_models import pair_models
from megarl.roles.start import start_pair_reference, start_preferences
from megarl.tracking.run_files import writing
from megarl.trainers.memory_resume import find_newest
from megarl.trainers.recovery import step_recovery
from megarl.trainers.reference import FILES, compute_reference, read_reference
from megarl.trainers.supervised import PreferenceTrainer


def train_on_pairs(config: PreferenceConfig, context: RunContext) -> int:
    """Train on pairs of answers, and return 0 at the end or 143 after SIGTERM."""
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
    data = config.data
    trainer = config.trainer
    if reads_images(architectures["actor"]):
        refuse_image_columns([*data.train_files, *data.val_files])
    encoder = pair_encoder(config, tokenizer)
    train = PairDataset(data.train_files, encoder)
    loader = train_loader(train, data, trainer.pairs_per_step, "trainer.pairs_per_step")
    held_out = PairDataset(data.val_files, encoder) if data.val_files else None

    if resume is not None:
        loader.load_state_dict(resume.state["data"])  # refuses changed data before a process is started

    with open_session(context, resume) as session:
        report_filtered(
            session.console, {"data.train_files": train} | ({"data.val_files": held_out} if held_out else {})
        )
        reference = None
        place = session.processes.device, session.processes.pools
        if isinstance(config, DPOConfig):
            steps_left = trainer.total_steps - (0 if resume is None else resume.step)
            numbers = loader.upcoming(steps_left * trainer.pairs_per_step)
            reference = _Reference(config, session, train, numbers, held_out)
            # A reference with a model of its own leaves the devices before the policy starts.
            if "reference" in architectures and reference.is_incomplete:
                scorer = start_pair_reference(config, architectures["reference"], *place)
                try:
                    reference.compute(scorer)
                finally:
                    scorer.shutdown()
        model = start_preferences(config, architectures["actor"], *place)
        saved = pair_models(config, model)
        # Otherwise it is the initial policy, so its log-probs come before a checkpoint is loaded.
        if reference is not None and reference.is_incomplete:
            assert isinstance(model, PairPolicy)
            reference.compute(model)
        snapshots = restore_models(session, config, saved, resume)
        with open_monitor(session, config, [model.group], resume) as monitor:
            recovery = step_recovery(
                config,
                lambda: single_recovery(saved, snapshots, config.recovery),
                monitor,
                0 if resume is None else resume.step,
            )
            checkpoints = open_checkpoints(session, config, saved, monitor, resume, recovery)
            preferences = PreferenceTrainer(config, model, loader, held_out, monitor, checkpoints, recovery)
            if resume is not None:
                preferences.load_state_dict(resume.state)
            preferences.fit()
        return finish(
            session, config, model.save_hf, checkpoints, recovery, {"pairs": trainer.pairs_per_step}
        )


class _Reference:
    """The reference's log-probs of the pairs that a run will use. Some may be in the run's folder."""

    def __init__(
        self,
        config: DPOConfig,
        session: Session,
        train: PairDataset,
        numbers: Sequence[int],
        held_out: PairDataset | None,
    ) -> None:
        self._config = config
        self._session = session
        needed = {"data.train_files": (train, numbers)}
        if held_out is not None:
            needed["data.val_files"] = (held_out, range(len(held_out)))
        self._absent = {
            key: (pairs, read_reference(config, pairs, of_key, self._file(key)))
            for key, (pairs, of_key) in needed.items()
        }

    def _file(self, key: str) -> Path:
        return self._session.output_dir / FILES[key]

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
            self._session.console.print(
                f"reference: log-probs of {counted(len(numbers), 'pair')} of {key} in {seconds:.1f} s",
                soft_wrap=True,
            )
        self._absent = {}
