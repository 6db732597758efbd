"""`megarl check CONFIG`: finds everything that is wrong before anything starts, and prints what the run would do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from megarl.cli.placement_tables import print_absent, print_placement
from megarl.config.architecture import Architecture
from megarl.config.derive import (
    RoleArithmetic,
    RunArithmetic,
    checkpoint_bytes,
    checkpoint_path,
    derive,
    max_conversation_tokens,
    most_checkpoints,
    optimizer_steps,
)
from megarl.config.layers import describe_layers
from megarl.config.load import is_on_cuda, plain_values
from megarl.config.roles import REWARD_MODEL, ModelRole, model_roles
from megarl.config.schema import DType, OverlongConversation, PPOConfig, RolloutEngineKind, SFTConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checked_config import load_checked_anywhere
from megarl.machine.files import existing_folder
from megarl.placement.plan import PlacementPlan, plan_placement

BFLOAT16_ON_A_CPU = "most processors compute bfloat16 many times as slowly as float32: on a CPU use model.dtype=float32, or leave it out"
_FILE_WIDTH = 140  # columns of the tables where nobody's window limits them: a path must not be folded in a log


def run(config_path: str, overrides: Sequence[str], schema: type[PPOConfig] | type[SFTConfig] = PPOConfig, fast: bool = False) -> int:
    """Prints models, arithmetic and placement of a good configuration; 0. Raises ConfigError for any other. fast: of the files that a run
    reads only `config.json`s are looked into."""
    if fast:
        (config, absent), warnings = load_checked_anywhere(schema, config_path, overrides), list[str]()
    else:
        from megarl.doctor.examined_config import load_examined_anywhere  # which imports torch

        config, absent, warnings = load_examined_anywhere(schema, config_path, overrides)
    console = Console()
    print_run(config, console)
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False, markup=False)
    plan = plan_placement(config)
    print_absent(absent, console)
    good = "good, but for what is not here" if absent else "good"
    console.print(f"{config_path}: {good} ({plan.num_processes} processes, {plan.num_devices} devices)", highlight=False)
    return 0


def print_run(config: PPOConfig | SFTConfig, console: Console) -> None:
    """What a run will do, as tables; also what a run shows when it starts."""
    architectures, _ = read_architectures(config)
    arithmetic = derive(config, architectures)
    console.print(_models(model_roles(config), architectures, arithmetic))
    console.print(f"layers: {describe_layers(config)}", highlight=False)
    console.print(_arithmetic(arithmetic))
    console.print(_per_role(arithmetic))
    plan = plan_placement(config)
    if isinstance(config, PPOConfig):
        console.print(_rollout(config, plan))
        console.print(_reward(config, architectures))
    print_placement(config, plan, architectures, console)
    console.print(_checkpoints(config, architectures))
    for warning in (
        *_of_a_full_disk(config, architectures),
        *_of_a_long_warmup(config),
        *_of_bfloat16(config),
        *_of_another_engine(config),
    ):
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, highlight=False, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _models(roles: Sequence[ModelRole], architectures: Mapping[str, Architecture], arithmetic: RunArithmetic) -> Table:
    table = _table("Models", "role", "model", "parameters", "layers", "hidden", "heads", "kv", "TP x PP x DP", "state per rank")
    for role, row in zip(roles, arithmetic.roles, strict=True):
        architecture, parallel = architectures[role.name], role.parallel
        pipeline = str(parallel.pipeline_parallel_size)
        if parallel.virtual_pipeline_parallel_size is not None:
            pipeline += f" ({parallel.virtual_pipeline_parallel_size} virtual)"
        table.add_row(
            role.name,
            f"{role.path} ({architecture.model_type})",
            f"{row.num_parameters:,}",
            str(architecture.num_hidden_layers),
            str(architecture.hidden_size),
            str(architecture.num_attention_heads),
            str(architecture.num_key_value_heads),
            f"{parallel.tensor_parallel_size} x {pipeline} x {parallel.data_parallel_size}",
            f"{row.state_bytes_per_rank / 2**20:,.1f} MiB",
        )
    table.caption = "state: weights, gradients and optimizer state; activations come on top"
    return table


def _arithmetic(arithmetic: RunArithmetic) -> Table:
    table = _table("One step", "quantity", "value", "from")
    samples = f"{arithmetic.prompts_per_step:,} prompts x {arithmetic.samples_per_prompt}"
    table.add_row("samples", f"{arithmetic.samples_per_step:,}", samples)
    mini_batch = arithmetic.samples_per_step // arithmetic.mini_batches_per_step
    table.add_row("mini-batches", f"{arithmetic.mini_batches_per_step:,} x {mini_batch:,} rows", f"{arithmetic.samples_per_step:,} samples")
    table.add_row("longest row", f"{arithmetic.max_row_tokens:,} tokens", "data")
    total = f"{arithmetic.total_steps:,} steps x {arithmetic.samples_per_step:,}"
    table.add_row("samples of the run", f"{arithmetic.samples_total:,}", total)
    return table


def _per_role(arithmetic: RunArithmetic) -> Table:
    table = _table("Per role", "role", "ranks", "replicas", "rows per pass", "rows per replica", "micro-batches", "steps per step", "steps")
    for role in arithmetic.roles:
        table.add_row(*_role_row(role))
    table.caption = "rows per pass: of a mini-batch where the role trains. micro-batches: per replica and pass. steps: of the optimizer."
    return table


def _role_row(role: RoleArithmetic) -> tuple[str, ...]:
    trains = role.optimizer_steps_total > 0
    return (
        role.role,
        str(role.num_ranks),
        str(role.num_replicas),
        f"{role.mini_batch_rows:,}",
        _between(role.rows_per_replica),
        _between(role.micro_batches),
        f"{role.optimizer_steps_per_step:,}" if trains else "-",
        f"{role.optimizer_steps_total:,}" if trains else "-",
    )


def _between(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _rollout(config: PPOConfig, plan: PlacementPlan) -> Table:
    rollout = config.rollout
    table = _table("Rollout", "quantity", "value", "from")
    table.add_row("engine", rollout.engine.value, "rollout.engine")
    if (settings := rollout.settings_of(rollout.engine)) is not None:
        shown = yaml.safe_dump(plain_values(settings), default_flow_style=True, width=1000).strip()
        table.add_row("its settings", shown, f"rollout.{rollout.engine.needs.section}")
    replicas = f"{rollout.num_replicas} x {rollout.tensor_parallel_size} devices"
    table.add_row("replicas", replicas, _whose_devices(plan))
    table.add_row("sequences at a time", f"{rollout.num_replicas * rollout.max_concurrency:,}", f"{rollout.max_concurrency:,} per replica")
    return table


def _reward(config: PPOConfig, architectures: Mapping[str, Architecture]) -> Table:
    table = _table("Reward: the sum of", "what", "weight", "how")
    processes = f"{config.reward.num_processes} processes, {config.reward.time_limit_s:g} s a sample"
    for function in config.reward.functions:
        table.add_row(f"{function.name} in {function.path}", f"{function.weight:g}", processes)
    if (model := config.reward.model).path is not None:
        longer = "longer ones are refused" if model.overlong is OverlongConversation.refuse else "longer ones lose their oldest"
        limit = max_conversation_tokens(model, architectures[REWARD_MODEL])
        table.add_row(model.path, f"{model.weight:g}", f"conversations of at most {limit:,} tokens of its own, {longer}")
    return table


def _whose_devices(plan: PlacementPlan) -> str:
    sharing = plan.on_same_devices("rollout")
    return f"devices shared with {', '.join(sharing)}" if sharing else "devices of their own"


def _checkpoints(config: PPOConfig | SFTConfig, architectures: Mapping[str, Architecture]) -> Table:
    checkpoint = config.checkpoint
    table = _table("Checkpoints", "quantity", "value", "from")
    table.add_row("in", str(checkpoint_path(config)), "checkpoint.dir" if checkpoint.dir else "trainer.output_dir")
    table.add_row("saved", *_when_saved(config))
    best, kept = checkpoint.keep_best.metric, f"the {checkpoint.keep:,} newest" if checkpoint.keep else "all"
    table.add_row("kept", kept + (f", and the best by {best}" if best and checkpoint.keep else ""), "checkpoint.keep")
    parts = "weights, masters, moments" + (", the policy for Hugging Face" if checkpoint.save_hf else "")
    table.add_row("size of one", _gib(checkpoint_bytes(config, architectures)), parts)
    most = most_checkpoints(config)
    table.add_row("most at a time", _gib(most * checkpoint_bytes(config, architectures)), f"{most:,} checkpoints")
    table.add_row("free on the disk", _gib(_free_bytes(checkpoint_path(config))), "now")
    return table


def _when_saved(config: PPOConfig | SFTConfig) -> tuple[str, str]:
    """In words, and by which keys."""
    checkpoint = config.checkpoint
    moments = [
        (bool(checkpoint.every_steps), f"every {checkpoint.every_steps:,} steps", "every_steps"),
        (bool(checkpoint.every_minutes), f"every {checkpoint.every_minutes:g} minutes", "every_minutes"),
        (checkpoint.keep_best.metric is not None, "after the best validation", "keep_best"),
        (checkpoint.at_end, "at the end", "at_end"),
    ]
    words, keys = [words for there, words, _ in moments if there], [f"checkpoint.{key}" for there, _, key in moments if there]
    if not words:
        return "only when SIGTERM ends the run", "checkpoint.at_end"
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last, keys[0]


def _of_a_full_disk(config: PPOConfig | SFTConfig, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    needed, path = most_checkpoints(config) * checkpoint_bytes(config, architectures), checkpoint_path(config)
    if needed > (free := _free_bytes(path)):
        yield (
            f"the checkpoints in {path} will need {_gib(needed)}, but {_gib(free)} are free: lower checkpoint.keep, raise "
            "checkpoint.every_steps, or give a checkpoint.dir on a larger disk"
        )


def _of_a_long_warmup(config: PPOConfig | SFTConfig) -> Iterator[str]:
    for role in model_roles(config):
        if role.optim is not None and role.optim.warmup_steps >= (total := optimizer_steps(config, role)):
            yield (
                f"the {role.name} warms up for {role.optim.warmup_steps:,} optimizer steps, but the run makes {total:,}: its learning "
                f"rate never gets to {role.optim.lr:g}"
            )


def _of_another_engine(config: PPOConfig | SFTConfig) -> Iterator[str]:
    if not isinstance(config, PPOConfig):
        return
    for engine in RolloutEngineKind:
        settings = config.rollout.settings_of(engine)
        if engine is not config.rollout.engine and settings is not None and settings.server_args:
            yield f"rollout.{engine.needs.section}.server_args do nothing with rollout.engine={config.rollout.engine.value}"


def _of_bfloat16(config: PPOConfig | SFTConfig) -> Iterator[str]:
    if config.model.dtype is DType.bfloat16 and not is_on_cuda(config.device):
        yield BFLOAT16_ON_A_CPU


def _free_bytes(path: Path) -> int:
    """On the disk that will hold `path`, which need not exist."""
    return shutil.disk_usage(existing_folder(path)).free


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"
