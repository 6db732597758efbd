"""`megarl train`: runs reinforcement learning as configured, and writes the results."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from megarl.agents.user_tools import load_agent
from megarl.cli.run.context import RunContext, run_context_of
from megarl.cli.run.fewer_replicas import run_with_fewer_replicas
from megarl.cli.run.processes import refuse_launched_ranks
from megarl.cli.run.resumption import is_complete, open_checkpoints, print_end, print_stopped, restore_models
from megarl.cli.run.session import Session, open_monitor, open_session, report_filtered, write_summary
from megarl.cli.run.supervised import train_on_answers
from megarl.cli.tables.summary import title_of
from megarl.config.roles import REWARD_MODEL, absent_teacher, model_roles
from megarl.config.schema import PPOConfig, PreferenceConfig, RunConfig, SFTConfig
from megarl.data.chat_clock import chat_time, saved_chat_time, set_chat_time
from megarl.data.conversations import check_chats
from megarl.data.curriculum import prompt_loader
from megarl.data.images import ImageProcessor
from megarl.data.loader import RowLoader
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.doctor.inputs import endless_turns
from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.roles.model_recovery import ppo_recovery
from megarl.roles.reward_model_worker import conversation_encoder
from megarl.roles.saved_models import saved_models
from megarl.roles.start import start_ppo
from megarl.rollout.driver.rollout import TokenRules
from megarl.tracking.run_files import writing
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.memory_resume import find_newest
from megarl.trainers.ppo import PPOTrainer
from megarl.trainers.recovery import NoRecovery, step_recovery
from megarl.trainers.resume import Resume

_log = logging.getLogger(__name__)


def run(config_path: str, overrides: Sequence[str], verbose: bool = False) -> int:
    """Train with reinforcement learning, or as the file's kind specifies.

    Returns:
        0 at the end, or 143 after SIGTERM.

    Raises:
        ValueError: The configuration, model or data is invalid. Raised before any process is started.
    """
    refuse_launched_ranks("train")

    def train(config: RunConfig) -> int:
        with run_context_of(config, verbose) as context:
            if isinstance(config, SFTConfig | PreferenceConfig):
                return train_on_answers(config, context)
            assert isinstance(config, PPOConfig)
            return _run(config, context)

    return run_with_fewer_replicas(RunConfig, config_path, overrides, train)


def _run(config: PPOConfig, context: RunContext) -> int:
    resume = find_newest(config)
    if is_complete(config, resume):
        return 0
    with open_ppo(config, context, resume) as (session, ppo):
        with ppo.running():
            ppo.fit()
        if ppo.checkpoints.stopped_after is not None:
            return print_stopped(session, ppo.checkpoints)
        _finish(config, session, ppo)

    return 0


@contextmanager
def open_ppo(
    config: PPOConfig, context: RunContext, resume: Resume | None, *, own_loop: bool = False
) -> Generator[tuple[Session, PPOTrainer]]:
    """Start the roles and the trainer of a run in the state of `resume`. They end with the block.

    Args:
        own_loop: See PPOTrainer.
    """
    inputs = read_inputs(config, resume)  # their errors come before a process is started
    with open_session(context, resume) as session:
        yield session, build_ppo(config, session, resume, *inputs, own_loop=own_loop)


def read_inputs(
    config: PPOConfig, resume: Resume | None
) -> tuple[dict[str, Architecture], TokenRules, dict[str, PromptDataset], RowLoader]:
    """Read the architectures of a run by role, its tokenizer's rules, its data by key, and make its loader.

    Raises:
        ValueError: They cannot be used together, or the data differs from that of the resumed run.
    """
    models = {
        role.name: read_architecture(role.path, config.model.trust_remote_code)
        for role in model_roles(config)
    }
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    if resume is not None:
        set_chat_time(tokenizer, saved_chat_time(resume.state["data"]))
    if problem := endless_turns(config.model.path, tokenizer):
        _log.warning("model.path=%s: %s", config.model.path, problem)
    rules = token_rules(config, tokenizer)
    data_sets = _read_data(config, tokenizer)
    train = data_sets["data.train_files"]
    loader = prompt_loader(train, config.data, config.trainer.prompts_per_step)

    sources = {train[index].data_source for index in range(len(train))}
    if problem := absent_teacher(config, sources):
        raise ConfigError("data.train_files", ["; ".join(problem)])
    if REWARD_MODEL in models:
        check_reward_chats(config, models[REWARD_MODEL], data_sets, rules.chat_time)
    if resume is not None:
        loader.load_state_dict(resume.state["data"])
    return models, rules, data_sets, loader


def build_ppo(
    config: PPOConfig,
    session: Session,
    resume: Resume | None,
    models: Mapping[str, Architecture],
    rules: TokenRules,
    data_sets: Mapping[str, PromptDataset],
    loader: RowLoader,
    *,
    own_loop: bool = False,
) -> PPOTrainer:
    """Start the roles of a run on the pools of the session, and build its trainer in the state of `resume`.

    Args:
        models: This and the next three are the results of `read_inputs`.
        own_loop: See PPOTrainer.
    """
    report_filtered(session.console, data_sets)
    # Start the roles, then restore models, run files and trainer from the checkpoint.
    roles = start_ppo(config, models, rules, *session.processes)
    saved = saved_models(config, roles.actor, roles.critic)
    snapshots = restore_models(session, config, saved, resume)
    monitor = open_monitor(session, config, roles.groups, resume)
    # A user's own loop cannot be repeated.
    recovery = (
        NoRecovery()
        if own_loop
        else step_recovery(
            config,
            lambda: ppo_recovery(roles, saved, snapshots, config.recovery),
            monitor,
            0 if resume is None else resume.step,
        )
    )
    checkpoints = open_checkpoints(session, config, saved, monitor, resume, recovery)
    evaluation = _evaluation(config, data_sets)
    ppo = PPOTrainer(
        config, roles, loader, evaluation, monitor, checkpoints, own_loop=own_loop, recovery=recovery
    )
    if resume is not None:
        ppo.load_state_dict(resume.state, resume.checkpoint)
    return ppo


def _read_data(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, PromptDataset]:
    """Read the training files, and the validation files if there are any, by their keys."""
    data = config.data
    tools = load_agent(config.agent)[1] if config.agent.tools else None
    images = ImageProcessor.of_folder(config.model.path, config.model.trust_remote_code)
    files = {"data.train_files": data.train_files, "data.val_files": data.val_files}
    return {
        key: PromptDataset(paths, tokenizer, data, tools, images, config.agent.harness)
        for key, paths in files.items()
        if paths or key == "data.train_files"
    }


def _evaluation(config: PPOConfig, data_sets: Mapping[str, PromptDataset]) -> Evaluation | None:
    held_out = data_sets.get("data.val_files")
    if held_out is None:
        return None
    return Evaluation(
        held_out,
        config.rollout.validation,
        config.trainer.prompts_per_step,
        config.tracking.log_generations,
        pass_score=config.reward.pass_score,
    )


def token_rules(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> TokenRules:
    return TokenRules(
        pad_token_id=tokenizer.pad_token_id,
        stop_token_ids=(tokenizer.eos_token_id,),
        max_response_length=config.data.max_response_length,
        chat_time=chat_time(tokenizer),
    )


def check_reward_chats(
    config: PPOConfig,
    architecture: Architecture,
    data_sets: Mapping[str, PromptDataset],
    chat_time: datetime | None,
) -> None:
    """Raise ConversationError for prompts that the reward model could not read."""
    encoder = conversation_encoder(
        config.reward.model, architecture, chat_time, trust_remote_code=config.model.trust_remote_code
    )
    for data_set in data_sets.values():
        check_chats(encoder, (data_set[index] for index in range(len(data_set))))


def _finish(config: PPOConfig, session: Session, ppo: PPOTrainer) -> None:
    steps = ppo.checkpoints.last_step
    seconds = ppo.checkpoints.seconds
    folder = session.output_dir / "huggingface"

    if config.checkpoint.save_hf:
        with writing(session.output_dir):
            ppo.recovery.retry(lambda: ppo.roles.actor.save_hf(folder, config.model.path))

    samples = steps * config.trainer.prompts_per_step * config.rollout.n
    scores = dict(ppo.monitor.validations)
    summary = {
        "validation": {"before": scores.get(0), "after": scores.get(steps)},
        "steps": steps,
        "seconds": round(seconds, 1),
        "samples": samples,
        **print_end(session, ppo.checkpoints, ppo.recovery),
    }
    # The summary marks the run as complete, so it is written after the export of the policy.
    write_summary(session.output_dir, summary)
    table = Table(title=f"{title_of(config)} run", show_header=False)
    table.add_row("steps", str(steps))
    table.add_row("samples", f"{samples:,}")
    table.add_row("seconds", f"{seconds:.0f}")

    for name, step in (("before", 0), ("after", steps)):
        if step in scores:
            table.add_row(f"validation score {name}", f"{scores[step]:.3f}")

    if config.checkpoint.save_hf:
        table.add_row("policy (Hugging Face)", str(folder))
    table.add_row("metrics, timeline, samples", str(session.output_dir))
    table.add_row("HTML report", f"megarl report {session.output_dir}")
    session.console.print(table)
