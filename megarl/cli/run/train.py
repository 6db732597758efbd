"""`megarl train`: runs reinforcement learning as configured, and writes the results.

Training on given answers is `kind: sft`, `dpo` or `reward_model`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.table import Table
from transformers import PreTrainedTokenizerBase

from megarl.agents.user_tools import load_agent
from megarl.cli.run.context import RunContext, run_context_of
from megarl.cli.run.resumption import (
    finish,
    is_complete,
    open_checkpoints,
    restore_models,
    run_with_fewer_replicas,
)
from megarl.cli.run.session import (
    Session,
    open_monitor,
    open_session,
    read_models,
    report_filtered,
)
from megarl.cli.tables.console import print_line
from megarl.cli.tables.summary import title_of
from megarl.config.roles import REWARD_MODEL, absent_teacher, absent_teacher_prompts
from megarl.config.schema import DPOConfig, PPOConfig, PreferenceConfig, RunConfig, SFTConfig
from megarl.data.chat_clock import chat_time
from megarl.data.conversations import check_chats
from megarl.data.curriculum import prompt_loader
from megarl.data.images import ImageProcessor, refuse_image_columns
from megarl.data.loader import BatchLoader, RowLoader, train_loader
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.doctor.texts import endless_turns
from megarl.machine.errors import ConfigError, counted
from megarl.models.architecture import Architecture
from megarl.models.layers import reads_images
from megarl.roles.model_recovery import ppo_recovery, single_recovery
from megarl.roles.preferences import PairModel, PairPolicy, PairReference
from megarl.roles.reward_model_worker import conversation_encoder
from megarl.roles.saved_models import saved_models
from megarl.roles.start import start_pair_reference, start_ppo, start_preferences, start_sft
from megarl.rollout.driver.rollout import TokenRules
from megarl.tracking.run_files import writing
from megarl.trainers.driver_states import find_newest
from megarl.trainers.evaluation import Evaluation
from megarl.trainers.ppo import PPOTrainer
from megarl.trainers.preferences import REFERENCE_FILES, PreferenceTrainer, compute_reference, read_reference
from megarl.trainers.recovery import NoRecovery, step_recovery
from megarl.trainers.resume import Resume
from megarl.trainers.sft import SFTTrainer

_log = logging.getLogger(__name__)
_TRAIN = "data.train_files"
_HELD_OUT = "data.val_files"


def run(config_path: str, overrides: Sequence[str], verbose: bool = False) -> int:
    """Train with reinforcement learning, or as the file's kind specifies.

    Returns:
        0 at the end, or 143 after SIGTERM.

    Raises:
        ValueError: The configuration, model or data is invalid. Raised before any process is started.
    """

    def train(config: RunConfig) -> int:
        with run_context_of(config, verbose) as context:
            resume = find_newest(config)
            if is_complete(config, resume):
                return 0
            if isinstance(config, SFTConfig | PreferenceConfig):
                return _train_on_answers(config, context, resume)
            assert isinstance(config, PPOConfig)
            with open_ppo(config, context, resume) as (session, ppo):
                with ppo.running():
                    ppo.fit()
                return _finish(config, session, ppo)

    return run_with_fewer_replicas(RunConfig, config_path, overrides, train)


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
    models, tokenizer = read_models(config, resume)
    if problem := endless_turns(config.model.path, tokenizer):
        _log.warning("model.path=%s: %s", config.model.path, problem)
    rules = token_rules(config, tokenizer)
    data_sets = _read_data(config, prompt_reader(config, tokenizer))
    train = data_sets[_TRAIN]
    loader = prompt_loader(train, config.data, config.trainer.prompts_per_step)

    if problem := absent_teacher(config, {train[index].data_source for index in range(len(train))}):
        raise ConfigError(_TRAIN, ["; ".join(problem)])
    column = config.data.columns.teacher_prompt
    if column is not None and not train.has_teacher_prompts:
        raise ConfigError(_TRAIN, ["; ".join(absent_teacher_prompts(column))])
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


def _read_data[Rows](config: RunConfig, read: Callable[[Sequence[str]], Rows]) -> dict[str, Rows]:
    """Read the training files, and the validation files if there are any, by their keys."""
    files = {_TRAIN: config.data.train_files, _HELD_OUT: config.data.val_files}
    return {key: read(paths) for key, paths in files.items() if paths or key == _TRAIN}


def prompt_reader(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase
) -> Callable[[Sequence[str]], PromptDataset]:
    """Return the function that reads files of prompts as the configuration requires."""
    return partial(
        PromptDataset,
        tokenizer=tokenizer,
        data=config.data,
        tools=load_agent(config.agent)[1] if config.agent.tools else None,
        images=ImageProcessor.of_folder(config.model.path, config.model.trust_remote_code),
        harness=config.agent.harness,
    )


def _evaluation(config: PPOConfig, data_sets: Mapping[str, PromptDataset]) -> Evaluation | None:
    held_out = data_sets.get(_HELD_OUT)
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


def _finish(config: PPOConfig, session: Session, ppo: PPOTrainer) -> int:
    """End a run with a table of its results, and return the exit code."""
    steps = ppo.checkpoints.last_step
    samples = steps * config.trainer.prompts_per_step * config.rollout.n
    scores = dict(ppo.monitor.validations)
    validation = {"before": scores.get(0), "after": scores.get(steps)}
    told = {"validation": validation, "samples": samples}
    if status := finish(session, config, ppo.roles.actor.save_hf, ppo.checkpoints, ppo.recovery, told):
        return status

    rows = {"steps": str(steps), "samples": f"{samples:,}", "seconds": f"{ppo.checkpoints.seconds:.0f}"}
    for when, score in validation.items():
        if score is not None:
            rows[f"validation score {when}"] = f"{score:.3f}"
    rows["metrics, timeline, samples"] = str(session.output_dir)
    rows["HTML report"] = f"megarl report {session.output_dir}"
    table = Table(title=f"{title_of(config)} run", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    session.console.print(table)
    return 0


# ---- training on given answers


def _train_on_answers(
    config: SFTConfig | PreferenceConfig, context: RunContext, resume: Resume | None
) -> int:
    """Train on conversations or pairs of answers, and return 0 at the end or 143 after SIGTERM."""
    architectures, tokenizer = read_models(config, resume)
    if reads_images(architectures["actor"]):
        refuse_image_columns([*config.data.train_files, *config.data.val_files])
    read: Callable[[Sequence[str]], SFTDataset | PairDataset] = (
        partial(SFTDataset, tokenizer=tokenizer, data=config.data)
        if isinstance(config, SFTConfig)
        else partial(PairDataset, encoder=pair_encoder(config, tokenizer))
    )
    data_sets = _read_data(config, read)
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
        told = {unit: checkpoints.last_step * config.prompts_per_step}
        return finish(session, config, model.save_hf, checkpoints, recovery, told)


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
    if isinstance(config, DPOConfig) and config.loss.kind.needs.reference:
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
