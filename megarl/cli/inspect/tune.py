"""`megarl tune CONFIG`: chooses placement, layouts and engines of a run by predicted step time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from megarl.cli.inspect.check import check_drawing
from megarl.cli.tables.console import output_console, print_line, table, table_of_numbers
from megarl.cli.tables.placement import fit_table, print_absent
from megarl.config.load import read_config, schema_of
from megarl.config.schema import PPOConfig, RolloutConfig
from megarl.config.sources import COMMAND_LINE, read_layers
from megarl.doctor.checks import load_for_plan
from megarl.doctor.run_inputs import find_inputs
from megarl.machine.errors import ConfigError, counted
from megarl.machine.files import write_whole
from megarl.plan.placement.dataflow import phases_of
from megarl.plan.search.search import ClusterResult, configured_step, search, search_clusters
from megarl.plan.search.solution import Solution, as_overrides, chosen_values, document, write_overrides
from megarl.plan.search.space import Rejections, Space, pinned_keys, units_of
from megarl.plan.search.variants import describe
from megarl.plan.step_time.device import DeviceProfile, assumed_profile, dump_device, load_device, with_budget
from megarl.plan.step_time.lengths import Lengths, expected_lengths
from megarl.plan.step_time.measured_run import fit_run
from megarl.plan.step_time.step import PredictedCosts

_LEVELS = ("placements", "layouts", "variants", "engines", "configurations")


class Tuned(NamedTuple):
    """The run to tune.

    Attributes:
        given: The overrides of the command line.
    """

    path: str
    given: Sequence[str]
    config: PPOConfig
    device: DeviceProfile
    lengths: Lengths


def run(config_path: str | None, overrides: Sequence[str], **options: Any) -> None:
    """Search, print the results, and write the files that are asked for.

    Raises:
        ConfigError: The run has errors that the search cannot change, or no configuration is valid.
        ValueError: An option is wrong.
    """
    if config_path is None:
        raise ValueError("give the CONFIG of the run to tune, or --calibrate FILE to measure this machine")
    wishes = argparse.Namespace(**options)
    check_drawing(wishes.plot, "--plot")

    if schema_of(config_path, overrides) is not PPOConfig:
        raise ValueError("tune: supervised fine-tuning is not searched; give the configuration of an RL run")

    for name, value, least in (
        ("--top", wishes.top, 1),
        ("--max-staleness", wishes.max_staleness, 0),
        ("--nodes", wishes.nodes, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} {value}: must be at least {least}")

    loaded = find_inputs(read_config(PPOConfig, config_path, overrides))
    # Errors in keys that the search chooses are not among these.
    config = _with_device(loaded.required(), wishes.device, _placement_given(config_path, overrides))
    console = output_console()
    device = _device(config, wishes, console)
    tuned = Tuned(config_path, overrides, loaded.config, device, _lengths(config, wishes.lengths))
    config = with_budget(config, device)

    print_absent(loaded.absent, console)
    if wishes.devices is None:
        best = _tune(tuned, _space(config, device, wishes, wishes.nodes), wishes, console)
    else:
        best = _compare(tuned, config, wishes, console)
    lengths = tuned.lengths
    print_line(
        console,
        f"assuming {device.name} with {config.placement.device_memory_gb:g} GiB for the plan, prompts of "
        f"{lengths.prompt:,} and responses of {lengths.response:,.0f} tokens on average",
        style="dim",
    )
    _finish(tuned, best, wishes, console)


def _placement_given(config_path: str, overrides: Sequence[str]) -> Collection[str]:
    """Return the names of the keys of `placement` on the command line."""
    given = [layer.values for layer in read_layers(config_path, overrides) if layer.source == COMMAND_LINE]
    return {name for values in given for name in values.get("placement", {})}


def _with_device(config: PPOConfig, name: str | None, given: Collection[str]) -> PPOConfig:
    """Return the configuration with the device of the option, and with the memory and nodes of that device.

    Values on the command line stay, and so do those of a file that names the same device.

    Args:
        name: The device; None if the option is not given.
        given: The names of the keys of `placement` on the command line.
    """
    placement = config.placement
    if name is None or name == placement.device_profile:
        return config

    if "device_memory_gb" not in given:
        placement = replace(placement, device_memory_gb=None)  # with_budget sets that of the device
    # A file may plan with a part of each node, but not with more devices than a node has.
    if "devices_per_node" not in given and placement.devices_per_node is not None:
        placement = replace(
            placement, devices_per_node=min(placement.devices_per_node, load_device(name).devices_per_node)
        )
    return config.with_sections(placement=replace(placement, device_profile=name))


def _device(config: PPOConfig, wishes: argparse.Namespace, console: Console) -> DeviceProfile:
    """Return the kind of device, fitted to a measured run if one is given."""
    device = assumed_profile(config)
    if wishes.from_run is None:
        if wishes.device_output is not None:
            raise ValueError(f"--device-output {wishes.device_output} requires --from-run")
        return device

    fitted, phases, lengths = fit_run(Path(wishes.from_run), device)
    console.print(fit_table(wishes.from_run, fitted, phases, lengths))
    if wishes.device_output is not None:
        dump_device(fitted, Path(wishes.device_output))
        print_line(console, f"{wishes.device_output}: the fitted device, for placement.device_profile")
    return fitted


def _lengths(config: PPOConfig, text: str | None) -> Lengths:
    if text is None:
        return expected_lengths(config)
    prompt, _, response = text.partition(",")
    try:
        means = float(prompt), float(response)
    except ValueError:
        raise ValueError(
            f"--lengths {text}: must be PROMPT,RESPONSE in mean tokens, such as 500,2000"
        ) from None
    return expected_lengths(config, *means)


def _space(
    config: PPOConfig,
    device: DeviceProfile,
    wishes: argparse.Namespace,
    nodes: int | None,
    per_node: int | None = None,
) -> Space:
    placement = config.placement
    size = per_node or placement.devices_per_node or device.devices_per_node
    num_nodes = nodes or placement.num_nodes
    return Space(
        config=config.with_sections(placement=replace(placement, num_nodes=num_nodes, devices_per_node=size)),
        pinned=pinned_keys(config, wishes.pin, ()),
        num_nodes=num_nodes,
        devices_per_node=size,
        max_staleness=wishes.max_staleness,
    )


def _pinned(space: Space, tuned: Tuned) -> Space:
    overridden = [override.partition("=")[0] for override in tuned.given]
    return replace(space, pinned=space.pinned | pinned_keys(space.config, (), overridden))


def _tune(tuned: Tuned, space: Space, wishes: argparse.Namespace, console: Console) -> Solution:
    """Search one cluster and print its results."""
    space = _pinned(space, tuned)
    costs = PredictedCosts(tuned.device, tuned.lengths)
    solutions, rejections = search(space, costs, wishes.top)
    for drawn in (_results(space, solutions), _choices(solutions), _phases(solutions)):
        console.print(drawn)
    print_line(console, _as_configured(space, costs, solutions[0]))
    console.print(_rejections(rejections))
    if wishes.json is not None:
        _write_json(wishes.json, document(space, tuned.config, solutions, rejections), console)
    if wishes.plot is not None:
        # Imported here, because it imports matplotlib, which would delay the tables.
        from megarl.cli.tables.plan_drawing import draw_step

        draw_step(solutions[0].step, Path(wishes.plot))
        print_line(console, f"drawn to {wishes.plot}")
    return solutions[0]


def _compare(tuned: Tuned, config: PPOConfig, wishes: argparse.Namespace, console: Console) -> Solution:
    """Search clusters of several sizes, print the best configuration of each, and return the best of all.

    Raises:
        ConfigError: No cluster has a valid configuration.
    """
    node = config.placement.devices_per_node or tuned.device.devices_per_node
    spaces = [
        _pinned(_space(config, tuned.device, wishes, max(1, size // node), min(size, node)), tuned)
        for size in _sizes(wishes.devices or "", node)
    ]
    results = list(search_clusters(spaces, PredictedCosts(tuned.device, tuned.lengths)))
    tokens = config.samples_per_step * tuned.lengths.row
    console.print(_clusters(results, tokens))
    for each in results:
        if each.problem:
            where = f"{counted(each.num_devices, 'device')}, max_staleness {each.max_staleness}"
            print_line(console, f"{where}: {each.problem}", style="yellow")
    found = [each.solution for each in results if each.solution is not None]
    if not found:
        raise ConfigError("tune", [f"none of the clusters {wishes.devices} has a valid configuration"])

    if wishes.plot is not None:
        from megarl.cli.tables.plan_drawing import draw_clusters

        draw_clusters(results, tokens, Path(wishes.plot))
        print_line(console, f"drawn to {wishes.plot}")
    if wishes.json is not None:
        _write_json(wishes.json, {"clusters": [_cluster(tuned, each, tokens) for each in results]}, console)

    # All clusters train on the same tokens per step, so the most tokens per GPU are the fewest GPU seconds.
    of_devices = wishes.objective == "tokens_per_gpu"
    return min(found, key=lambda each: each.seconds * (each.plan.num_devices if of_devices else 1))


def _sizes(text: str, node: int) -> list[int]:
    """Return the cluster sizes of the option `--devices`."""
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if any(size < 1 or (size > node and size % node) for size in sizes):
        raise ValueError(
            f"--devices {text}: must be numbers of devices, such as 8,16,32, and whole nodes of {node} "
            "if they are more than one node"
        )
    return sizes


def _cluster(tuned: Tuned, result: ClusterResult, tokens: float) -> dict[str, Any]:
    values: dict[str, Any] = {"num_devices": result.num_devices, "max_staleness": result.max_staleness}
    if result.solution is None:
        return {**values, "problem": result.problem}
    return {
        **values,
        "step_s": result.solution.seconds,
        "tokens_per_device_s": tokens / result.solution.seconds / result.num_devices,
        "overrides": chosen_values(tuned.config, result.solution),
    }


def _write_json(path: str, values: Mapping[str, Any], console: Console) -> None:
    write_whole(Path(path), json.dumps(values, indent=2) + "\n")
    print_line(console, f"results written to {path}")


def _finish(tuned: Tuned, best: Solution, wishes: argparse.Namespace, console: Console) -> None:
    """Print the best configuration's keys, or write them to a file that is checked as `megarl check` does."""
    if wishes.output is None:
        overrides = " ".join(as_overrides(chosen_values(tuned.config, best)))
        print_line(
            console, f"overrides of the best configuration: {overrides or 'none, the file has its values'}"
        )
        return
    write_overrides(Path(wishes.output), tuned.path, tuned.config, tuned.given, best)
    load_for_plan(PPOConfig, wishes.output)
    print_line(console, f"{wishes.output}: the best configuration, for `megarl check` and `train`")


# ---- tables


def _results(space: Space, solutions: Sequence[Solution]) -> Table:
    """Return a table of the best configurations, and of the phase in which each loses against the first."""
    size = f"{space.num_nodes} x {counted(space.devices_per_node, 'device')}"
    best = solutions[0]
    return table(
        f"Fastest predicted configurations on {size}",
        ("", "step, s", "placement", "GiB", "slower than 1 in"),
        [
            (
                str(number),
                f"{each.seconds:,.4g}",
                _pools(each),
                f"{max(device.peak for device in each.memory) / 2**30:,.1f}",
                "" if each is best else _slower_in(each, best),
            )
            for number, each in enumerate(solutions, 1)
        ],
        caption="GiB: the fullest device in its fullest phase",
    )


def _choices(solutions: Sequence[Solution]) -> Table:
    """Return a table of the layouts of the models, and of the engines."""
    rows: list[tuple[str, str, str]] = []
    for number, each in enumerate(solutions, 1):
        first = str(number)
        for name, roles in units_of(each.config).items():
            rows.append((first, name, describe(roles[0])))
            first = ""
        rows.append(("", "rollout", _engines(each.config.rollout)))

    return table(
        "Chosen",
        ("", "role", "layout"),
        rows,
        caption="TP, PP, VPP, CP, EP, ETP, DP: tensor, pipeline, virtual pipeline, context, expert, expert "
        "tensor and data parallel size",
    )


def _phases(solutions: Sequence[Solution]) -> Table:
    """Return a table of the seconds of each phase."""
    phases = [each.step.phases for each in solutions]
    names = list(dict.fromkeys(name for each in phases for name in each))
    return table_of_numbers(
        "Seconds of each phase",
        {
            str(number): [f"{each[name].seconds:,.1f}" if name in each else "" for name in names]
            for number, each in enumerate(phases, 1)
        },
        names,
    )


def _pools(solution: Solution) -> str:
    pools = ", ".join(f"{' + '.join(pool.units)} {pool.num_devices:,}" for pool in solution.pools)
    return f"{solution.config.placement.strategy.value}: {pools}"


def _engines(rollout: RolloutConfig) -> str:
    expert = f", EP {rollout.expert_parallel_size}" if rollout.expert_parallel_size > 1 else ""
    share = rollout.memory_share_of(rollout.engine)
    memory = "" if share is None else f", {share:.0%} of the memory"
    ahead = f", max_staleness {rollout.max_staleness}" if rollout.max_staleness else ""
    sizes = f"{rollout.num_replicas:,} x TP {rollout.tensor_parallel_size}{expert}"
    return f"{sizes}, {rollout.max_concurrency:,} sequences{memory}{ahead}"


def _slower_in(solution: Solution, best: Solution) -> str:
    """Name the phase in which a configuration loses most against the best one, with the part of it."""
    names = [phase.name for phase in phases_of(solution.plan.roles)]
    ours, theirs = solution.step.phases, best.step.phases
    lost = {
        name: ours[name].seconds - theirs[name].seconds for name in names if name in ours and name in theirs
    }
    phase = max(lost, key=lambda name: lost[name])

    # No phase is slower, but fewer phases run at the same time.
    if lost[phase] <= 0:
        return "no phase, but phases follow each other"

    parts = {
        name: seconds - theirs[phase].parts.get(name, 0.0) for name, seconds in ours[phase].parts.items()
    }
    part = max(parts, key=lambda name: parts[name])
    return f"{phase} +{lost[phase]:,.3g} s ({part} +{parts[part]:,.3g})"


def _as_configured(space: Space, costs: PredictedCosts, best: Solution) -> str:
    """Say how much faster the best configuration is than the file's."""
    try:
        step = configured_step(space, costs)
    except ConfigError as error:
        first, *others = error.problems
        more = f"; and {counted(len(others), 'more problem')}" if others else ""
        return f"as configured, the run is not valid on these devices: {first}{more}"
    faster = f"1 is {step.seconds / best.seconds:.2f} times as fast"
    return f"as configured, a step takes {step.seconds:,.4g} s; {faster}"


def _rejections(rejections: Rejections) -> Table:
    """Return what was considered at each level, and why the rest was left out."""
    rows: list[tuple[str, ...]] = []
    for level in _LEVELS:
        first = (level, f"{rejections.considered.get(level, 0):,}", f"{rejections.kept(level):,}")
        reasons = [(reason, count) for (name, reason), count in rejections.rejected.items() if name == level]
        if not reasons:
            rows.append((*first, "", "", ""))
        for reason, count in sorted(reasons, key=lambda each: -each[1]):
            rows.append((*first, reason.value, f"{count:,}", rejections.example(level, reason)))
            first = ("", "", "")

    return table(
        "Considered and left out", ("level", "considered", "kept", "reason", "number", "for example"), rows
    )


def _clusters(results: Sequence[ClusterResult], tokens: float) -> Table:
    """Return the step time and the throughput of each cluster.

    Args:
        tokens: The prompt and response tokens of a step.
    """
    return table(
        "Predicted step by cluster size",
        ("devices", "max_staleness", "step, s", "tokens/s per device", "placement"),
        [
            (
                f"{each.num_devices:,}",
                str(each.max_staleness),
                *(
                    ("-", "-", "no valid configuration")
                    if each.solution is None
                    else (
                        f"{each.solution.seconds:,.4g}",
                        f"{tokens / each.solution.seconds / each.num_devices:,.0f}",
                        _pools(each.solution),
                    )
                ),
            )
            for each in results
        ],
    )
