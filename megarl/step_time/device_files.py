"""Reads and writes device files: the shipped ones by their names (configs/devices), others by their paths."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from megarl.config.load import contents_of, read_config
from megarl.config.review import schema_keys
from megarl.config.schema import Device, RunConfig
from megarl.config.schema.keys import leaves
from megarl.config.shipped import CONFIGS_DIR, find_config
from megarl.config.validate import range_violations
from megarl.machine.errors import ConfigError
from megarl.machine.files import write_whole
from megarl.step_time.device import DeviceProfile

DEVICES_DIR = CONFIGS_DIR / "devices"
_SUFFIX = ".yaml"
# The share of a device that a plan may use. CUDA graphs, NCCL and fragmentation need the rest.
_USABLE = 0.9
# Keys without a measured or published value.
_WITHOUT_SOURCE = ("name", "is_host", "sources")


def shipped_devices() -> list[str]:
    """Return the names of the shipped device files, in alphabetical order."""
    return sorted(file.stem for file in DEVICES_DIR.glob(f"*{_SUFFIX}"))


def load_device(name: str | Path) -> DeviceProfile:
    """Load a device file.

    A file may inherit from another one: `base: configs/devices/h100_80gb.yaml`.

    Args:
        name: The name of a shipped file, such as `h100_80gb`, or the path of a YAML file.

    Raises:
        ConfigError: There is no such device, or the file has unknown keys, wrong values, numbers out of
            range, or sources of keys that do not exist. All problems are listed.
    """
    file = _file(str(name))
    loaded = read_config(DeviceProfile, file)
    problems = [*loaded.problems]
    problems += [str(each) for each in range_violations(loaded.config) if not loaded.refuses(each.keys)]
    problems += _unknown_sources(loaded.config)
    if problems:
        raise ConfigError(loaded.source, problems)

    return loaded.config


def profile_of(config: RunConfig) -> DeviceProfile | None:
    """Return the kind of device that a run names, None if it names none.

    Raises:
        ConfigError: There is no such device, or its file has errors.
    """
    name = config.placement.device_profile
    return None if name is None else load_device(name)


def assumed_profile(config: RunConfig) -> DeviceProfile:
    """Return the kind of device that a run names, otherwise an H100, or a CPU if it runs on one.

    Raises:
        ConfigError: There is no such device, or its file has errors.
    """
    return profile_of(config) or load_device("cpu" if config.device is Device.cpu else "h100_80gb")


def with_budget[Run: RunConfig](config: Run, device: DeviceProfile) -> Run:
    """Return the configuration with a memory budget: the configured one, or nine tenths of the device."""
    if config.placement.device_memory_gb is not None:
        return config
    budget_gb = round(_USABLE * device.memory_gb, 1)
    return config.with_sections(placement=replace(config.placement, device_memory_gb=budget_gb))


def dump_device(profile: DeviceProfile, path: Path) -> None:
    """Write a device file atomically. `load_device` reads it back to an equal profile."""
    write_whole(path, yaml.safe_dump(contents_of(profile), sort_keys=False, allow_unicode=True, width=118))


def sourced_keys(profile: DeviceProfile) -> list[str]:
    """Return the dotted keys whose values need a source, in the order of the file."""
    return [leaf.key for leaf in leaves(profile) if leaf.key not in _WITHOUT_SOURCE]


def _file(name: str) -> Path:
    """Return the file of a device: a path contains a folder or ends in .yaml, anything else is a name."""
    if "/" in name or name.endswith(_SUFFIX):
        return find_config(Path(name), name)

    known = shipped_devices()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            "device",
            [
                f"there is no device called {name!r}; {meant}known: {', '.join(known)}; or give the path of "
                f"a YAML file, which `megarl calibrate` writes"
            ],
        )
    return DEVICES_DIR / f"{name}{_SUFFIX}"


def _unknown_sources(profile: DeviceProfile) -> Iterator[str]:
    known = list(schema_keys(DeviceProfile))
    for key in profile.sources:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            yield f"sources: {key!r} is no key of a device{meant}"
