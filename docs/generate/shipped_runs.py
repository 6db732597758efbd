"""Generate the tables of predicted steps: of the shipped runs in `docs/launch.md`, of phases in `docs/tuning.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.cli.tables.placement import fullest_devices
from megarl.config.roles import model_roles
from megarl.config.schema import Device, PPOConfig, Recompute
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.validate import read_architectures
from megarl.doctor.checks import load_for_plan
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters, num_parameters
from megarl.models.layers import num_routing_layers
from megarl.plan.placement.memory import plan_memory
from megarl.plan.placement.plan import plan_placement
from megarl.plan.step_time.device import assumed_profile
from megarl.plan.step_time.lengths import expected_lengths
from megarl.plan.step_time.role_time import PassWork, role_work
from megarl.plan.step_time.step import PredictedCosts, PredictedStep


def shipped_runs() -> str:
    """Return a row for each file of `configs` that needs GPUs, from the smallest model to the largest."""
    configs = {file: load_for_plan(PPOConfig, str(file)).config for file in _files()}
    by_size = sorted(configs.items(), key=lambda item: (num_parameters(_actor(item[1])), item[0].stem))
    head = (
        "| run | model | billion parameters | GPU | placement | GiB of the budget | predicted step | "
        "checked, dry-run, run on GPUs | `megarl train` with |"
    )
    return "\n".join([head, "|---" * 9 + "|", *(_row(file, config) for file, config in by_size)])


# Tests check every file, and dry-run each role and kind of stage of it (docs/evidence.md).
_VERIFIED = "yes, yes, **no**"


def _files() -> Iterator[Path]:
    """Yield the files of runs on GPUs. Those of the quickstart have tiny models, on a CPU."""
    for file in sorted(CONFIGS_DIR.glob("*.yaml")):
        if not file.stem.startswith("quickstart"):
            yield file


def _actor(config: PPOConfig) -> Architecture:
    return read_architectures(config)[0]["actor"]


def _row(file: Path, config: PPOConfig) -> str:
    assert config.device is Device.cuda, file
    plan = plan_placement(config)
    architectures, _ = read_architectures(config)
    memory = fullest_devices(plan_memory(config, plan, architectures))
    budget_gb = config.placement.device_memory_gb
    device = assumed_profile(config)
    step = PredictedCosts(device, expected_lengths(config)).predict_step(config, plan, architectures)
    total, active = (count(_actor(config)) / 1e9 for count in (num_parameters, num_active_parameters))
    used = ", ".join(f"{pool} {fullest.peak / 2**30:.1f}" for pool, fullest in memory.items())
    placement = config.placement
    name = f"{file.stem}-{placement.num_nodes}x{placement.devices_per_node}".replace("_", "-")
    cells = (
        name,
        Path(config.model.path).name,
        f"{total:,.1f}" if total == active else f"{total:,.1f}, {active:,.1f} active",
        device.name,
        config.placement.strategy.value,
        f"{used} of {budget_gb:g}",
        f"{step.seconds:,.0f} s",
        _VERIFIED,
        f"`configs/{file.name}`",
    )
    return f"| {' | '.join(cells)} |"


# A step on 8, 32 and 128 H100: the name, the file and what differs from it.
_STEPS = (
    ("Qwen3-8B on 8 H100", "qwen2.5_7b_grpo.yaml", ("model.path=models/Qwen3-8B-128k",)),
    ("Qwen3-30B-A3B on 32 H100", "qwen3_30b_a3b_grpo.yaml", ()),
    ("Qwen3-235B-A22B on 128 H100", "qwen3_235b_a22b_grpo.yaml", ()),
)
_CORRECTED = "algorithm.rollout_correction.level=token"
# What may make a step faster, with the options that set it.
_LEVERS = {
    "engines in FP8 (`rollout.dtype: fp8`)": ("rollout.dtype=fp8", _CORRECTED),
    "no second log-probs (`rollout_correction.bypass: true`)": ("algorithm.rollout_correction.bypass=true",),
    "matrix products of the trainer in FP8 (`actor.megatron: fp8_blockwise`)": (
        "actor.megatron=fp8_blockwise",
        "placement.over_budget=warn",
    ),
    "four times the concurrency (`rollout.max_concurrency`)": ("rollout.max_concurrency=1024",),
}
_NUM_LEVERS = 3
# A dense layer launches about 40 kernels in a forward pass (configs/devices). A layer with experts waits for the
# device three times in it (docs/evidence.md).
_KERNELS = 40
_WAITS = 3


def where_time_goes() -> str:
    """Return the phases of three steps, what each rank does in them, and what would shorten them most."""
    parts = []
    for name, file, overrides in _STEPS:
        config, step = _predicted(CONFIGS_DIR / file, overrides)
        rows = [
            "| phase | seconds | largest parts | calls between ranks | kernels | waits of the host |",
            "|---|---|---|---|---|---|",
            *_phases(config, step),
        ]
        parts.append(f"**{name}**: {step.seconds:,.0f} s a step (`{file}`).\n\n" + "\n".join(rows))
        parts.append("Largest levers: " + "; ".join(_levers(CONFIGS_DIR / file, overrides, step)) + ".")
    parts.append(_with_and_without_kernels())
    return "\n\n".join(parts)


def _predicted(
    file: Path, overrides: Sequence[str], *, has_delta_kernels: bool = True
) -> tuple[PPOConfig, PredictedStep]:
    config = load_for_plan(PPOConfig, str(file), overrides).config
    lengths = expected_lengths(config)
    costs = PredictedCosts(assumed_profile(config), lengths, has_delta_kernels=has_delta_kernels)
    return config, costs.predict_step(config, plan_placement(config), read_architectures(config)[0])


def _phases(config: PPOConfig, step: PredictedStep) -> Iterator[str]:
    architectures, _ = read_architectures(config)
    work: dict[str, tuple[PassWork, int, bool]] = {}
    for role in model_roles(config):
        architecture = architectures[role.name]
        sparse = num_routing_layers(architecture, range(architecture.num_hidden_layers))
        of_role = role_work(config, role, architecture, expected_lengths(config))
        again = role.recomputation.how is Recompute.full
        work |= {name: (each, sparse, again) for name, each in of_role.items()}

    for name, time in step.phases.items():
        largest = sorted(time.parts.items(), key=lambda part: -part[1])[:3]
        counted = ("", "", "")
        if name in work:
            each, sparse, again = work[name]
            counts, _, launched, _ = each.stages[0]
            times = each.num_micro_batches * each.num_passes
            calls = sum(call.calls for call in counts.collectives) * times
            passes = 1 + again * bool(each.updates)
            waits = _WAITS * passes * sparse / len(each.order) * times
            counted = (f"{calls:,.0f}", f"{_KERNELS * launched * times:,.0f}", f"{waits:,.0f}")
        said = ", ".join(f"{part} {seconds:,.1f}" for part, seconds in largest)
        yield f"| `{name}` | {time.seconds:,.1f} | {said} | {' | '.join(counted)} |"


def _levers(file: Path, overrides: Sequence[str], step: PredictedStep) -> list[str]:
    saved = {
        said: step.seconds - _predicted(file, (*overrides, *options))[1].seconds
        for said, options in _LEVERS.items()
    }
    best = sorted(saved, key=lambda said: -saved[said])[:_NUM_LEVERS]
    return [f"{said} -{saved[said]:,.0f} s" for said in best]


def _with_and_without_kernels() -> str:
    rows = [
        "| run with gated delta nets | `update_actor` with flash-linear-attention | without | step with | without |",
        "|---|---|---|---|---|",
    ]
    for name in ("qwen3_next_80b_grpo.yaml", "qwen3.6_35b_a3b_grpo.yaml"):
        steps = [_predicted(CONFIGS_DIR / name, (), has_delta_kernels=each)[1] for each in (True, False)]
        updates = (f"{step.phases['update_actor'].seconds:,.0f} s" for step in steps)
        wholes = (f"{step.seconds:,.0f} s" for step in steps)
        rows.append(f"| `{name}` | {' | '.join((*updates, *wholes))} |")
    return "\n".join(rows)
