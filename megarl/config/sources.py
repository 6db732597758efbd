"""Where a configuration comes from: a file, the files that it inherits from, a group's file, the command line. Reads, does not judge.

`base: other.yaml` inherits another file (its path is relative to the file that names it). A section may be a group of
files: `algorithm: ppo` is the file `algorithm/ppo.yaml`, `algorithm: {base: ppo, kl: {...}}` the same with changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.errors import ConfigError

BASE = "base"
GROUPS = ("algorithm",)  # sections of which `configs/<section>/` holds ready-made files
COMMAND_LINE = "command line"
_CONFIGS_DIR = "configs"
# What reading a text as YAML can raise; a RecursionError where it is too deep.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, UnicodeError, RecursionError)


class Layer(NamedTuple):
    """Values from one source; a later layer wins. `replaces`: sections that start afresh, because a group's file was chosen."""

    source: str
    values: dict[str, Any]
    replaces: tuple[str, ...] = ()


def read_layers(path: str, overrides: Sequence[str]) -> list[Layer]:
    """All layers of a run, the least important first. Group choices on the command line come before its other overrides.

    Raises ConfigError for a file or override that cannot be read, and for a cycle of `base`.
    """
    file = Path(path)
    layers = _file_layers(file, ())
    chosen = {}
    for section in GROUPS:
        prefix = f"{section}="
        if names := [override.removeprefix(prefix) for override in overrides if override.startswith(prefix)]:
            chosen[section] = names[-1]
    layers += _group_layers({name: {BASE: group} for name, group in chosen.items()}, COMMAND_LINE, file.parent)
    others = [override for override in overrides if not override.startswith(tuple(f"{section}=" for section in GROUPS))]
    if others:
        layers.append(Layer(COMMAND_LINE, _parse_overrides(others)))
    return layers


def _file_layers(file: Path, chain: tuple[Path, ...]) -> list[Layer]:
    resolved = file.resolve()
    if resolved in chain:
        names = " -> ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(str(file), [f"{BASE!r} goes in a circle: {names}"])
    values = _read_yaml(file)
    layers = []
    if BASE in values:
        base = values.pop(BASE)
        if not isinstance(base, str):
            raise ConfigError(str(file), [f"{BASE!r} is {base!r}, but must be the path of a file, relative to this one"])
        if not os.path.isfile(file.parent / base):  # False also of what no file can be called
            raise ConfigError(str(file), [f"{BASE!r} is {base!r}: there is no file {str(file.parent / base)!r}"])
        layers = _file_layers(file.parent / base, (*chain, resolved))
    return [*layers, *_group_layers(values, str(file), file.parent), Layer(str(file), values)]


def _group_layers(values: dict[str, Any], source: str, near: Path) -> list[Layer]:
    """Takes the choice of a group's file out of `values`, and gives that file's layers."""
    layers = []
    for section in GROUPS:
        choice = values.get(section)
        if isinstance(choice, str):
            name = values.pop(section)
        elif isinstance(choice, dict) and BASE in choice:
            name = choice.pop(BASE)
        else:
            continue
        inherited = _file_layers(_group_file(section, name, source, near), ())
        layers.append(Layer(inherited[0].source, {section: inherited[0].values}, replaces=(section,)))
        layers += [Layer(layer.source, {section: layer.values}) for layer in inherited[1:]]
    return layers


def _group_file(section: str, name: object, source: str, near: Path) -> Path:
    folders = list(dict.fromkeys([near / section, Path(_CONFIGS_DIR) / section]))
    for folder in folders:
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    there = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    looked = ", ".join(str(folder) for folder in folders)
    raise ConfigError(source, [f"{section}={name}: there is no such file; there are {', '.join(there) or 'none'} (looked in {looked})"])


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError as error:
        raise ConfigError(str(file), [f"there is no such file (the current directory is {Path.cwd()})"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(file), [f"cannot be read: {error}"]) from error
    except _UNREADABLE as error:
        raise ConfigError(str(file), [f"is not YAML: {_one_line(error)}"]) from error
    values = OmegaConf.to_container(loaded) if isinstance(loaded, DictConfig) else None
    if not isinstance(values, dict):
        raise ConfigError(str(file), ["must hold a mapping of sections (model:, data:, ...)"])
    return {str(key): value for key, value in values.items()}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    problems: list[str] = []
    values: Any = OmegaConf.create()
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            problems.append(f"{override!r} is not an override; write key.sub=value")
            continue
        try:
            values = OmegaConf.merge(values, OmegaConf.from_dotlist([override]))
        except (*_UNREADABLE, TypeError) as error:  # a TypeError for a list and a mapping of one key
            problems.append(f"{override!r}: {_one_line(error)}")
    if problems:
        raise ConfigError(COMMAND_LINE, problems)
    container = OmegaConf.to_container(values)
    assert isinstance(container, Mapping)
    return {str(key): value for key, value in container.items()}
