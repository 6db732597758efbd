"""A placement as tables: processes, concurrency, memory of the fullest devices, weight sync, predicted step.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table

from megarl.cli.tables.console import print_line, print_lines, table, table_of_numbers
from megarl.config.megatron_options import uncounted_options
from megarl.config.roles import model_roles
from megarl.config.schema import Device, EngineDType, PPOConfig, RunConfig
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.models.counts import num_parameters
from megarl.plan.placement.dataflow import OffloadPlan, overlaps
from megarl.plan.placement.memory import DeviceMemory, budget_problems, plan_memory, refuses
from megarl.plan.placement.model_state import Usage, snapshot_bytes, weight_bytes
from megarl.plan.placement.placement_plan import GroupPlan, PlacementPlan, ProcessPlan
from megarl.plan.placement.transport import choose_transport
from megarl.plan.step_time.device import DeviceProfile, PhaseTime
from megarl.plan.step_time.lengths import Lengths
from megarl.plan.step_time.step import PredictedStep
from megarl.weights.sync.forecast import forecast_weights

_MOST_PARTS = 3


def print_placement(
    config: RunConfig,
    plan: PlacementPlan,
    architectures: Mapping[str, Architecture],
    console: Console,
    with_push: bool = True,
) -> None:
    """Print the placement.

    If the configuration allows devices to exceed their memory, a warning names each of them.

    Args:
        with_push: Also print the weight sync, whose plan takes seconds for a model with many experts.
    """
    memory = plan_memory(config, plan, architectures)
    console.print(
        placement_table(
            plan, generates_ahead=isinstance(config, PPOConfig) and config.rollout.max_staleness > 0
        )
    )
    console.print(memory_table(memory))
    console.print(parts_table(memory))
    if snapshots := snapshot_bytes(config, plan, architectures):
        columns = {"fullest node": [_gib(max(snapshots.values()))]}
        console.print(table_of_numbers("Snapshots in host memory, GiB", columns, ["two, with copies"]))
    if with_push and isinstance(config, PPOConfig):
        rows = _push_rows(config, plan, architectures["actor"])
        console.print(table("Weight sync", ("quantity", "value", "from"), rows))

    print_lines(console, memory_warnings(config, memory), "warning: ", "yellow")


def memory_warnings(config: RunConfig, memory: list[DeviceMemory]) -> Iterator[str]:
    """Yield what the memory plan does not count, and the devices that exceed their memory."""
    for role in model_roles(config):
        if names := uncounted_options(role.megatron):
            yield (
                f"the memory plan of {role.name} does not count {', '.join(names)} of {role.megatron_key}, "
                "which changes its working memory; measure it with a short run"
            )

    # If the configuration refuses such a plan, the command has already ended.
    if not refuses(config):
        yield from budget_problems(config, memory)


def print_absent(lines: Sequence[str], console: Console) -> None:
    """Print what is missing on this machine, one line each."""
    print_lines(console, lines, "not on this machine: ", "yellow")


def placement_table(plan: PlacementPlan, *, generates_ahead: bool = False) -> Table:
    return table(
        f"Placement: {plan.strategy.value} on {plan.num_nodes} x {counted(plan.devices_per_node, 'device')}",
        ("pool", "process", "roles", "node", "device"),
        [
            (
                group.pool,
                f"{group.name} {number_spans(ranks)}",
                " + ".join(group.roles),
                number_spans(nodes),
                devices,
            )
            for group in plan.groups
            for ranks, nodes, devices in _folded(group)
        ],
        caption=_turns(plan, generates_ahead),
        wraps="roles",
    )


def _folded(group: GroupPlan) -> Iterator[tuple[list[int], list[int], str]]:
    """Yield the ranks, nodes and devices of a group, one row for consecutive nodes with the same devices."""
    by_node = [
        (node, list(processes))
        for node, processes in groupby(group.processes, key=lambda process: process.node)
    ]
    # Consecutive nodes with equal devices fold into one row.
    for devices, nodes in groupby(by_node, key=lambda each: _devices(each[1])):
        rows = list(nodes)
        yield (
            [process.rank for _, processes in rows for process in processes],
            [node for node, _ in rows],
            f"{devices} on each" if len(rows) > 1 and group.uses_devices else devices,
        )


def _devices(processes: Sequence[ProcessPlan]) -> str:
    """Return the devices of a node's processes, grouped by process if a process has several."""
    sizes = {len(process.devices) for process in processes}
    if sizes == {0}:
        return "cpu"
    if max(sizes) == 1:
        return number_spans([process.devices[0] for process in processes])
    if len(processes) == 1:
        return number_spans(processes[0].devices)

    return "; ".join(number_spans(process.devices) for process in processes)


def number_spans(numbers: Sequence[int]) -> str:
    """Format numbers in ascending order with consecutive ones joined, such as 0-7, 16-23."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])

    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


def _turns(plan: PlacementPlan, generates_ahead: bool) -> str:
    """Describe which roles share devices in time, and what runs concurrently."""
    turns = OffloadPlan(plan)
    groups = {plan.group_of(role).name: turns.takes_turns_with(role) for role in plan.roles}
    turns_between = sorted(
        {
            tuple(sorted({name, *(plan.group_of(other).name for other in others)}))
            for name, others in groups.items()
            if others
        }
    )
    concurrent = ", ".join(
        f"{one} | {other}" for one, other in overlaps(plan, generates_ahead=generates_ahead)
    )
    lines = (
        [f"time sharing: {'; '.join(' and '.join(each) for each in turns_between)}"]
        if turns_between
        else ["no time sharing"]
    )

    return "\n".join([*lines, *([f"concurrent: {concurrent}"] if concurrent else [])])


def memory_table(memory: Sequence[DeviceMemory]) -> Table:
    """Return the memory of the fullest device of each pool in each phase, in GiB."""
    phases = list(memory[0].phases)
    return table_of_numbers(
        "Memory of the fullest device of each pool, GiB",
        {
            pool: [_gib(device.total(phase)) for phase in phases]
            for pool, device in fullest_devices(memory).items()
        },
        phases,
        "activations and KV cache are upper bounds; the CUDA context is not included",
    )


def parts_table(memory: Sequence[DeviceMemory]) -> Table:
    """Return the memory of each role on the fullest devices, each kind of memory at its peak."""
    # The kinds of memory peak in different phases, so each is shown at its own peak.
    kinds = ("parameters", "gradients", "optimizer", "activations", "kv_cache", "buckets")
    is_pinned = any(device.pinned[role] for device in memory for role in device.pinned)
    columns: dict[str, list[str]] = {}

    for pool, device in fullest_devices(memory).items():
        for role in next(iter(device.phases.values())):
            usages: list[Usage] = [phase[role] for phase in device.phases.values()]
            most = [max(getattr(usage, kind) for usage in usages) for kind in kinds]
            name = f"{pool}: {role}" if role in columns else role
            columns[name] = list(map(_gib, [*most, device.pinned[role]] if is_pinned else most))

    rows = [kind.replace("_", " ") for kind in kinds]
    title = "Peak memory of each role on these devices, GiB"
    if not is_pinned:
        return table_of_numbers(title, columns, rows)
    return table_of_numbers(
        title,
        columns,
        [*rows, "on host"],
        "on host: pinned memory of the node for offloaded data and engines' last weights",
    )


def _push_rows(
    config: PPOConfig, plan: PlacementPlan, policy: Architecture
) -> Iterator[tuple[str, str, str]]:
    """Yield the transport, volume and rounds of the weight sync after an update."""
    resharding = config.resharding
    transport = choose_transport(config, plan)
    yield "transport", transport.value, f"resharding.transport={resharding.transport.value}"

    # Without a forecast, the weights are transferred through files.
    if (forecast := forecast_weights(config, plan, policy)) is None:
        size = num_parameters(policy.base) * weight_bytes(config.model.dtype)
        yield "medium", "files", "in trainer.output_dir, which all nodes must see"
        yield "written, and read by each engine", size_range([size]), "model.dtype"
        if resharding.delta:
            yield "in later syncs", "only what changed", "resharding.delta=true"
    else:
        about = "about " if config.rollout.tensor_parallel_size > policy.num_key_value_heads else ""
        yield (
            "received per engine rank",
            about + size_range(forecast.received),
            f"{counted(len(forecast.received), 'rank')}, only their own shards",
        )
        yield "sent per trainer rank", about + size_range(forecast.sent), counted(len(forecast.sent), "rank")
        if transport.needs.shares_devices:
            yield (
                "sent to other devices",
                about + size_range(forecast.sent_away),
                "shards that the trainer rank on the engine rank's device does not have",
            )
        smaller = ", less on CPU" if transport.needs.shares_devices and config.device is Device.auto else ""
        largest = (
            f"at most {size_range([forecast.message_bytes])} per rank: "
            f"resharding.bucket_mb={resharding.bucket_mb:g}{smaller}"
        )
        if resharding.delta:
            yield (
                "kept in host memory per trainer rank",
                size_range(forecast.acknowledged),
                "the last weights of the engines: resharding.delta=true",
            )
        if config.rollout.dtype is EngineDType.fp8:
            yield "dtype", "fp8, with a scale for each block of 128 x 128", "rollout.dtype=fp8"
        yield "rounds", f"{forecast.plan.num_rounds:,}", largest

    if config.actor.served_adapters is not None:
        nbytes = size_range([num_parameters(policy, trained_only=True) * weight_bytes(config.model.dtype)])
        # Engines that share devices release the model in each step, so that all of it is sent again.
        is_kept = not OffloadPlan(plan).engines_move
        sent = ", ".join(("adapters", *config.actor.lora.modules_to_save))
        which = f"{sent}, sent alone in later syncs" if is_kept else f"{sent}, sent after the model"
        yield which, nbytes, "actor.lora.sync=adapter"

    yield "verification", resharding.verify.value, "resharding.verify"


def size_range(sizes: Sequence[int]) -> str:
    """Format the minimum and maximum of some sizes in bytes."""
    scale, unit = (2**30, "GiB") if max(sizes) >= 2**30 else (2**20, "MiB")
    least, most = (f"{size / scale:,.2f}" for size in (min(sizes), max(sizes)))
    return f"{least} {unit}" if least == most else f"{least} to {most} {unit}"


def fullest_devices(memory: Sequence[DeviceMemory]) -> dict[str, DeviceMemory]:
    """Return the device of each pool with the highest peak."""
    pools = dict.fromkeys(device.pool for device in memory)
    return {
        pool: max((device for device in memory if device.pool == pool), key=lambda device: device.peak)
        for pool in pools
    }


def _gib(nbytes: int) -> str:
    size = nbytes / 2**30
    return "-" if nbytes == 0 else f"{size:,.2f}" if size >= 0.01 else f"{size:.2g}"


# ---- the predicted step


def print_predicted_step(
    step: PredictedStep, device: DeviceProfile, lengths: Lengths, console: Console
) -> None:
    """Print the predicted step, and what the prediction assumes."""
    console.print(step_table(step))
    print_line(
        console,
        f"assuming {device.name}, prompts of {lengths.prompt:,} and responses of {lengths.response:,.0f} "
        f"tokens on average; see placement.device_profile",
        style="dim",
    )


def step_table(step: PredictedStep) -> Table:
    """Return the schedule of a step: when each phase begins, how long it takes, and its largest parts."""
    rows = [
        (
            phase.name,
            ", ".join(phase.pools),
            f"{phase.start_s:,.1f}",
            f"{phase.time.seconds:,.1f}",
            f"{phase.time.seconds / step.seconds:.0%}",
            largest_parts(phase.time),
        )
        for phase in step.schedule
    ]
    driver_s = step.seconds - max(phase.end_s for phase in step.schedule)
    return table(
        f"Predicted step: {step.seconds:,.4g} s, {step.tokens_per_device_s:,.0f} tokens/s per device",
        ("phase", "pools", "begins s", "seconds", "share", "largest parts"),
        rows,
        caption=f"and {driver_s:,.1f} s of the driver: requests, scoring and metrics of samples",
    )


def fit_table(
    run_dir: str,
    fitted: DeviceProfile,
    phases: Mapping[str, tuple[float, float, float]],
    lengths: Lengths,
) -> Table:
    """Return the measured phases of a run with their predictions before and after the fit (`fit_run`)."""
    constants = {**asdict(fitted.efficiency), "sample_ms": fitted.sample_ms}
    changed = ", ".join(f"{name} {value:.3g}" for name, value in constants.items())
    return table(
        f"Phases of {run_dir}, s",
        ("phase", "measured", "predicted before", "predicted after"),
        [(name, *(f"{each:,.4g}" for each in seconds)) for name, seconds in phases.items()],
        caption=f"medians of the last steps, prompts of {lengths.prompt:,} and responses of "
        f"{lengths.response:,.0f} tokens on average\nfitted: {changed}",
    )


def largest_parts(time: PhaseTime) -> str:
    """Name the largest parts of a phase with their shares."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts)
