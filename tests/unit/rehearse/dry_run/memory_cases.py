"""Dry runs whose memory is compared with the plan's: roles of shipped runs, recomputation modes, kinds of stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megarl.config.layers import has_transformer_engine_modules, simulated_layers
from megarl.config.load import load_config, schema_of
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import ParallelConfig, RunConfig
from megarl.config.shipped import with_published_models
from megarl.config.validate import read_architectures
from megarl.plan.placement.layer_sizes import WORKSPACE_BYTES
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import distinct_ranks
from megarl.rehearse.dry_run.record import PredictedMemory, RankRecord, RankRequest, predicted_memory

CONFIGS = Path(__file__).parents[4] / "configs"
FROZEN = "-"  # recomputes nothing
# How far the plan may exceed what is measured.
HELD = 0.05
PEAK = 0.10
_COUNTED = 1e-4  # of a peak: numbers and flags outside the state, padding of Megatron's buffers


def recompute_modes(role: ModelRole, *, has_experts: bool) -> dict[str, list[str]]:
    """Return overrides by name.

    `full, half` recomputes the first half of each stage's layers. For a model with experts, whose dry run is
    slow, only the run's own mode is used.
    """
    if role.optim is None:
        return {FROZEN: []}
    if has_experts:
        return {role.recomputation.how.value: []}
    key = f"{role.name}.recompute"

    return {
        "none": [f"{key}=none"],
        "core_attn": [f"{key}=selective"],
        "mlp": [f"{key}=selective", f"{key}_modules=[mlp]"],
        "full, half": [f"{key}=full", f"{key}_num_layers={{half}}"],
        "full": [f"{key}=full"],
    }


class Case(NamedTuple):
    run: str
    role: str
    mode: str
    config: RunConfig
    rank: int


class Compared(NamedTuple):
    case: Case
    record: RankRecord
    plan: PredictedMemory


def cases_of(run: str) -> Iterator[Case]:
    """Yield the cases of a file in `configs/`, on a device with enough memory for all modes."""
    loaded = load_case(run, [])
    architectures = read_architectures(loaded)[0]

    for role in model_roles(loaded):
        for mode, overrides in recompute_modes(
            role, has_experts=architectures[role.name].experts is not None
        ).items():
            config = load_case(run, overrides)
            for rank in distinct_ranks(role.parallel):
                yield Case(run, role.name, mode, config, rank)


def load_case(run: str, overrides: list[str]) -> RunConfig:
    """Load a file in `configs/` with overrides, on a device without a limit and with the layers of a dry run.

    `{half}` in an override is half of the layers of a (virtual) stage.
    """
    path = str(CONFIGS / f"{run}.yaml")
    schema = schema_of(path)
    size = ["placement.device_memory_gb=null", "device=cuda"]

    # Two layers. In the plan all tokens continue in the last layer; in the engine prompt tokens do not.
    if run == "quickstart":
        size.append("data.max_response_length=64")
    known, _ = with_published_models(load_config(schema, path, size), path)
    name = overrides[0].partition(".")[0] if overrides else "actor"
    architecture = read_architectures(known)[0][name]
    parallel = role_of(known, name).parallel
    half = max(1, architecture.num_hidden_layers // _pieces(parallel) // 2)
    config = load_config(schema, path, [*size, *(override.format(half=half) for override in overrides)])
    whole = with_published_models(config, path)[0]

    return whole.with_sections(engine=replace(whole.engine, layers=simulated_layers(whole).layers))


def _pieces(parallel: ParallelConfig) -> int:
    return parallel.pipeline_parallel_size * (parallel.virtual_pipeline_parallel_size or 1)


def role_of(config: RunConfig, name: str) -> ModelRole:
    return next(role for role in model_roles(config) if role.name == name)


def rehearse_cases(cases: Iterable[Case], num_processes: int = 2) -> list[Compared]:
    """Simulate the cases and yield the records in their order."""
    asked = list(cases)
    shares = [asked[number::num_processes] for number in range(num_processes)]
    with ThreadPoolExecutor(num_processes) as threads:
        rehearsed = list(threads.map(lambda share: list(rehearse_ranks(map(_request, share), 1)), shares))
    records = {
        id(case): record
        for share, found in zip(shares, rehearsed, strict=True)
        for case, record in zip(share, found, strict=True)
    }

    return [Compared(case, records[id(case)], _predicted(case)) for case in asked]


def _request(case: Case) -> RankRequest:
    stages = role_of(case.config, case.role).parallel.pipeline_parallel_size
    return RankRequest(case.config, case.role, case.rank, max(2, stages))


def _predicted(case: Case) -> PredictedMemory:
    architecture = read_architectures(case.config)[0][case.role]
    return predicted_memory(case.config, role_of(case.config, case.role), architecture, case.rank)


def problems_of(compared: Iterable[Compared]) -> list[str]:
    """Return what is out of bounds, with its case."""
    return [
        f"{case.run}, {case.role}, {case.mode}, rank {case.rank}, {problem}"
        for case, record, plan in compared
        for problem in beyond_bounds(record, plan)
    ]


def measured_most(measured: int, above: float) -> float:
    """Return the bound for a small model, of which less than a page remains when its state is offloaded."""
    return measured * (1 + above) + 4096


def beyond_bounds(record: RankRecord, plan: PredictedMemory, *, is_near: bool = True) -> list[str]:
    """Return where the plan is below the measurement, or, if it should be near, too far above it."""
    if record.error is not None:
        return [record.error]
    held = {"build": plan.held, "offload": plan.stays, "restore": plan.held + plan.stays}
    problems = []
    # Routers use Transformer Engine's product, and its workspace, only if it is installed.
    workspace = 0 if has_transformer_engine_modules() else WORKSPACE_BYTES

    for phase in record.phases:
        if phase.name not in plan.peaks:  # a weight sync, whose buffers come from the plan
            continue
        # A dry run has only a few micro-batches of the batch. If Transformer Engine is installed, torch's
        # Adam is not used.
        unused = plan.roots if phase.name == "step" and has_transformer_engine_modules() else 0
        sizes = [
            (
                "peak",
                phase.peak,
                plan.peaks[phase.name],
                measured_most(phase.peak, PEAK) + plan.batches.get(phase.name, 0) + unused + workspace,
            )
        ]
        if phase.name in held:
            sizes.append(("held", phase.held, held[phase.name], measured_most(phase.held, HELD) + workspace))
        for name, measured, planned, most in sizes:
            is_below = planned < measured * (1 - _COUNTED) - 4096
            if is_below or (is_near and planned > most):
                problems.append(
                    f"{phase.name}: {name} is {measured:,} bytes, in the plan {planned:,} "
                    f"({planned / measured:.3f})"
                )

    return problems
