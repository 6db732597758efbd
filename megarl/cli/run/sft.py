"""`megarl sft`: supervised fine-tuning from a configuration, with the engine of PPO."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.cli.run.context import RunContext, run_context_of
from megarl.cli.run.fewer_replicas import run_with_fewer_replicas
from megarl.cli.run.processes import refuse_launched_ranks
from megarl.cli.run.resumption import finish, is_complete, open_checkpoints, restore_models
from megarl.cli.run.session import open_monitor, open_session, report_filtered
from megarl.config.schema import SFTConfig
from megarl.data.chat_clock import saved_chat_time, set_chat_time
from megarl.data.images import refuse_image_columns
from megarl.data.loader import train_loader
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models.families import read_architecture
from megarl.models.layers import reads_images
from megarl.roles.model_recovery import single_recovery
from megarl.roles.saved_models import sft_models
from megarl.roles.start import start_sft
from megarl.trainers.memory_resume import find_newest
from megarl.trainers.recovery import step_recovery
from megarl.trainers.supervised import SFTTrainer


def run(config_path: str, overrides: Sequence[str], verbose: bool = False) -> int:
    """Train, and return 0 at the end or 143 after SIGTERM.

    Raises:
        ValueError: The configuration, model or data is invalid. Raised before any process is started.
    """
    refuse_launched_ranks("sft")

    def train(config: SFTConfig) -> int:
        with run_context_of(config, verbose) as context:
            return train_on_chats(config, context)

    return run_with_fewer_replicas(SFTConfig, config_path, overrides, train)


def train_on_chats(config: SFTConfig, context: RunContext) -> int:
    """Train on conversations, and return 0 at the end or 143 after SIGTERM."""
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
    if reads_images(architecture):
        refuse_image_columns([*data.train_files, *data.val_files])
    train = SFTDataset(data.train_files, tokenizer, data)
    loader = train_loader(train, data, trainer.samples_per_step, "trainer.samples_per_step")
    held_out = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None

    if resume is not None:
        loader.load_state_dict(resume.state["data"])  # refuses changed data before a process is started

    with open_session(context, resume) as session:
        report_filtered(
            session.console, {"data.train_files": train} | ({"data.val_files": held_out} if held_out else {})
        )
        actor = start_sft(config, architecture, session.processes.device, session.processes.pools)
        saved = sft_models(config, actor)
        snapshots = restore_models(session, config, saved, resume)
        with open_monitor(session, config, [actor.group], resume) as monitor:
            recovery = step_recovery(
                config,
                lambda: single_recovery(saved, snapshots, config.recovery),
                monitor,
                0 if resume is None else resume.step,
            )
            checkpoints = open_checkpoints(session, config, saved, monitor, resume, recovery)
            sft = SFTTrainer(config, actor, loader, held_out, monitor, checkpoints, recovery)
            if resume is not None:
                sft.load_state_dict(resume.state)
            sft.fit()
        return finish(
            session, config, actor.save_hf, checkpoints, recovery, {"samples": trainer.samples_per_step}
        )
