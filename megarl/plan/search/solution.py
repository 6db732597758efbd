"""The results of a search, also as configuration files and as a document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megarl.config.load import plain_values
from megarl.config.schema import PPOConfig
from megarl.config.shipped import is_shipped
from megarl.config.sources import BASE, GROUPS
from megarl.config.values import contents_of
from megarl.machine.files import write_whole
from megarl.plan.placement.memory import DeviceMemory
from megarl.plan.placement.placement_plan import PlacementPlan
from megarl.plan.search.space import Pool, Rejections, Space, free_keys, units_of
from megarl.plan.step_time.step import PredictedStep

# Keys that a search sets besides those that it chooses.
_GIVEN = ("num_nodes", "devices_per_node", "device_memory_gb", "device_profile")


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A complete configuration that `megarl check` accepts, with its predicted step."""

    config: PPOConfig
    plan: PlacementPlan
    memory: Sequence[DeviceMemory]
    step: PredictedStep
    pools: tuple[Pool, ...]

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def kind(self) -> tuple[object, ...]:
        """The pools and parallel sizes, which distinguish it in a list of results."""
        rollout = self.config.rollout
        return (
            self.pools,
            tuple(
                replace(roles[0].parallel, virtual_pipeline_parallel_size=None)
                for roles in units_of(self.config).values()
            ),
            (rollout.num_replicas, rollout.tensor_parallel_size),
            rollout.max_staleness > 0,
        )


def chosen_values(original: PPOConfig, solution: Solution) -> dict[str, Any]:
    """Return the values of a solution that differ from those of the run's file, by dotted key."""
    before = contents_of(original)
    after = contents_of(solution.config)
    keys = (*free_keys(solution.config), *(f"placement.{name}" for name in _GIVEN))
    return {key: value for key in keys if (value := _value(after, key)) != _value(before, key)}


def _value(values: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        values = values.get(name, {}) if isinstance(values, Mapping) else {}
    return None if values == {} else values


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Return values as overrides for a command line, `key=value`."""
    return [f"{key}={_in_one_line(value)}" for key, value in values.items()]


def _in_one_line(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...").replace(", ", ",").replace(": ", ":")


def write_overrides(
    path: Path, config_path: str, original: PPOConfig, given: Sequence[str], solution: Solution
) -> None:
    """Write a file that inherits the run's file, with a command line's overrides and a solution's values.

    Args:
        path: The file to write.
        original: The run with the overrides of the command line.
        given: The overrides of the command line.
    """
    values: dict[str, Any] = {BASE: _base(path, config_path)}
    for key, value in (*_given_values(original, given), *chosen_values(original, solution).items()):
        *sections, name = key.split(".")
        inside = values
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    header = f"# Chosen by megarl tune: {solution.seconds:,.4g} s per step are predicted.\n"
    write_whole(path, header + yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=118))


def _base(path: Path, config_path: str) -> str:
    # A shipped file has the same name in every folder.
    if not os.path.exists(config_path) or (
        is_shipped(Path(config_path)) and config_path.startswith("configs/")
    ):
        return config_path
    return os.path.relpath(config_path, path.parent)


def _given_values(original: PPOConfig, given: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of overrides, with absolute paths of inputs."""
    values = plain_values(original)
    for override in given:
        key, _, written = override.partition("=")
        if key in GROUPS:
            yield f"{key}.{BASE}", yaml.safe_load(written)
        else:
            yield key, _value(values, key)


def document(
    space: Space, original: PPOConfig, solutions: Sequence[Solution], rejections: Rejections
) -> dict[str, Any]:
    """Return the results of a search as plain values."""
    return {
        "num_nodes": space.num_nodes,
        "devices_per_node": space.devices_per_node,
        "pinned": sorted(space.pinned),
        "results": [_of_solution(original, each) for each in solutions],
        "considered": dict(rejections.considered),
        "rejected": [
            {
                "level": level,
                "reason": reason.value,
                "count": count,
                "example": rejections.example(level, reason),
            }
            for (level, reason), count in rejections.rejected.items()
        ],
    }


def _of_solution(original: PPOConfig, solution: Solution) -> dict[str, Any]:
    fullest = max(solution.memory, key=lambda device: device.peak)
    return {
        "step_s": solution.seconds,
        "phases": {
            name: {"seconds": time.seconds, "parts": dict(time.parts)}
            for name, time in solution.step.phases.items()
        },
        "fullest_device_bytes": fullest.peak,
        "fullest_device_phase": fullest.peak_phase,
        "pools": [{"units": list(pool.units), "devices": pool.num_devices} for pool in solution.pools],
        "overrides": chosen_values(original, solution),
    }
