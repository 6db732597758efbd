"""The plan of a run as tables, with warnings about likely mistakes.

The tables show models, arithmetic, placement, memory, rewards and checkpoints. This module does not import
torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from megarl.cli.tables.console import print_line, print_lines, table, table_of_numbers
from megarl.cli.tables.placement import print_placement
from megarl.config.batch_arithmetic import (
    RoleArithmetic,
    max_conversation_tokens,
    optimizer_steps,
    work_of_roles,
)
from megarl.config.layers import describe_layers
from megarl.config.load import is_on_cuda, plain_values
from megarl.config.megatron_options import options_of
from megarl.config.memory_sizes import checkpoint_bytes, most_checkpoints
from megarl.config.readers import unread_keys
from megarl.config.roles import REWARD_MODEL, ModelRole, model_roles, role_named
from megarl.config.schema import (
    AgentConfig,
    DType,
    OverlongConversation,
    PPOConfig,
    RunConfig,
)
from megarl.config.schema.keys import split_code
from megarl.config.shipped import shown
from megarl.config.validate import read_architectures
from megarl.machine.errors import counted, written
from megarl.machine.files import existing_folder
from megarl.models.adapters import adapter_rate_factor
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement

BFLOAT16_ON_A_CPU = (
    "bfloat16 is many times slower than float32 on most processors; on CPU use model.dtype=float32 or auto"
)
_QUANTITIES = ("quantity", "value", "from")  # columns


def print_run(config: RunConfig, console: Console, with_push: bool = True, is_here: bool = True) -> None:
    """Print the plan of a run as tables.

    Args:
        with_push: See print_placement.
        is_here: Whether the run will start on this machine, whose disks are then checked.
    """
    architectures, _ = read_architectures(config)
    work = work_of_roles(config, architectures)
    print_lines(console, model_lines(config, architectures, work))
    console.print(_models(model_roles(config), architectures, work))
    print_line(console, f"layers: {describe_layers(config)}")
    print_megatron_options(config, console)
    console.print(_arithmetic(config))
    console.print(_per_role(work))
    plan = plan_placement(config)

    if isinstance(config, PPOConfig):
        _print_rollout(config, plan, console)
        print_lines(console, reward_lines(config, architectures), "reward: ")
        if config.agent.is_used:
            print_line(console, f"agent: {agent_line(config.agent)}")

    print_placement(config, plan, architectures, console, with_push)
    _print_checkpoints(config, architectures, console)
    print_lines(console, warnings_of(config, architectures, is_here), "warning: ", "yellow")


def warnings_of(
    config: RunConfig, architectures: Mapping[str, Architecture], is_here: bool = True
) -> Iterator[str]:
    """Yield warnings about valid settings that are probably mistakes. For `is_here` see print_run."""
    if is_here:
        yield from _of_a_full_disk(config, architectures)
    yield from _of_a_long_warmup(config)
    if config.model.dtype is DType.bfloat16 and not is_on_cuda(config.device):
        yield BFLOAT16_ON_A_CPU
    yield from map(str, unread_keys(config, architectures, refused=False))


def model_lines(
    config: RunConfig, architectures: Mapping[str, Architecture], work: Sequence[RoleArithmetic]
) -> Iterator[str]:
    """Yield a line for each model folder, with the roles that load it, and the parameters of the first."""
    roles = model_roles(config)
    for path in dict.fromkeys(role.path for role in roles):
        names = [role.name for role in roles if role.path == path]
        architecture = architectures[names[0]]
        parameters = _parameters(next(row for row in work if row.role == names[0]), architecture)
        what = f"{architecture.model_type}, {config.model.dtype.value}, {parameters} parameters"
        yield f"{', '.join(names)}: {shown(Path(path))} ({what})"

    for role in roles:
        architecture = architectures[role.name]
        if role.lora is not None and role.optim is not None:
            hidden = architecture.hidden_size
            yield (
                f"{role.name}: adapters of rank {role.lora.rank} with a learning rate of {role.optim.lr:g}; "
                f"usual are {adapter_rate_factor(hidden):.2g} times that of full training "
                f"(hidden_size {hidden:,})"
            )


def print_megatron_options(config: RunConfig, console: Console) -> None:
    """Print a table of the options that are passed on to Megatron, if there are any."""
    rows = [
        (role.name, option.name, written(option.value), f"{role.megatron_key}.{option.section}")
        for role in model_roles(config)
        for option in options_of(role.megatron)
    ]
    if rows:
        console.print(table("Options of Megatron-Core", ("model", "field", "value", "from"), rows))


def _parameters(row: RoleArithmetic, architecture: Architecture) -> str:
    """Return the number of parameters, and how many of them are those of adapters."""
    if architecture.lora is None:
        return f"{row.num_parameters:,}"
    trained = num_parameters(architecture, role_named(row.role).with_value_head, trained_only=True)
    return f"{row.num_parameters:,} ({trained:,} trained)"


def _models(
    roles: Sequence[ModelRole],
    architectures: Mapping[str, Architecture],
    work: Sequence[RoleArithmetic],
) -> Table:
    columns = {}
    for role, row in zip(roles, work, strict=True):
        architecture = architectures[role.name]
        parallel = role.parallel
        columns[role.name] = (
            _parameters(row, architecture),
            str(architecture.num_hidden_layers),
            str(architecture.hidden_size),
            f"{architecture.num_attention_heads} ({architecture.num_key_value_heads})",
            f"{parallel.tensor_parallel_size} x {parallel.pipeline_parallel_size} x "
            f"{parallel.data_parallel_size}",
            str(parallel.virtual_pipeline_parallel_size or "-"),
            str(parallel.context_parallel_size) if parallel.context_parallel_size > 1 else "-",
            f"{row.state_bytes_per_rank / 2**20:,.1f} MiB",
        )

    return table_of_numbers(
        "Models",
        columns,
        (
            "parameters",
            "layers",
            "hidden",
            "heads (key-value)",
            "TP x PP x DP",
            "virtual stages",
            "context parallel",
            "state per rank",
        ),
        "state: weights, gradients and optimizer state, without activations",
    )


def _arithmetic(config: RunConfig) -> Table:
    samples = config.samples_per_step
    steps = config.trainer.total_steps
    mini_batch = counted(samples // config.updates_per_pass, "row")
    of_prompts = f"{counted(config.prompts_per_step, 'prompt')} x {config.samples_per_prompt}"
    return table(
        "One step",
        _QUANTITIES,
        (
            ("samples", f"{samples:,}", of_prompts),
            ("mini-batches", f"{config.updates_per_pass:,} x {mini_batch}", counted(samples, "sample")),
            ("longest row", counted(config.max_row_tokens, "token"), "data"),
            ("samples of the run", f"{samples * steps:,}", f"{counted(steps, 'step')} x {samples:,}"),
        ),
    )


def _per_role(work: Sequence[RoleArithmetic]) -> Table:
    return table_of_numbers(
        "Work of each role",
        {role.role: _work_of(role) for role in work},
        (
            "ranks",
            "replicas",
            "rows per pass",
            "rows per replica",
            "micro-batches",
            "updates per step",
            "updates",
        ),
        "rows per pass: rows of a mini-batch if the role trains; micro-batches: per replica and pass",
    )


def _work_of(role: RoleArithmetic) -> tuple[str, ...]:
    trains = role.optimizer_steps_total > 0
    return (
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


def _print_rollout(config: PPOConfig, plan: PlacementPlan, console: Console) -> None:
    rollout = config.rollout
    replicas = f"{rollout.num_replicas} x {counted(rollout.devices_per_engine, 'device')}"
    if rollout.pipeline_parallel_size > 1:
        replicas += f" in {rollout.pipeline_parallel_size} stages"
    console.print(
        table(
            "Rollout",
            _QUANTITIES,
            (
                ("engine", rollout.engine.value, "rollout.engine"),
                ("replicas", replicas, shared_devices(plan)),
                (
                    "concurrent sequences",
                    f"{rollout.num_replicas * rollout.max_concurrency:,}",
                    f"{rollout.max_concurrency:,} per replica",
                ),
            ),
        )
    )

    # The engine's own settings, in the form of the configuration.
    if (settings := rollout.settings_of(rollout.engine)) is not None:
        shown = yaml.safe_dump(plain_values(settings), default_flow_style=True, width=1000).strip()
        print_line(console, f"rollout.{rollout.engine.needs.section}: {shown}")


def agent_line(agent: AgentConfig) -> str:
    """Describe who acts in episodes, and their limits."""
    who = ", ".join(tool.rpartition(":")[2] for tool in agent.tools) or _function(agent.environment.path)
    if agent.environment.hub is not None:
        who = f"{agent.environment.hub.value}/{agent.environment.name}"
    if agent.harness.is_used:
        who = " ".join(agent.harness.command) or _function(agent.harness.function)
        if agent.harness.external:
            who = f"external, at {agent.harness.host}:{agent.harness.port}"
        elif (provider := agent.harness.sandbox.provider) is not None:
            who += f", in a sandbox ({provider.value})"

    return f"{who}; at most {counted(agent.max_turns, 'turn')}, {counted(agent.num_workers, 'process')}"


def _function(reference: str | None) -> str:
    file, name = split_code(reference or "")
    return f"{name} in {file}"


def reward_lines(config: PPOConfig, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    """Yield what scores the samples, with its weight and its limits."""
    processes = (
        f"{counted(config.reward.num_processes, 'process')}, {config.reward.time_limit_s:g} s per sample"
    )
    for function in config.reward.functions:
        yield f"{function.weight:g} x {function.name} in {function.file}; {processes}"

    for judge in config.reward.judges:
        yield (
            f"{judge.weight:g} x judge {judge.name}, {judge.served_by}; at most "
            f"{counted(judge.max_concurrency, 'request')} at once, {judge.time_limit_s:g} s per attempt"
        )

    if (model := config.reward.model).path is not None:
        fate = "refused" if model.overlong is OverlongConversation.refuse else "truncated"
        limit = max_conversation_tokens(model, architectures[REWARD_MODEL])
        yield (
            f"{model.weight:g} x {model.path}; conversations of at most {limit:,} of its own tokens, longer "
            f"ones are {fate}"
        )


def shared_devices(plan: PlacementPlan) -> str:
    """Say with which roles the engines share their devices."""
    sharing = plan.on_same_devices("rollout")
    return f"devices shared with {', '.join(sharing)}" if sharing else "separate devices"


def _print_checkpoints(
    config: RunConfig, architectures: Mapping[str, Architecture], console: Console
) -> None:
    checkpoint = config.checkpoint
    best = checkpoint.keep_best.metric
    kept = f"the newest {checkpoint.keep:,}" if checkpoint.keep else "all"
    size = checkpoint_bytes(config, architectures)
    parts = "weights, master weights, moments" + (", Hugging Face policy" if checkpoint.save_hf else "")
    most = most_checkpoints(config)
    console.print(
        table(
            "Checkpoints",
            _QUANTITIES,
            (
                ("saved", *when_saved(config)),
                (
                    "kept",
                    kept + (f", and the best by {best}" if best and checkpoint.keep else ""),
                    "checkpoint.keep",
                ),
                ("size", gib(size), parts),
                ("maximum on disk", gib(most * size), counted(most, "checkpoint")),
                ("free disk space", gib(free_bytes(config.checkpoint_path)), "now"),
            ),
        )
    )
    print_line(console, f"checkpoints in {config.checkpoint_path}")


def when_saved(config: RunConfig) -> tuple[str, str]:
    """Describe when checkpoints are saved, and return the key that determines it."""
    checkpoint = config.checkpoint
    moments = [
        (bool(checkpoint.every_steps), f"every {counted(checkpoint.every_steps, 'step')}", "every_steps"),
        (bool(checkpoint.every_minutes), f"every {checkpoint.every_minutes:g} min", "every_minutes"),
        (checkpoint.keep_best.metric is not None, "after the best validation", "keep_best"),
        (checkpoint.at_end, "at the end", "at_end"),
    ]
    words = [words for there, words, _ in moments if there]
    keys = [f"checkpoint.{key}" for there, _, key in moments if there]
    if not words:
        return "only when SIGTERM or Ctrl-C ends the run", "checkpoint.at_end"
    *first, last = words

    return f"{', '.join(first)} and {last}" if first else last, keys[0]


def _of_a_full_disk(config: RunConfig, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    needed = most_checkpoints(config) * checkpoint_bytes(config, architectures)
    path = config.checkpoint_path

    if needed > (free := free_bytes(path)):
        yield (
            f"the checkpoints in {path} will need {gib(needed)}, but only {gib(free)} are free; lower "
            f"checkpoint.keep, raise checkpoint.every_steps, or set checkpoint.dir to a larger disk"
        )


def _of_a_long_warmup(config: RunConfig) -> Iterator[str]:
    for role in model_roles(config):
        if role.optim is not None and role.optim.warmup_steps >= (total := optimizer_steps(config, role)):
            yield (
                f"the {role.name} warms up for {counted(role.optim.warmup_steps, 'optimizer step')}, but the "
                f"run has only {total:,}, so its learning rate never reaches {role.optim.lr:g}"
            )


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, which need not exist."""
    return shutil.disk_usage(existing_folder(path)).free


def gib(nbytes: int) -> str:
    """Return a size in GiB, or in MiB if it is smaller."""
    return f"{nbytes / 2**30:,.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:,.2f} MiB"
