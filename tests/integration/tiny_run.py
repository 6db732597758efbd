"""Small runs on real Ray, and their inputs: a model folder with tokenizer, parquet files, and a reward
file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megarl.checkpoints.object_storage import ObjectStorage, Uploads
from megarl.cli.run.context import Termination
from megarl.cli.run.session import Session
from megarl.cli.run.train import build_ppo, read_inputs
from megarl.config.schema import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    Device,
    DPOConfig,
    DType,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    PreferenceConfig,
    ReferenceConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
    TrackingConfig,
    TrainerConfig,
)
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import ResourcePoolManager
from megarl.data.loader import BatchLoader
from megarl.data.pairs import PairDataset, pair_encoder
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.models.families import read_architecture
from megarl.plan.placement.plan import plan_placement
from megarl.roles.model_recovery import single_recovery
from megarl.roles.model_snapshots import model_snapshots
from megarl.roles.models import Actor
from megarl.roles.preferences import PairPolicy
from megarl.roles.saved_models import SavedModels, saved_models
from megarl.roles.start import PPORoles, start_preferences, start_sft
from megarl.tracking.loggers import Tracker
from megarl.tracking.progress import ProgressBar
from megarl.tracking.samples import read_samples, sample_files
from megarl.tracking.timeline import Timeline
from megarl.tracking.tracked_run import TrackedRun
from megarl.trainers.checkpoint import Checkpointer
from megarl.trainers.monitor import Monitor, Position
from megarl.trainers.preferences import PreferenceTrainer, compute_reference, read_reference
from megarl.trainers.recovery import NoRecovery, StepRecovery, step_recovery
from megarl.trainers.resume import Resume, checkpoint_folder, find_resume
from megarl.trainers.sft import SFTTrainer
from megarl.trainers.step_observers import StepProfiler, Stragglers
from tests.metric_names import unknown_metrics

SYMBOLS = ["<pad>", "<end>", "<user>", "<model>", *"0123456789+= "]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<user>' if message.role == 'user' else '<model>' }}{{ message.content "
    "}}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}<model>{% endif %}"
)
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return "
    "solution_str.count(ground_truth) / 4\n"
)


def save_policy(folder: Path, seed: int = 0, with_experts: bool = False, num_layers: int = 4) -> None:
    """Save a Qwen2, or a Qwen3-MoE of the same size. Two layers are enough for two stages, and take half the
    time."""
    vocabulary = Tokenizer(
        models.WordLevel({symbol: index for index, symbol in enumerate(SYMBOLS)}, unk_token="<pad>")
    )
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        pad_token="<pad>",
        unk_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<model>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": not with_experts,  # SGLang ties no such model
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "initializer_range": 0.1,  # so that distributions are far from uniform
    }

    if with_experts:
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "head_dim": 8,
        }
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).float().save_pretrained(folder)
    else:
        Qwen2ForCausalLM(Qwen2Config(**sizes)).float().save_pretrained(folder)


def save_inputs(folder: Path, num_layers: int = 4) -> None:
    """Write `policy/`, `train.parquet`, `validation.parquet`, `sft.parquet`, `sft_validation.parquet` and
    `reward.py` to `folder`."""
    save_policy(folder / "policy", num_layers=num_layers)
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+{number % 7}="}],
            "data_source": "count",
            "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
            "extra_info": {"index": number},
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:32]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[32:]), folder / "validation.parquet")
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{number}="},
                {"role": "assistant", "content": f"{number}+1" + "=" * (number % 3)},
            ]
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(chats[:32]), folder / "sft.parquet")
    pq.write_table(pa.Table.from_pylist(chats[32:]), folder / "sft_validation.parquet")
    (folder / "reward.py").write_text(REWARD)


def tiny_config(inputs: Path, output_dir: Path, **changes: Any) -> PPOConfig:
    """Configure a PPO run on the files that `save_inputs` wrote to `inputs`: four prompts with four samples
    each per step, and greedy validation.

    A change is a section, or a mapping of keys in it that differ: `tiny_config(inputs, folder,
    trainer={"total_steps": 2})`.
    """
    micro_batch = MicroBatchConfig(max_tokens=128)  # two micro-batches per step
    config = PPOConfig(
        model=ModelConfig(path=str(inputs / "policy"), dtype=DType.float32),
        data=DataConfig(
            train_files=[str(inputs / "train.parquet")],
            val_files=[str(inputs / "validation.parquet")],
            max_prompt_length=8,
            max_response_length=8,
        ),
        actor=ActorConfig(micro_batch=micro_batch, optim=OptimConfig(lr=5e-3)),
        critic=CriticConfig(micro_batch=micro_batch, optim=OptimConfig(lr=1e-2)),
        reference=ReferenceConfig(micro_batch=micro_batch),
        reward=RewardConfig(
            functions=[RewardFunctionConfig(path=str(inputs / "reward.py"))], num_processes=1
        ),
        rollout=RolloutConfig(n=4, validation=SamplingConfig(temperature=0)),
        checkpoint=CheckpointConfig(at_end=False),  # most tests do not look at it
        trainer=TrainerConfig(prompts_per_step=4, output_dir=str(output_dir)),
        tracking=TrackingConfig(loggers=["jsonl"]),
        device=Device.cpu,
    )
    return _changed(config, changes)


def tiny_sft_config(inputs: Path, output_dir: Path, **changes: Any) -> SFTConfig:
    """Like `tiny_config`, with seven samples per step, which more than one replica cannot split evenly."""
    config = SFTConfig(
        model=ModelConfig(path=str(inputs / "policy"), dtype=DType.float32),
        data=SFTDataConfig(
            train_files=[str(inputs / "sft.parquet")],
            val_files=[str(inputs / "sft_validation.parquet")],
            max_length=16,
        ),
        actor=ActorConfig(micro_batch=MicroBatchConfig(max_tokens=32), optim=OptimConfig(lr=1e-2)),
        checkpoint=CheckpointConfig(at_end=False),
        trainer=SFTTrainerConfig(samples_per_step=7, output_dir=str(output_dir)),
        tracking=TrackingConfig(loggers=["jsonl"]),
        device=Device.cpu,
    )
    return _changed(config, changes)


def _changed(config: Any, changes: Mapping[str, Any]) -> Any:
    sections = {
        name: replace(getattr(config, name), **change) if isinstance(change, Mapping) else change
        for name, change in changes.items()
    }
    return replace(config, **sections)


class Finished(NamedTuple):
    """Result of a run.

    Attributes:
        metrics: Lines of metrics.jsonl.
        policy: Hugging Face folder of the trained model.
    """

    output_dir: Path
    metrics: list[dict[str, Any]]

    @property
    def policy(self) -> Path:
        return self.output_dir / "huggingface"


class WatchedPhases(list[str]):
    """The phases of a position, which calls `look` with each phase that begins."""

    look: Callable[[str], None] = staticmethod(lambda phase: None)

    def append(self, phase: str) -> None:
        super().append(phase)
        self.look(phase)


class WatchedMonitor(Monitor):
    """Monitor that calls `look` with the step and the name of each phase of the driver, when it begins."""

    look: Callable[[int | None, str], None] = staticmethod(lambda step, phase: None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with super().phase(name):
            self.look(self.position.step, name)
            yield


def run_ppo(
    config: PPOConfig,
    look: Callable[[int, PPORoles], None] = lambda step, roles: None,
    look_at_phase: Callable[[int | None, str, PPORoles], None] = lambda step, phase, roles: None,
) -> Finished:
    """Train like `megarl train`, on the current Ray cluster.

    Args:
        look: Called with the roles before each step. Steps are counted from 1, also in a run that resumes
            from another's checkpoint (`checkpoint.resume`).
        look_at_phase: Called with the step, the phase and the roles when a phase of the driver begins.
    """
    resume = find_resume(config)
    phases = WatchedPhases()
    with placed_pools(config) as pools, _session(config, pools, Position(phases=phases)) as session:
        ppo = build_ppo(config, session, resume, *read_inputs(config, resume))

        def on_phase(phase: str) -> None:
            step = session.position.step
            if phase == "step" and step is not None:
                look(step if resume is None else step - resume.step, ppo.roles)
            look_at_phase(step, phase, ppo.roles)

        phases.look = on_phase
        with _ended(ppo.roles.groups), session.at_end:
            with ppo.running():
                ppo.fit()
            ppo.roles.actor.save_hf(session.output_dir / "huggingface", config.model.path)

    _check_samples(config, 1 if resume is None else resume.step + 1)
    return _finished(config)


def _check_samples(config: PPOConfig, first_step: int) -> None:
    """Check the stored samples: a failure in the background write is only a warning."""
    files = sample_files(Path(config.trainer.output_dir))
    assert first_step in files

    for path in files.values():
        rows = read_samples(path).rows
        num_samples = config.trainer.prompts_per_step * config.rollout.n
        # The episode of an agent program has any number of rows.
        assert len(rows) == num_samples or (config.agent.has_program and len(rows) > num_samples)
        assert rows["log_probs"].null_count == (
            len(rows) if config.algorithm.rollout_correction.bypass else 0
        )


def run_sft(
    config: SFTConfig,
    data: dict[str, Any] | None = None,
    look_at_phase: Callable[[int | None, str, Actor], None] = lambda step, phase, actor: None,
) -> Finished:
    """Train like `megarl train` with `kind: sft`.

    Args:
        data: The `state_dict` at which the loader begins.
        look_at_phase: Called with the step, the phase and the model when a phase of the driver begins.
    """
    path = config.model.path
    files = (config.data.train_files, config.data.val_files)
    tokenizer = load_tokenizer(path)
    train, held_out = (SFTDataset(each, tokenizer, config.data) for each in files)

    with placed_pools(config) as pools:
        actor = start_sft(config, read_architecture(path), Device.cpu, pools)
        loader = BatchLoader(
            train, config.trainer.samples_per_step, shuffle=config.data.shuffle, seed=config.data.seed
        )
        if data is not None:
            loader.load_state_dict(data)
        saved = saved_models(config, actor)
        with (
            _ended([actor.group]),
            closing(model_snapshots(config, saved, None)) as snapshots,
            _monitor(config, [actor.group]) as monitor,
        ):
            monitor.look = lambda step, phase: look_at_phase(step, phase, actor)
            recovery = step_recovery(
                config,
                lambda: single_recovery(saved, snapshots, config.recovery),
                monitor,
                0,
            )
            checkpoints = _checkpoints(config, saved, monitor, recovery=recovery)
            SFTTrainer(config, actor, loader, held_out, monitor, checkpoints, recovery).fit()
            actor.save_hf(Path(config.trainer.output_dir) / "huggingface", path)

    return _finished(config)


def run_pairs(config: PreferenceConfig) -> Finished:
    """Train on pairs of answers like `megarl train`."""
    path = config.model.path
    encoder = pair_encoder(config, load_tokenizer(path))
    train, held_out = (
        PairDataset(each, encoder) for each in (config.data.train_files, config.data.val_files)
    )
    output_dir = Path(config.trainer.output_dir)

    with placed_pools(config) as pools:
        model = start_preferences(config, read_architecture(path), Device.cpu, pools)
        loader = BatchLoader(
            train, config.trainer.pairs_per_step, shuffle=config.data.shuffle, seed=config.data.seed
        )
        with _ended([model.group]), _monitor(config, [model.group]) as monitor:
            if isinstance(config, DPOConfig):
                assert isinstance(model, PairPolicy)
                for pairs, name in ((train, "train"), (held_out, "validation")):
                    absent = read_reference(config, pairs, range(len(pairs)), output_dir / name)
                    compute_reference(config, model, pairs, absent, output_dir / name)
            saved = saved_models(config, model)
            PreferenceTrainer(
                config, model, loader, held_out, monitor, _checkpoints(config, saved, monitor)
            ).fit()
            model.save_hf(output_dir / "huggingface", path)

    return _finished(config)


@contextmanager
def placed_pools(config: RunConfig) -> Iterator[ResourcePoolManager]:
    pools = ResourcePoolManager.of_plan(plan_placement(config), use_gpu=False)

    try:
        pools.create_resource_pool()
        yield pools
    finally:
        pools.release()


@contextmanager
def _ended(groups: list[RoleGroup]) -> Iterator[None]:
    try:
        yield
    finally:
        for group in groups:
            group.shutdown()


@contextmanager
def _session(config: RunConfig, pools: ResourcePoolManager, position: Position) -> Iterator[Session]:
    """Open the session of a command on the current Ray cluster and these pools."""
    output_dir = Path(config.trainer.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint_folder(config).prepare()
    with ExitStack() as at_last, ExitStack() as at_end:
        yield Session(
            output_dir=output_dir,
            processes=(Device.cpu, pools),
            console=Console(),
            termination=Termination(print),
            position=position,
            at_end=at_end,
            at_last=at_last,
        )


def _monitor(config: RunConfig, groups: list[RoleGroup]) -> WatchedMonitor:
    output_dir = Path(config.trainer.output_dir)
    progress = ProgressBar("test", config.trainer.total_steps, Console())
    tracker = Tracker(config.tracking.loggers, TrackedRun(output_dir=output_dir))
    return WatchedMonitor(
        groups,
        tracker,
        Timeline(output_dir),
        progress,
        num_devices=plan_placement(config).num_devices,
        profile=StepProfiler(config.profile, groups, output_dir).step,
        watch=Stragglers(config.recovery.straggler_factor, groups).see,
    )


def _checkpoints(
    config: RunConfig,
    models: SavedModels,
    monitor: Monitor,
    resume: Resume | None = None,
    recovery: StepRecovery | NoRecovery | None = None,
) -> Checkpointer:
    folder = checkpoint_folder(config)
    folder.prepare()
    resumed = None if resume is None else resume.state
    url = config.checkpoint.upload
    uploads = None if url is None else Uploads(ObjectStorage(url), print)
    return Checkpointer(config, folder, models, monitor, resumed=resumed, recovery=recovery, uploads=uploads)


def _finished(config: RunConfig) -> Finished:
    output_dir = Path(config.trainer.output_dir)
    metrics = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    assert unknown_metrics(name for line in metrics for name in line) == []  # docs/tracking.md lists all
    return Finished(output_dir, metrics)
