"""`megarl check CONFIG --dry-run`: a dry run of a role's CUDA engine on fake devices, rank by rank.

It prints memory, collectives and host-device synchronizations. Of the models it reads only `config.json`.
This module does not import torch: the processes of the ranks do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.table import Table

from megarl.cli.tables.console import output_console, print_line, print_lines, progress_line, table
from megarl.cli.tables.placement import print_absent
from megarl.config.layers import simulated_layers
from megarl.config.load import read_config
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, ParallelConfig, PPOConfig, RoutingReplay, RunConfig
from megarl.config.validate import read_architectures
from megarl.doctor.checks import divided_findings
from megarl.doctor.run_inputs import find_inputs
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.plan.placement.plan import plan_placement
from megarl.rehearse.dry_run.processes import rehearse_ranks
from megarl.rehearse.dry_run.ranks import chosen_ranks, hangs, rounded_sums
from megarl.rehearse.dry_run.record import (
    SHARED,
    UNEVEN,
    PredictedMemory,
    RankRecord,
    RankRequest,
    predicted_memory,
)
from megarl.weights.plan import NUM_IPC_BUFFERS
from megarl.weights.sync.forecast import WeightForecast, forecast_weights

MISTAKES = 2

_MOST_PLACES = 12  # limit of listed synchronizations of a rank
_WORST_CASES = {
    SHARED: "two rows share a prompt, so that context-parallel ranks gather keys and values",
    UNEVEN: "one expert has twice its share of the tokens",
}


def run(
    config_path: str,
    overrides: Sequence[str],
    role_name: str = "actor",
    ranks: str = "distinct",
    json_path: str | None = None,
) -> int:
    """Run the dry run, and return 0, or 2 if the engine would fail or hang.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: The role or a rank does not exist, the layers cannot be simulated, or the device guard
            cannot be compiled.
    """
    config, absent = _read(config_path, overrides)

    # The run's layers on a GPU. The simulation provides routes, so it does not matter where they come from.
    layers, why = simulated_layers(config)
    config = config.with_sections(
        engine=replace(config.engine, layers=layers, routing_replay=RoutingReplay.off)
    )

    role = _role(config, role_name)
    architectures, _ = read_architectures(config)
    numbers = chosen_ranks(ranks, role.parallel)
    # Enough micro-batches to fill the pipeline once.
    num_micro_batches = max(2, role.parallel.pipeline_parallel_size)
    forecast = _forecast(config, role, architectures)
    records = _rehearse(config, role, numbers, num_micro_batches, forecast)
    predicted = {
        record.rank: predicted_memory(config, role, architectures[role.name], record.rank)
        for record in records
    }
    mistakes = _mistakes(records)

    console = output_console()
    for record in records if ranks != "all" else _fullest(records):
        console.print(
            memory_table(record, predicted[record.rank], config.placement.device_memory_gb, num_micro_batches)
        )
        console.print(collectives_table(record))
        console.print(waits_table(record))

    print_absent(absent, console)
    print_line(console, f"Layers: {layers.value} ({why}).")
    print_line(console, _unseen(role.parallel, numbers, ranks))
    sends_changes = isinstance(config, PPOConfig) and config.resharding.delta
    if forecast is not None and sends_changes and (kept_bytes := max(forecast.acknowledged)):
        print_line(
            console,
            f"Host memory: a rank keeps up to {kept_bytes / 2**20:,.2f} MiB, the last weights of the engines "
            f"(resharding.delta=true). Simulated: a weight sync that sends everything.",
        )
    print_lines(console, mistakes, "error: ", "red")
    if json_path is not None:
        _write(Path(json_path), records, predicted, mistakes)
    ranks_of_role = f"{len(records)} of {counted(role.parallel.world_size, 'rank')} of the {role.name}"
    found = counted(len(mistakes), "error") if mistakes else "no errors"
    print_line(console, f"{config_path}: simulated {ranks_of_role}, {found}")

    return MISTAKES if mistakes else 0


def _read(config_path: str, overrides: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return the configuration for GPUs, and what is not on this machine. Raises the errors of `run`."""
    loaded = read_config(RunConfig, config_path, overrides)

    # Resolve the device for the run's machines, not for this one, because model.dtype depends on it.
    if loaded.config.device is Device.auto:
        loaded = read_config(RunConfig, config_path, [*overrides, "device=cuda"])
    loaded = find_inputs(loaded)
    violations, absences = divided_findings(loaded, starts_elsewhere=True)
    config = loaded.required(violations)
    absent = [*loaded.absent, *map(str, absences)]
    if config.device is Device.cpu:
        raise ValueError(
            f"{config_path} has device: cpu, but the dry run simulates GPUs; add device=cuda to simulate the "
            f"run on GPUs"
        )
    return config, absent


def _rehearse(
    config: RunConfig,
    role: ModelRole,
    ranks: Sequence[int],
    num_micro_batches: int,
    forecast: WeightForecast | None,
) -> list[RankRecord]:
    """Simulate ranks of a role, and return their records in the order of ranks."""
    requests = [RankRequest(config, role.name, rank, num_micro_batches) for rank in ranks]
    if forecast is not None:
        requests = [_with_push(request, forecast) for request in requests]
    records: list[RankRecord] = []

    num_ranks = counted(len(ranks), "rank")
    with progress_line(f"rehearse: loading torch and Megatron-Core for {num_ranks}") as show:

        def report(rank: int, phase: str) -> None:
            show(f"rehearse: rank {rank}: {phase} finished; {len(records)} of {num_ranks} done")

        for record in rehearse_ranks(requests, num_processes=len(os.sched_getaffinity(0)), report=report):
            records.append(record)

    # Ranks finish in any order.
    return sorted(records, key=lambda record: record.rank)


def _role(config: RunConfig, name: str) -> ModelRole:
    roles = {role.name: role for role in model_roles(config)}
    if name not in roles:
        raise ValueError(f"--role {name}: this run has {', '.join(roles)}")
    if (owner := roles[name].base_of) is not None:
        raise ValueError(
            f"--role {name}: it is the model of {owner} without its adapters, which has no weights of its "
            f"own; simulate {owner}"
        )
    return roles[name]


def _forecast(
    config: RunConfig, role: ModelRole, architectures: Mapping[str, Architecture]
) -> WeightForecast | None:
    """Return the weight sync of the actor; None for other roles, and if weights go through files."""
    if not isinstance(config, PPOConfig) or role.name != "actor":
        return None
    return forecast_weights(config, plan_placement(config), architectures["actor"])


def _with_push(request: RankRequest, forecast: WeightForecast) -> RankRequest:
    """Add what a rank sends in a weight sync."""
    # Only ranks that share a device with an engine need IPC buffers.
    shares_device = forecast.trainer_places[request.rank].device in {
        place.device for place in forecast.engine_places
    }
    return request._replace(
        sends=forecast.plan.of_source(request.rank),
        buffer_bytes=NUM_IPC_BUFFERS * forecast.message_bytes if shares_device else 0,
    )


def _mistakes(records: Sequence[RankRecord]) -> list[str]:
    """Return the errors of the ranks.

    Hangs are searched for only if all ranks finished, because the remaining calls of a failed rank are
    unknown.
    """
    failed = [f"rank {record.rank}: {record.error}" for record in records if record.error is not None]
    return failed or [*hangs(records), *rounded_sums(records)]


def _fullest(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Return the rank with the highest peak of each stage."""
    stages = dict.fromkeys(record.pipeline_rank for record in records)
    return [
        max((each for each in records if each.pipeline_rank == stage), key=lambda each: each.peak)
        for stage in stages
    ]


def _unseen(parallel: ParallelConfig, numbers: Sequence[int], ranks: str) -> str:
    told = (
        "Not simulated: allocator fragmentation, NCCL buffers, the CUDA context, the overlap of streams, "
        "and timing."
    )
    if ranks == "all":
        return (
            f"{told} Verified: the collectives of {counted(parallel.world_size, 'rank')}, within each group "
            f"and in their order across groups."
        )

    shown = ", ".join(map(str, numbers))
    return (
        f"{told} Simulated: ranks {shown} of {parallel.world_size}. Not verified, except among these ranks: "
        f"that the ranks of a group make the same calls in the same order, and that each stage receives what "
        f"the previous one sends; use --ranks all to verify all ranks."
    )


def _write(
    path: Path,
    records: Sequence[RankRecord],
    predicted: Mapping[int, PredictedMemory],
    mistakes: Sequence[str],
) -> None:
    ranks = [{**_plain(record), "plan": predicted[record.rank]._asdict()} for record in records]
    path.write_text(json.dumps({"ranks": ranks, "mistakes": list(mistakes)}, indent=1), encoding="utf-8")


def _plain(record: RankRecord) -> dict[str, object]:
    """Convert a record to plain values. Named tuples become mappings instead of lists in JSON."""
    phases = [
        {
            **asdict(phase),
            "collectives": [call._asdict() for call in phase.collectives],
            "waits": [wait._asdict() for wait in phase.host_syncs],
            "awaits": [each._asdict() for each in phase.awaits],
        }
        for phase in record.phases
    ]
    return {**asdict(record), "phases": phases}


def memory_table(
    record: RankRecord, predicted: PredictedMemory, device_gb: float | None, num_micro_batches: int
) -> Table:
    context = f"context rank {record.context_rank}, " if record.context_rank else ""
    place = (
        f"stage {record.pipeline_rank}, tensor rank {record.tensor_rank}, {context}data rank "
        f"{record.data_rank}"
    )
    planned = {name: f"{peak / 2**30:,.2f}" for name, peak in predicted.peaks.items()}
    rows = [
        (
            phase.name,
            f"{phase.held / 2**30:,.2f}",
            f"{phase.peak / 2**30:,.2f}",
            planned.get(phase.name, ""),
            f"{len(phase.collectives):,}",
            f"{sum(wait.times for wait in phase.host_syncs):,}",
            f"{phase.flops / 1e12:,.1f}",
        )
        for phase in record.phases
    ]

    size = (
        "device memory is not set (placement.device_memory_gb)"
        if device_gb is None
        else f"device memory for tensors: {device_gb:g} GiB"
    )
    explained = "".join(
        f"; {suffix.removeprefix(', ')}: {meaning}"
        for suffix, meaning in _WORST_CASES.items()
        if any(phase.name.endswith(suffix) for phase in record.phases)
    )
    return table(
        f"Rank {record.rank} ({place}): {record.num_parameters:,} parameters",
        ("phase", "after GiB", "peak GiB", "planned peak", "collectives", "syncs", "TFLOP"),
        rows,
        caption=f"tensor memory, {counted(num_micro_batches, 'micro-batch')} per pass; {size}{explained}",
    )


def collectives_table(record: RankRecord) -> Table:
    # Sum the calls of the same kind, group and type in each phase.
    sizes: dict[tuple[str, str, str, str, str], list[int]] = {}
    for phase in record.phases:
        for call in phase.collectives:
            key = (phase.name, call.kind, call.group, str(len(call.ranks)), call.dtype)
            sizes.setdefault(key, []).append(call.nbytes)

    return table(
        f"Collectives of rank {record.rank}",
        ("phase", "kind", "group", "ranks", "type", "calls", "MiB"),
        [(*key, f"{len(each):,}", f"{sum(each) / 2**20:,.1f}") for key, each in sizes.items()],
        caption="MiB: the larger of input and output of one rank, summed over all calls",
        wraps="group",
    )


def waits_table(record: RankRecord) -> Table:
    """Return the locations with the most host-device synchronizations."""
    waits = sorted(
        ((wait.times, phase.name, wait) for phase in record.phases for wait in phase.host_syncs), reverse=True
    )
    others = waits[_MOST_PLACES:]
    rest = f"and {sum(count for count, _, _ in others):,} times at {counted(len(others), 'other location')}"
    return table(
        f"Host-device synchronizations of rank {record.rank}",
        ("phase", "kind", "times", "location"),
        [(phase, wait.kind, f"{count:,}", wait.place) for count, phase, wait in waits[:_MOST_PLACES]],
        caption=rest if others else None,
    )
