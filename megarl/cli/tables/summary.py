"""The summary of a run that is printed when it starts. A file in its folder contains all tables."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from megarl.cli.tables.console import print_line
from megarl.cli.tables.run import print_models, print_reward, print_run, warnings_of, when_saved
from megarl.config.paths import checkpoint_path
from megarl.config.schema import AdvantageEstimator, AlgorithmConfig, PolicyLossKind, PPOConfig, RunConfig
from megarl.config.validate import read_architectures
from megarl.machine.files import write_whole
from megarl.machine.wording import counted
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.placement.transport import choose_transport

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
    return _name(config.algorithm) if isinstance(config, PPOConfig) else config.kind.value.upper()


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


def print_summary(config: RunConfig, console: Console) -> None:
    architectures, _ = read_architectures(config)
    plan = plan_placement(config)
    fullest = max(plan_memory(config, plan, architectures), key=lambda device: device.peak)
    prompts = (
        f"{counted(config.prompts_per_step, 'prompt')} x {config.samples_per_prompt} = "
        if isinstance(config, PPOConfig)
        else ""
    )
    longest = counted(config.max_row_tokens, "token")
    rows = f"{counted(config.samples_per_step, 'row')} of at most {longest}"
    print_line(
        console,
        f"{title_of(config)}: {counted(config.trainer.total_steps, 'step')} of {prompts}{rows}, "
        f"mini-batches: {config.updates_per_pass:,}",
    )
    print_models(config, architectures, console)

    if isinstance(config, PPOConfig):
        print_line(console, f"KL: {_kl(config)}")
        print_reward(config, architectures, console)
        engines = f"{config.rollout.num_replicas} x {counted(config.rollout.devices_per_engine, 'device')}"
        print_line(
            console,
            f"rollout: {config.rollout.engine.value} on {engines}, weight sync by "
            f"{choose_transport(config, plan).value}",
        )

    place = (
        f"{plan.strategy.value}, {counted(plan.num_processes, 'process')} on {plan.num_nodes} x "
        f"{counted(plan.devices_per_node, 'device')}"
    )
    print_line(
        console,
        f"placement: {place}; the fullest device (pool {fullest.pool}) has an estimated peak of "
        f"{fullest.peak / 2**30:.2f} GiB",
    )
    print_line(console, f"checkpoints: {when_saved(config)[0]}, in {checkpoint_path(config)}")
    for warning in warnings_of(config, architectures):
        print_line(console, f"warning: {warning}", style="yellow")


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
