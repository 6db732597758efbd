"""Rules for the trainer's settings: mini-batches, validation, layers and kernels, and output folders."""

from __future__ import annotations

from math import lcm
from pathlib import Path

from megarl.config.finding import (
    Finding,
    Findings,
    conflicts,
    either,
    is_http_url,
    nearest_divisors,
    nearest_multiples,
    refusals,
)
from megarl.config.roles import model_roles
from megarl.config.schema import (
    CPCommType,
    Device,
    DType,
    EarlyStopConfig,
    FlashAttention,
    KeepBestConfig,
    Layers,
    MetricMode,
    PPOConfig,
    PreferenceConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.schema.keys import PathKind, leaves, names_code
from megarl.config.validation_metrics import RewardKeys, may_be_measured, nearest, source_metrics
from megarl.machine.errors import counted

# The validation metrics of runs without rewards, and which values are better. Only pairs have all of them.
_METRICS = {"val/loss": MetricMode.min, "val/accuracy": MetricMode.max, "val/margin": MetricMode.max}


def output_folders(config: RunConfig) -> Findings:
    """Check that output folders are not empty strings or the root of the file system."""
    for key, folder in (
        ("trainer.output_dir", config.trainer.output_dir),
        ("checkpoint.dir", config.checkpoint.dir),
    ):
        if folder is None:
            continue
        if not folder.strip():
            yield Finding((key,), f"is {folder!r}, which is not a folder; give a separate folder for the run")
        elif (path := Path(folder).absolute()) == Path(path.anchor):
            yield Finding(
                (key,), f"is {folder!r}, the root of the file system; give a separate folder for the run"
            )


def functions(config: RunConfig) -> Findings:
    """Check the form of references to functions and classes of the user."""
    for leaf in leaves(config):
        is_reference = leaf.path is PathKind.function and isinstance(leaf.value, str)
        if is_reference and not names_code(leaf.value):
            yield Finding(
                (leaf.key,),
                f"{leaf.value!r} does not name a function or a class in a file; write it as FILE.py:NAME, "
                "such as my_functions.py:my_loss",
            )


def recovery_factors(config: RunConfig) -> Findings:
    """Check that multiples of usual times are larger than these times."""
    for name in ("hang_factor", "straggler_factor"):
        factor = getattr(config.recovery, name)
        if 0 < factor <= 1:
            yield Finding(
                (f"recovery.{name}",),
                f"is {factor:g}, a multiple of a usual time that half of all measurements exceed; use 0 to "
                f"turn it off, or a number well above 1",
            )


def profile(config: RunConfig) -> Findings:
    """Check that profiled steps, roles and ranks exist."""
    chosen = config.profile
    sizes = {role.name: role.parallel.world_size for role in model_roles(config) if not role.before_training}
    if unknown := [role for role in chosen.roles if role not in sizes]:
        yield Finding(
            ("profile.roles",), f"has {unknown[0]!r}, but the models of the run are {', '.join(sizes)}"
        )
    if not chosen.steps:
        return

    total = config.trainer.total_steps
    if absent := [step for step in chosen.steps if not 1 <= step <= total]:
        yield Finding(("profile.steps",), f"has {absent[0]}, but the steps of the run are 1 to {total}")
    for key, values in (("profile.roles", chosen.roles), ("profile.ranks", chosen.ranks)):
        if not values:
            yield Finding((key,), "is empty, so that no process would be profiled; name at least one")

    num_ranks = max((sizes[role] for role in chosen.roles if role in sizes), default=0)
    if num_ranks and (absent := [rank for rank in chosen.ranks if not 0 <= rank < num_ranks]):
        yield Finding(
            ("profile.ranks",),
            f"has {absent[0]}, but the ranks of {' and '.join(chosen.roles)} are 0 to {num_ranks - 1}",
        )


def tracking(config: RunConfig) -> Findings:
    """Check the addresses of loggers."""
    host = config.tracking.prometheus_host
    endpoint = config.tracking.otlp_endpoint
    yield from refusals(
        # A single number is an address to the system, though not one that anybody means.
        (
            ("tracking.prometheus_host",),
            not host or host.isdigit() or any(each.isspace() or each in "/@" for each in host),
            f"is {host!r}, which is not a host name or an address; use one, such as 127.0.0.1 or 0.0.0.0",
        ),
        (
            ("tracking.otlp_endpoint",),
            endpoint is not None and not is_http_url(endpoint),
            f"is {endpoint!r}, which is not an http or https URL; use one, such as http://collector:4318",
        ),
    )


def loss_metrics(config: SFTConfig | PreferenceConfig) -> Findings:
    """Check that `checkpoint.keep_best` and `trainer.early_stop` use a metric of a run without rewards."""
    measured = [*_METRICS] if isinstance(config, PreferenceConfig) else ["val/loss"]
    for key, section in _compared(config):
        metric = section.metric or ""
        if metric not in measured:
            message = f"is {metric!r}, but this run measures {', '.join(measured)}; use one, or null"
            yield Finding((f"{key}.metric",), message)
        elif section.mode is not (better := _METRICS[metric]):
            message = f"is {section.mode.value}, but for {metric} use {better.value}"
            yield Finding((f"{key}.mode",), message)


def validation_metrics(config: PPOConfig) -> Findings:
    """Check that validations measure the metric of `checkpoint.keep_best` and `trainer.early_stop`."""
    for key, section in _compared(config):
        metric = section.metric or ""
        if not may_be_measured(config, metric):
            # Suggest all possible metrics, including those that require an answer.
            measured = [f"val/{name}" for name in source_metrics(config, RewardKeys(has_answer=True))]
            yield Finding(
                (f"{key}.metric",),
                f"no validation of this run measures {metric!r}; {nearest(metric, measured)}",
            )


def compared_validations(config: RunConfig) -> Findings:
    """Check that the run has validations if a section compares them."""
    for key, _ in _compared(config):
        if config.trainer.validate_every_steps == 0:
            yield Finding(
                ("trainer.validate_every_steps", f"{key}.metric"),
                f"{key} compares validations, but validate_every_steps is 0; use 1 or more, or set "
                f"{key}.metric to null",
            )


def _compared(config: RunConfig) -> list[tuple[str, KeepBestConfig | EarlyStopConfig]]:
    """Return the sections that compare validations, by their key."""
    sections: dict[str, KeepBestConfig | EarlyStopConfig] = {
        "checkpoint.keep_best": config.checkpoint.keep_best,
        "trainer.early_stop": config.trainer.early_stop,
    }
    return [(key, section) for key, section in sections.items() if section.metric is not None]


def layers(config: RunConfig) -> Findings:
    is_fused = config.engine.layers is Layers.transformer_engine
    on_cpu = config.device is Device.cpu
    yield from refusals(
        (
            ("engine.layers", "device"),
            is_fused and on_cpu,
            "transformer_engine supports CUDA only, but device is cpu; use engine.layers=auto or local",
        ),
        (
            ("engine.layers", "model.dtype"),
            is_fused and not on_cpu and config.model.dtype is DType.float32 and config.engine.packing,
            "transformer_engine has no float32 attention for packed rows; use engine.layers=auto or local, "
            "or model.dtype=bfloat16",
        ),
    )


def flash_attention(config: RunConfig) -> Findings:
    asked = config.engine.flash_attention
    if asked is FlashAttention.fa2:
        return

    on_cpu = config.device is Device.cpu
    yield from refusals(
        (
            ("engine.flash_attention", "device"),
            on_cpu,
            f"{asked.value} supports CUDA only, but device is cpu; use engine.flash_attention=fa2",
        ),
        (
            ("engine.flash_attention", "model.dtype"),
            not on_cpu and config.model.dtype is DType.float32,
            f"{asked.value} has no float32 kernels; use engine.flash_attention=fa2, or model.dtype=bfloat16",
        ),
    )


def ring_attention(config: RunConfig) -> Findings:
    """Check the requirements of cp_comm_type=p2p, which only Transformer Engine's attention has."""
    if config.engine.cp_comm_type is not CPCommType.p2p:
        return

    yield from conflicts(
        "engine.cp_comm_type",
        "p2p ",
        (
            ("engine.layers", "device"),
            config.engine.layers is Layers.local or config.device is Device.cpu,
            "is an exchange of Transformer Engine's attention, which local layers and a CPU do not have; use "
            "engine.cp_comm_type=auto, or engine.layers=auto on CUDA",
        ),
        (
            ("engine.share_prompts",),
            config.engine.share_prompts,
            "treats sequences as independent, but samples share their prompts; use engine.cp_comm_type=auto, "
            "or engine.share_prompts=false",
        ),
    )


def mini_batches(config: PPOConfig) -> Findings:
    samples = config.samples_per_step
    updates = config.trainer.updates_per_step

    if samples % updates:
        prompts = config.trainer.prompts_per_step
        n = config.rollout.n
        step = lcm(n, updates) // n  # valid values of prompts_per_step are its multiples
        yield Finding(
            ("trainer.updates_per_step", "trainer.prompts_per_step", "rollout.n"),
            f"prompts_per_step {prompts} x n {n} = {counted(samples, 'sample')} cannot be divided into "
            f"updates_per_step {updates} mini-batches; use updates_per_step "
            f"{either(nearest_divisors(samples, updates))} or prompts_per_step "
            f"{either(nearest_multiples(prompts, step))}",
        )
