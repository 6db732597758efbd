"""A configuration with all that a run reads: models, tokenizers, data and reward functions. Imports torch, and takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import Device, PPOConfig, SFTConfig
from megarl.config.sources import source_name
from megarl.config.validate import read_architectures, validate
from megarl.config.violation import Violation
from megarl.data.hub import with_hub_inputs
from megarl.doctor import devices
from megarl.doctor.check_result import DATA, CheckResult, Status
from megarl.doctor.checked_config import RunConfig, checked_anywhere, find_inputs, problems_of, refuse
from megarl.doctor.inputs import ROWS, findings
from megarl.machine.ray_address import cluster_address


def load_for_run(schema: type[RunConfig], source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """`load_config`, and every check with the model folders, tokenizers and reward functions, which runs a first sample. Of the data,
    which a run reads in full, only the first row is needed here. What is on a hub is fetched."""
    path = source_name(source)
    config, _ = with_hub_inputs(load_config(schema, source, overrides), path, large=True)
    violations = validate(config)
    found = [each for each in _inputs(config, violations, 1) if each.status is Status.error and each.check != DATA]
    refuse(path, [*problems_of(config, violations), *absent_gpus(config), *map(str, found)])
    return config


def load_examined_anywhere(schema: type[RunConfig], path: str, overrides: Sequence[str] = ()) -> tuple[RunConfig, list[str], list[str]]:
    """As `load_checked_anywhere`, with all that a run reads, where it is here: model folders, tokenizers, the first rows of the data,
    reward functions. The third value: warnings, a line each, of what will run but is seldom meant."""
    config, absent = find_inputs(load_config(schema, path, overrides), path)
    if absent:
        return *checked_anywhere(config, absent, path), []
    violations = validate(config)
    found = _inputs(config, violations, None)
    refuse(path, [*problems_of(config, violations), *(str(each) for each in found if each.status is Status.error)])
    return config, [], [*absent_gpus(config), *(str(each) for each in found if each.status is Status.warning)]


def absent_gpus(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """A run on this machine alone, for GPUs that it does not have."""
    if config.device is Device.cuda and cluster_address() is None and not devices.probe().gpus:
        yield "device: is cuda, and this machine has no GPU; use device=cpu, or join a cluster that has some (RAY_ADDRESS=HOST:PORT)"


def _inputs(config: PPOConfig | SFTConfig, violations: Sequence[Violation], num_rows: int | None) -> list[CheckResult]:
    """What is said of the files that a run reads, without those that `violations` are about. num_rows: see `findings`."""
    skipped = {key for violation in violations for key in violation.keys}
    architectures, _ = read_architectures(config)
    known = {
        role.name: architectures[role.name] for role in model_roles(config) if role.path_key not in skipped and role.name in architectures
    }
    return list(findings(config, known, skipped, ROWS if num_rows is None else num_rows))
