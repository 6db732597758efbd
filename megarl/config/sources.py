"""Where a configuration comes from: a file, the files that it inherits from, a group's file, the command
line. Reads, does not judge.

`base: other.yaml` inherits another file (its path is relative to the file that names it). A section may be a
group of
files: `algorithm: ppo` is the file `algorithm/ppo.yaml`, `algorithm: {base: ppo, kl: {...}}` the same with
changes. It is looked for beside the file that names it, then among those that ship with megarl; a file that
ships is `configs/NAME.yaml` in any folder. What a group's file needs of other sections it says below `with`.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.schema.keys import MISSING, InputKind
from megarl.config.shipped import CONFIGS_DIR, find_code, find_config, is_shipped, shown
from megarl.machine.errors import ConfigError

BASE = "base"
WITH = "with"
GROUPS = ("algorithm",)  # sections of which `configs/<section>/` holds ready-made files
COMMAND_LINE = "command line"
GIVEN = "given values"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # as `Qwen/Qwen3-0.6B`
_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".arrow")  # of files
# What reading a text as YAML can raise; a RecursionError where it is too deep.
_UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, UnicodeError, RecursionError)


class Refused(NamedTuple):
    """A choice or an override that cannot be read: the key that it was meant for, None if unknown, and
    why."""

    key: str | None
    problem: str


class Layer(NamedTuple):
    """Values from one source; a later layer wins.

    Attributes:
        source: The name of the source in messages.
        values: By section and key.
        replaces: Sections that start from their defaults, because a group's file was chosen.
        file: The file that has the values, None for the command line.
        refused: What could not be read. Everything else of the configuration can still be checked.
    """

    source: str
    values: dict[str, Any]
    replaces: tuple[str, ...] = ()
    file: Path | None = None
    refused: tuple[Refused, ...] = ()

    def place_of(self, kind: InputKind, path: str) -> str:
        """Return the place of an input that this layer names `path`.

        It is relative to the file that names it, and to the current folder on the command line. A file that
        ships names models and data of whoever uses it, in the current folder. `megarl/recipes/...` is code
        that ships, unless there is such a file.
        """
        if path in ("", MISSING) or path.startswith("${"):  # of another key, which is a place already
            return path
        near = Path() if self.file is None else self.file.parent
        if kind is InputKind.code and (shipped := find_code(near / path, path)) is not None:
            return _from_here(shipped)
        if self.file is None or (kind is InputKind.data and is_shipped(self.file)):
            return path
        joined = near / path
        # A name on the hub looks like a relative path, so an existing file takes precedence.
        if kind is InputKind.data and is_hub_name(path) and not os.path.exists(joined):
            return path

        return _from_here(joined) if ".." in joined.parts else str(joined)


def _from_here(path: Path) -> str:
    """Return the resolved path, relative to the current folder if it is inside."""
    resolved = path.resolve()
    here = Path.cwd().resolve()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)


def is_hub_name(path: str) -> bool:
    """It has the form of a name on the Hugging Face hub, and there is nothing of that name in the current
    folder."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.endswith(_ENDINGS) and not os.path.exists(path)


def read_layers(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> list[Layer]:
    """All layers of a run, the least important first. Group choices on the command line come before its other
    overrides.

    source: a file, or what would stand in one. Raises ConfigError for a file that cannot be read, and for a
    cycle of `base`.
    """
    if isinstance(source, Mapping):
        near = Path()
        layers = _given_layers(source)
    else:
        file = find_config(Path(source), str(source))
        near = file.parent
        layers = _file_layers(file, ())

    # Of several choices for one group, the last on the command line counts.
    chosen = {}
    for section in GROUPS:
        prefix = f"{section}="
        if names := [override.removeprefix(prefix) for override in overrides if override.startswith(prefix)]:
            chosen[section] = names[-1]

    layers += _group_layers({name: {BASE: group} for name, group in chosen.items()}, COMMAND_LINE, near)
    # What remains are overrides of single keys, which win over every file.
    others = [
        override
        for override in overrides
        if not override.startswith(tuple(f"{section}=" for section in GROUPS))
    ]
    if others:
        layers.append(_parse_overrides(others))

    return layers


def source_name(source: str | Path | Mapping[str, Any]) -> str:
    """As errors call it."""
    return GIVEN if isinstance(source, Mapping) else str(source)


def _given_layers(values: Mapping[str, Any]) -> list[Layer]:
    own = copy.deepcopy(dict(values))  # the choice of a group's file is taken out
    return [*_group_layers(own, GIVEN, Path()), Layer(GIVEN, own)]


def _file_layers(file: Path, chain: tuple[Path, ...]) -> list[Layer]:
    resolved = file.resolve()
    if resolved in chain:
        names = " -> ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(shown(file), [f"{BASE!r} goes in a circle: {names}"])

    values = _read_yaml(file)
    layers = []

    # The inherited file's layers come first, so that this file overrides them.
    if BASE in values:
        base = values.pop(BASE)
        if not isinstance(base, str):
            raise ConfigError(
                shown(file), [f"{BASE!r} is {base!r}, but must be the path of a file, relative to this one"]
            )
        inherited = find_config(file.parent / base, base)
        if not os.path.isfile(inherited):  # False also of what no file can be called
            raise ConfigError(shown(file), [f"{BASE!r} is {base!r}: there is no file {str(inherited)!r}"])
        layers = _file_layers(inherited, (*chain, resolved))

    return [*layers, *_group_layers(values, shown(file), file.parent), Layer(shown(file), values, file=file)]


def _group_layers(values: dict[str, Any], source: str, near: Path) -> list[Layer]:
    """Takes the choice of a group's file out of `values`, and gives that file's layers."""
    layers = []
    for section in GROUPS:
        # A group's choice is a name, or a section that holds the name under `base`.
        choice = values.get(section)
        if isinstance(choice, str):
            name = values.pop(section)
        elif isinstance(choice, dict) and BASE in choice:
            name = choice.pop(BASE)
        else:
            continue
        found = _group_file(section, name, near)
        # A wrong name is kept as a problem, so that the other layers are still checked.
        if isinstance(found, Refused):
            layers.append(Layer(source, {}, refused=(found,)))
            continue
        inherited = _file_layers(found, ())
        # Only the first layer replaces the section: later ones refine what it has set.
        for number, layer in enumerate(inherited):
            others = layer.values.pop(WITH, {})
            if not isinstance(others, dict) or section in others:
                raise ConfigError(
                    layer.source,
                    [f"{WITH!r} is {others!r}, but must be a mapping of sections other than {section}"],
                )
            layers.append(
                layer._replace(
                    values={section: layer.values, **others}, replaces=(section,) if number == 0 else ()
                )
            )

    return layers


def _group_file(section: str, name: object, near: Path) -> Path | Refused:
    # A file of the user's own comes before a shipped one of the same name.
    folders = list(dict.fromkeys([near / section, CONFIGS_DIR / section]))
    for folder in folders:
        if os.path.isfile(folder / f"{name}.yaml"):  # False also of what no file can be called
            return folder / f"{name}.yaml"

    there = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    looked = ", ".join(shown(folder) for folder in folders)
    return Refused(
        section,
        f"{section}={name}: there is no such file; there are {', '.join(there) or 'none'} (looked in "
        f"{looked})",
    )


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        loaded = OmegaConf.load(file)
    except FileNotFoundError as error:
        raise ConfigError(
            shown(file), [f"there is no such file (the current directory is {Path.cwd()})"]
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(shown(file), [f"cannot be read: {error}"]) from error
    except _UNREADABLE as error:
        raise ConfigError(shown(file), [f"is not YAML: {in_one_line(error)}"]) from error

    # Interpolations stay unresolved until all layers are merged.
    values = OmegaConf.to_container(loaded) if isinstance(loaded, DictConfig) else None
    if not isinstance(values, dict):
        raise ConfigError(shown(file), ["must hold a mapping of sections (model:, data:, ...)"])
    return {str(key): value for key, value in values.items()}


def in_one_line(error: Exception) -> str:
    """Without what OmegaConf says of the value's place, in its own terms."""
    return " ".join(str(error).partition("\n    full_key: ")[0].split())


def _parse_overrides(overrides: Sequence[str]) -> Layer:
    refused: list[Refused] = []
    values: Any = OmegaConf.create()

    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key:
            refused.append(Refused(None, f"{override!r} is not an override; write key.sub=value"))
            continue
        try:
            # Each override is parsed by itself, so that a broken one does not hide the others.
            values = OmegaConf.merge(values, OmegaConf.from_dotlist([override]))
        except (*_UNREADABLE, TypeError) as error:  # a TypeError for a list and a mapping of one key
            refused.append(Refused(key, f"{override!r}: {in_one_line(error)}"))

    container = OmegaConf.to_container(values)
    assert isinstance(container, Mapping)
    return Layer(COMMAND_LINE, {str(key): value for key, value in container.items()}, refused=tuple(refused))
