"""Runs that train on pairs of answers: `kind: dpo` and `kind: reward_model`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megarl.cli.run.context import RunContext, run_context_of
from megarl.cli.run.fewer_replicas import run_on_what_is_left
from megarl.cli.run.resumption import is_complete, open_checkpoints, restore_models, say_ended, say_stopped
from megarl.cli.run.session import Session, open_monitor, open_session, report_filtered, write_summary
from megarl.config.schema import DPOConfig, PreferenceConfig
from megarl.data.chat_clock import saved_chat_time, set_chat_time
from megarl.data.images import refuse_image_columns
from megarl.data.loader import train_loader
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.tokenizer import load_tokenizer
from megarl.machine.wording import counted
from megarl.models.families import read_architecture
from megarl.roles.model_recovery import single_recovery
from megarl.roles.preferences import PairPolicy
from megarl.roles.saved_models import pair_models
from megarl.roles.start import start_preferences
from megarl.tracking.run_files import writing
from megarl.trainers.memory_resume import find_newest
from megarl.trainers.preferences import PreferenceTrainer
from megarl.trainers.recovery import step_recovery
from megarl.trainers.reference import FILES, fill_reference


def run(
    schema: type[PreferenceConfig], config_path: str, overrides: Sequence[str], verbose: bool = False
) -> int:
    """Train, and return 0 at the end or 143 after SIGTERM.

    Raises:
        ValueError: The configuration, model or data is invalid. Raised before any process is started.
    """

    def train(config: PreferenceConfig) -> int:
        with run_context_of(config, verbose) as context:
            return _run(config, context)

    return run_on_what_is_left(schema, config_path, overrides, train)


def _run(config: PreferenceConfig, context: RunContext) -> int:
    resume = find_newest(config)
    if is_complete(config, resume):
        return 0
    architecture = read_architecture(config.model.path, config.model.trust_remote_code)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    # A chat template that writes the date must use the date of the run's start.
    if resume is not None:
        set_chat_time(tokenizer, saved_chat_time(resume.state["data"]))
    data = config.data
    trainer = config.trainer
    if architecture.vision is not None:
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
        model = start_preferences(config, architecture, session.processes.device, session.processes.pools)
        saved = pair_models(config, model)
        # The reference is the initial policy, so its log-probs come before a checkpoint is loaded.
        if isinstance(config, DPOConfig):
            assert isinstance(model, PairPolicy)
            steps_left = trainer.total_steps - (0 if resume is None else resume.step)
            numbers = loader.upcoming(steps_left * trainer.pairs_per_step)
            _reference(config, session, model, "data.train_files", train, numbers)
            if held_out is not None:
                _reference(config, session, model, "data.val_files", held_out, range(len(held_out)))
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
        if checkpoints.stopped_after is not None:
            return say_stopped(session, checkpoints)
        # A run that SIGTERM has stopped returns above without exporting the model.
        if config.checkpoint.save_hf:
            folder = session.output_dir / "huggingface"
            with writing(session.output_dir):
                recovery.retry(lambda: model.save_hf(folder, config.model.path))
            session.console.print(f"the trained model is in {folder}")
        steps = checkpoints.last_step
        seconds = round(checkpoints.seconds, 1)
        # The summary is written last, because it marks the run as complete.
        told = say_ended(session, checkpoints, recovery)
        write_summary(
            session.output_dir,
            {"steps": steps, "seconds": seconds, "pairs": steps * trainer.pairs_per_step, **told},
        )

    return 0


def _reference(
    config: DPOConfig,
    session: Session,
    policy: PairPolicy,
    key: str,
    pairs: PairDataset,
    numbers: Sequence[int],
) -> None:
    """Compute the reference's log-probs of the pairs of `key`, or read them from the run's folder."""
    start_s = time.monotonic()
    with writing(session.output_dir):
        computed = fill_reference(config, policy, pairs, numbers, session.output_dir / FILES[key])
    if computed:
        seconds = time.monotonic() - start_s
        session.console.print(
            f"reference: log-probs of {counted(computed, 'pair')} of {key} in {seconds:.1f} s", soft_wrap=True
        )
