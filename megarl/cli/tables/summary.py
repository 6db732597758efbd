"""The summary that `megarl check` and the start of a run print: what it needs, and how it is divided.

A file in the run's folder contains all tables. This module does not import torch.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from megarl.cli.tables.console import print_line, print_lines
from megarl.cli.tables.placement import fullest_devices, memory_warnings, size_range
from megarl.cli.tables.run import (
    agent_line,
    gib,
    model_lines,
    print_run,
    reward_lines,
    shared_devices,
    warnings_of,
    when_saved,
)
from megarl.config.batch_arithmetic import work_of_roles
from megarl.config.memory_sizes import checkpoint_bytes, most_checkpoints
from megarl.config.roles import model_roles
from megarl.config.schema import (
    AdvantageEstimator,
    AlgorithmConfig,
    ParallelConfig,
    PolicyLossKind,
    PPOConfig,
    RunConfig,
)
from megarl.config.validate import read_architectures
from megarl.machine.errors import counted
from megarl.machine.files import write_whole
from megarl.models.architecture import Architecture
from megarl.plan.placement.memory import DeviceMemory, plan_memory
from megarl.plan.placement.model_state import Usage
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import choose_transport
from megarl.plan.step_time.device import profile_of
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.step import PredictedCosts
from megarl.weights.sync.forecast import forecast_weights

_LABEL_WIDTH = 8
PLAN_FILE = "plan.txt"  # in `trainer.output_dir`
_WIDTH = 100  # width of its tables in characters
_NAMES = {
    AdvantageEstimator.gae: "PPO",
    AdvantageEstimator.reinforce_plus_plus: "REINFORCE++",
    AdvantageEstimator.reinforce_plus_plus_baseline: "REINFORCE++ with a baseline",
    AdvantageEstimator.remax: "ReMax",
    AdvantageEstimator.grpo_pass_k: "GRPO for pass@k",
    AdvantageEstimator.optimal_token_baseline: "optimal token baseline",
    AdvantageEstimator.distillation: "on-policy distillation",
}


def title_of(config: RunConfig) -> str:
    """Return the common name of the algorithm: that of its loss if it has one, otherwise of its estimator."""
    return (
        _name(config.algorithm)
        if isinstance(config, PPOConfig)
        else config.kind.value.upper().replace("_", " ")
    )


def _name(algorithm: AlgorithmConfig) -> str:
    estimator = algorithm.advantage.estimator
    loss = algorithm.policy_loss.kind
    if loss is not PolicyLossKind.ppo_clip:
        return loss.value.upper().replace("_", "-")
    # Published names describe combinations of settings, so the specific ones come first.
    if estimator is AdvantageEstimator.grpo and algorithm.dynamic_sampling.enabled:
        return "DAPO"
    if estimator is AdvantageEstimator.grpo and not algorithm.advantage.normalize_by_std:
        return "Dr. GRPO"

    return _NAMES.get(estimator, estimator.value.upper())


def print_summary(config: RunConfig, console: Console, *, with_push: bool, is_here: bool) -> None:
    """Print a section of one or a few lines for each question about a valid run, and the warnings.

    Args:
        with_push: Also plan the weight sync and the time of a step, which takes seconds for a large model.
        is_here: Whether the run will start on this machine, whose disks are then checked.
    """
    architectures, _ = read_architectures(config)
    plan = plan_placement(config)
    memory = plan_memory(config, plan, architectures)
    sections: dict[str, Iterator[str]] = {
        "MODELS": model_lines(config, architectures, work_of_roles(config, architectures)),
        "BATCH": _batch(config),
        "MEMORY": _memory(config, memory),
        "LAYOUT": _layout(config, plan),
        "DISK": _disk(config, architectures),
    }
    if isinstance(config, PPOConfig):
        sections |= {
            "REWARD": reward_lines(config, architectures),
            "AGENT": iter([agent_line(config.agent)] if config.agent.is_used else []),
            "SYNC": _sync(config, plan, architectures["actor"], with_push),
            "TIME": _time(config, plan, architectures, with_push),
        }

    for label, lines in sections.items():
        for number, line in enumerate(lines):
            print_line(console, f"{'' if number else label:{_LABEL_WIDTH}}{line}")
    warnings = (*warnings_of(config, architectures, is_here), *memory_warnings(config, memory))
    print_lines(console, warnings, "warning: ", "yellow")


def _batch(config: RunConfig) -> Iterator[str]:
    samples = config.samples_per_step
    of_prompts = ""
    if config.samples_per_prompt > 1 or isinstance(config, PPOConfig):
        prompts = "prompt" if isinstance(config, PPOConfig) else "pair"
        of_prompts = f" ({counted(config.prompts_per_step, prompts)} x {config.samples_per_prompt})"
    yield (
        f"{title_of(config)}: {counted(config.trainer.total_steps, 'step')} x "
        f"{counted(samples, 'sample')}{of_prompts}, in {counted(config.updates_per_pass, 'mini-batch')} of "
        f"{counted(samples // config.updates_per_pass, 'row')}; rows of at most "
        f"{counted(config.max_row_tokens, 'token')}"
    )
    if isinstance(config, PPOConfig):
        yield f"KL: {_kl(config)}"


def _memory(config: RunConfig, memory: Sequence[DeviceMemory]) -> Iterator[str]:
    """Yield the memory of the fullest device of each pool by phase, and the parts of the fullest phase."""
    budget_gb = config.placement.device_memory_gb
    budget = "" if budget_gb is None else f", budget {budget_gb:g} GiB"
    for pool, device in sorted(fullest_devices(memory).items(), key=lambda item: -item[1].peak):
        sizes = {phase: gib(device.total(phase)) for phase in device.phases}
        by_phase = ", ".join(f"{phase} {size}" for phase, size in sizes.items())
        constant = f"{gib(device.peak)} in every phase" if len(set(sizes.values())) == 1 else ""
        yield f"fullest device of the pool {pool}{budget}: {constant or by_phase}"

        usages = device.phases[device.peak_phase].values()
        parts = {
            each.name.replace("_", " "): sum(getattr(usage, each.name) for usage in usages)
            for each in fields(Usage)
        }
        largest = sorted((item for item in parts.items() if item[1]), key=lambda item: -item[1])
        yield f"  in {device.peak_phase}: {', '.join(f'{name} {gib(size)}' for name, size in largest)}"
        if pinned := [f"{role} {gib(size)}" for role, size in device.pinned.items() if size]:
            yield f"  in the memory of its node: {', '.join(pinned)}"


def _layout(config: RunConfig, plan: PlacementPlan) -> Iterator[str]:
    """Yield the ranks of the roles, those with the same layout together, and the engines."""
    layouts: dict[tuple[str, str], list[str]] = {}
    # The reference of a run on pairs scores its rows before the training, and is not in the plan.
    for role in (role for role in model_roles(config) if role.name in plan.roles):
        pool = plan.group_of(role.name).pool
        layouts.setdefault((_ranks(role.parallel), pool), []).append(role.name)
    for (ranks, pool), names in layouts.items():
        yield f"{', '.join(names)}: {ranks} (pool {pool})"

    if isinstance(config, PPOConfig):
        rollout = config.rollout
        replicas = f"{rollout.num_replicas} x {counted(rollout.devices_per_engine, 'device')}"
        yield f"rollout: {rollout.engine.value} on {replicas}, {shared_devices(plan)}"
    yield f"placement: {plan.strategy.value} on {plan.num_nodes} x {counted(plan.devices_per_node, 'device')}"
    if idle := plan.num_nodes * plan.devices_per_node - plan.num_devices:
        yield (
            f"idle: {counted(idle, 'device')} without a role; use more replicas (data_parallel_size, "
            "rollout.num_replicas) or fewer nodes, or let `megarl tune` choose"
        )


def _ranks(parallel: ParallelConfig) -> str:
    sizes = {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "CP": parallel.context_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    split = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"{split} on {counted(parallel.world_size, 'device')}" if split else "1 device"


def _disk(config: RunConfig, architectures: Mapping[str, Architecture]) -> Iterator[str]:
    size = checkpoint_bytes(config, architectures)
    most = most_checkpoints(config)
    yield (
        f"checkpoints {when_saved(config)[0]}: {gib(size)} each, at most {most:,} = {gib(most * size)} in "
        f"{config.checkpoint_path}"
    )


def _sync(config: PPOConfig, plan: PlacementPlan, policy: Architecture, with_push: bool) -> Iterator[str]:
    transport = choose_transport(config, plan).value
    forecast = forecast_weights(config, plan, policy) if with_push else None
    if forecast is None:
        yield f"weights by {transport}"
        return
    rounds = counted(forecast.plan.num_rounds, "round")
    yield (
        f"weights by {transport}: {size_range(forecast.received)} for each engine rank in {rounds}; "
        f"verification: {config.resharding.verify.value}"
    )


def _time(
    config: PPOConfig, plan: PlacementPlan, architectures: Mapping[str, Architecture], with_push: bool
) -> Iterator[str]:
    device = profile_of(config)
    if with_push and device is None:
        yield "of a step is not predicted: set placement.device_profile, or use --plan, which assumes one"
    elif device is not None and with_push:
        step = PredictedCosts(device, expected_lengths(config)).predict_step(config, plan, architectures)
        speed = f"{step.tokens_per_device_s:,.0f} tokens/s per device"
        yield f"{step.seconds:,.4g} s per step are predicted on {device.name}, {speed}"


def _kl(config: PPOConfig) -> str:
    kl = config.algorithm.kl
    if not (kl.in_reward or kl.in_loss):
        return "none"
    return f"in the {kl.where.value}, {kl.estimator.value} x {kl.coefficient:g}"


def write_plan(config: RunConfig, folder: Path) -> None:
    """Write all tables of `megarl check` to `plan.txt`."""
    text = io.StringIO()
    print_run(config, Console(file=text, width=_WIDTH))
    write_whole(folder / PLAN_FILE, "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n")
