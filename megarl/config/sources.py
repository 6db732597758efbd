"""Reads the sources of a configuration, without checking values.

The sources are a file, the files that it inherits from, preset files and the command line.

`base: other.yaml` inherits another file, whose path is relative to the file with the `base`. A section may
have preset files: `algorithm: ppo` is the file `algorithm/ppo.yaml`, and `algorithm: {base: ppo, kl: {...}}`
is the same with changes. Presets are searched next to the file that names them, then among those included in
megarl. A bundled file is `configs/NAME.yaml` in any folder. A preset sets keys of other sections below
`with`. Sections inside others may have presets too: `actor: {megatron: fused_experts}`, or several of them as
`base: [fused_experts, deepep]`, which are combined.
"""

from __future__ import annotations

import copy
import difflib
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from megarl.config.dotted import given_at, nested, replaced, upwards
from megarl.config.schema.keys import MISSING, PathKind, names_code, split_code
from megarl.config.shipped import CONFIGS_DIR, find_code, find_config, is_shipped, shown
from megarl.machine.errors import ConfigError
from megarl.machine.files import YAML_ERRORS, yaml_problem

BASE = "base"
WITH = "with"
PATH = "path"  # the key of a section that a text instead of the section gives
# Sections that have presets, and the folder of their files in `configs/`.
GROUPS = {
    "algorithm": "algorithm",
    "algorithm.rollout_correction": "rollout_correction",
    "actor.megatron": "megatron",
    "critic.megatron": "megatron",
    "actor.lora": "lora",
    "critic.lora": "lora",
}
COMBINED = ("megatron",)  # folders whose presets can be combined
COMMAND_LINE = "command line"
FILE_FOLDER = "${file_folder}"  # in an output path of a file
GIVEN = "given values"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # such as `Qwen/Qwen3-0.6B`
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_ENDINGS = (".parquet", ".json", ".jsonl", ".csv", ".arrow")  # file suffixes that no hub name has
HOW_TO_REFER = (
    "use ${section.key} for another key of this configuration, or ${oc.env:NAME} for an environment variable"
)
_UNREADABLE = (OmegaConfBaseException, *YAML_ERRORS)


class Layer(NamedTuple):
    """Values from one source. A later layer takes precedence.

    Attributes:
        source: The name of the source in messages.
        values: The values by section and key.
        replaces: Sections that start from their defaults, because a preset was chosen.
        file: The file with the values; None for the command line.
        refused: The preset choices and overrides that could not be read: the key that each was meant for,
            None if unknown, and the problem. The rest of the configuration can still be checked.
        texts: The texts of the values that are written without quotes, by dotted key.
    """

    source: str
    values: dict[str, Any]
    replaces: tuple[str, ...] = ()
    file: Path | None = None
    refused: tuple[tuple[str | None, str], ...] = ()
    texts: Mapping[str, str] = MappingProxyType({})

    def as_written(self, key: str, value: Any) -> Any:
        """Return the value of a key for strings, in which each number is the text that stands for it.

        YAML reads names such as 2024_06_01, 1e3 and 007 as numbers.
        """
        return replaced(
            value,
            lambda key, item: self.texts.get(key, item) if type(item) in (int, float) else item,
            key,
        )

    def place_of(self, kind: PathKind, path: str) -> str:
        """Return the resolved path of what this layer calls `path`.

        A path is relative to the file that contains it, and to the current folder on the command line. In a
        bundled file, paths of models and data are relative to the current folder. `megarl/recipes/...` is
        code included in megarl, unless such a file exists. An output folder is relative to the current
        folder, unless it begins with FILE_FOLDER, the folder of the file that contains it.
        """
        if kind is PathKind.output:
            if self.file is None or not path.startswith(f"{FILE_FOLDER}/"):
                return path
            return _from_here(self.file.parent / path.removeprefix(f"{FILE_FOLDER}/"))
        if path in ("", MISSING) or path.startswith("${"):  # A reference is resolved at its own key.
            return path
        if kind is PathKind.function and not names_code(path):
            return path
        near = Path() if self.file is None else self.file.parent
        if kind is not PathKind.data:
            file, _ = split_code(path)
            if (shipped := find_code(near / file, file)) is not None:
                return _from_here(shipped) + path.removeprefix(file)
        if self.file is None or (kind is PathKind.data and is_shipped(self.file)):
            return path
        joined = near / path
        # A name on the hub looks like a relative path, so an existing file takes precedence.
        if kind is PathKind.data and is_hub_name(path) and not os.path.exists(joined):
            return path

        return _from_here(joined) if ".." in joined.parts else str(joined)


def _from_here(path: Path) -> str:
    """Return the resolved path, relative to the current folder if it is inside."""
    resolved = path.resolve()
    here = Path.cwd().resolve()
    return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)


def is_hub_name(path: str) -> bool:
    """Whether the path looks like a name on the Hugging Face hub and is not in the current folder."""
    return bool(_HUB_NAME.fullmatch(path)) and not path.endswith(_ENDINGS) and not os.path.exists(path)


def is_url(path: str) -> bool:
    """Return whether a value is a URL, as of object storage, and not a path."""
    return _URL.match(path) is not None


def read_layers(source: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> list[Layer]:
    """Return all layers of a run in order of precedence, the lowest first.

    Presets on the command line come before its other overrides.

    Args:
        source: A file, or the mapping that a file would contain.
        overrides: Values in the form `key.sub=value`.

    Raises:
        ConfigError: A file cannot be read, or `base` has a cycle.
    """
    if isinstance(source, Mapping):
        near = Path()
        own = copy.deepcopy(dict(source))  # _group_layers removes the preset's name
        layers = [*_group_layers(own, GIVEN, near), Layer(GIVEN, own)]
    else:
        file = find_config(Path(source), str(source))
        near = file.parent
        layers = _file_layers(file, ())

    # The last of several presets for one section on the command line applies.
    for section in GROUPS:
        prefix = f"{section}="
        if names := [override.removeprefix(prefix) for override in overrides if override.startswith(prefix)]:
            layers += _chosen_layers(section, _preset_names(names[-1]), COMMAND_LINE, near)
    # The remaining overrides are of single keys, which take precedence over every file.
    others = [
        override
        for override in overrides
        if not override.startswith(tuple(f"{section}=" for section in GROUPS))
    ]
    if others:
        layers.append(_parse_overrides(others))

    return layers


def _file_layers(file: Path, chain: tuple[Path, ...]) -> list[Layer]:
    resolved = file.resolve()
    if resolved in chain:
        names = " -> ".join(str(link) for link in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(shown(file), [f"{BASE!r} has a cycle: {names}"])

    values, texts = _read_yaml(file)
    layers = []

    # The inherited file's layers come first, so that this file overrides them.
    if BASE in values:
        base = values.pop(BASE)
        if not isinstance(base, str):
            raise ConfigError(
                shown(file), [f"{BASE!r} is {base!r}, but must be the path of a file, relative to this file"]
            )
        inherited = find_config(file.parent / base, base)
        if not os.path.isfile(inherited):  # False also for an invalid file name
            raise ConfigError(shown(file), [f"{BASE!r} is {base!r}: there is no file {str(inherited)!r}"])
        layers = _file_layers(inherited, (*chain, resolved))

    own = Layer(shown(file), values, file=file, texts=texts)
    return [*layers, *_group_layers(values, shown(file), file.parent), own]


def _preset_names(written: str) -> Any:
    """Return the value of an override that selects presets: a name, or `[name,name]`."""
    return [name.strip() for name in written[1:-1].split(",")] if written.startswith("[") else written


def _group_layers(values: dict[str, Any], source: str, near: Path) -> list[Layer]:
    """Remove the choices of presets from `values`, and return the presets' layers."""
    layers = []
    for section in GROUPS:
        # A preset is chosen by its name, or by a section with the name under `base`.
        outer, _, last = section.rpartition(".")
        parent = given_at(values, outer)
        if not isinstance(parent, dict):
            continue
        choice = parent.get(last)
        if isinstance(choice, str) or (isinstance(choice, list) and GROUPS[section] in COMBINED):
            layers += _chosen_layers(section, parent.pop(last), source, near)
        elif isinstance(choice, dict) and BASE in choice:
            layers += _chosen_layers(section, choice.pop(BASE), source, near)

    return layers


def _chosen_layers(section: str, choice: object, source: str, near: Path) -> list[Layer]:
    """Return the layers of the presets that are chosen for a section: one, or several that are combined."""
    is_combined = isinstance(choice, list) and GROUPS[section] in COMBINED
    layers: list[Layer] = []
    for name in choice if isinstance(choice, list) and is_combined else [choice]:
        found = _group_file(section, name, near)
        # A wrong name is kept as a problem, so that the other layers are still checked.
        if isinstance(found, str):
            layers.append(Layer(source, {}, refused=((section, found),)))
            continue
        for layer in _file_layers(found, ()):
            others = layer.values.pop(WITH, {})
            if not isinstance(others, dict) or section.partition(".")[0] in others:
                raise ConfigError(
                    layer.source,
                    [f"{WITH!r} is {others!r}, but must be a mapping of sections other than {section}"],
                )
            # Only the first layer replaces the section; later ones change single keys of it.
            replaces = () if any(each.replaces for each in layers) else (section,)
            texts = {
                key.removeprefix(f"{WITH}.") if key.startswith(f"{WITH}.") else f"{section}.{key}": text
                for key, text in layer.texts.items()
            }
            values = nested({section: layer.values}) | others
            layers.append(layer._replace(values=values, replaces=replaces, texts=texts))

    return layers


def _group_file(section: str, name: object, near: Path) -> Path | str:
    """Return the file of a preset, or why there is none."""
    # The user's own file takes precedence over a bundled one of the same name.
    group = GROUPS[section]
    folders = list(dict.fromkeys([near / group, CONFIGS_DIR / group]))
    for folder in folders:
        if os.path.isfile(folder / f"{name}.yaml"):  # False also for an invalid file name
            return folder / f"{name}.yaml"

    there = sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})
    near_names = difflib.get_close_matches(str(name).lower(), there, n=1)
    meant = f"; did you mean {near_names[0]}?" if near_names else ""
    looked = ", ".join(shown(folder) for folder in folders)
    return (
        f"{section}={name}: there is no such preset; available: {', '.join(there) or 'none'} (searched "
        f"{looked}){meant}"
    )


def _read_yaml(file: Path) -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the values of a file, and the texts of those without quotes by dotted key."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            shown(file), [f"there is no such file (the current directory is {Path.cwd()})"]
        ) from error
    except IsADirectoryError as error:
        there = [str(each) for each in (*sorted(file.glob("*.yaml")), *sorted(file.glob("*/config.yaml")))]
        such = f", such as {there[0]}" if there else ""
        raise ConfigError(shown(file), [f"is a folder; give a YAML file{such}"]) from error
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 ({error.reason} at byte {error.start:,}); give a YAML file in UTF-8"
        raise ConfigError(shown(file), [problem]) from error
    except OSError as error:
        raise ConfigError(shown(file), [f"cannot be read: {error}"]) from error

    try:
        # Callers change the values.
        parsed, texts = _parse_yaml(text, os.path.abspath(file))
        values = copy.deepcopy(parsed)
    except GrammarParseError as error:
        raise ConfigError(shown(file), [f"{error.full_key}: {_half_a_reference(error)}"]) from error
    except _UNREADABLE as error:
        hint = _tab_hint(error, text) if isinstance(error, yaml.MarkedYAMLError) else ""
        raise ConfigError(shown(file), [f"is not YAML: {in_one_line(error)}{hint}"]) from error

    if not isinstance(values, dict):
        raise ConfigError(shown(file), ["must contain a mapping of sections (model:, data:, ...)"])
    return {str(key): value for key, value in values.items()}, texts


def _tab_hint(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return a hint if the line of the error is indented with a tab."""
    lines = text.splitlines()
    number = None if error.problem_mark is None else error.problem_mark.line
    is_indented = number is not None and number < len(lines) and re.match(r" *\t", lines[number])
    return "; indent with spaces instead of tabs" if is_indented else ""


class _NamedText(io.StringIO):
    """A text with the file name that the parser's errors contain."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


@lru_cache(maxsize=64)
def _parse_yaml(text: str, name: str) -> tuple[object, Mapping[str, str]]:
    """Return the values of a YAML text, and the texts of those without quotes by dotted key.

    A command reads a file several times, for its kind and for its values, and the parser is slow.
    """
    root = yaml.compose(_NamedText(text, name), Loader=yaml.CSafeLoader)
    # OmegaConf would take a single word for a key, and refuses a number with another exception.
    if isinstance(root, yaml.SequenceNode) or (isinstance(root, yaml.ScalarNode) and root.value):
        return None, {}
    # OmegaConf also refuses aliases that stand for thousands of values. Interpolations stay unresolved until
    # all layers are merged.
    return OmegaConf.to_container(OmegaConf.load(_NamedText(text, name))), dict(_unquoted(root, ""))


def _unquoted(node: yaml.Node | None, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the text of each value without quotes in the YAML node of `key`."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _unquoted(value, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _unquoted(item, f"{key}[{index}]")
    elif isinstance(node, yaml.ScalarNode) and not node.style:
        yield key, node.value


def _half_a_reference(error: GrammarParseError) -> str:
    return f"{in_one_line(error)}; {HOW_TO_REFER}, or \\${{ for the characters themselves"


def in_one_line(error: Exception) -> str:
    """Return the error in one line, without OmegaConf's description of the key."""
    if isinstance(error, OmegaConfBaseException):
        return " ".join(str(error).partition("\n    full_key: ")[0].split())
    return yaml_problem(error)


def _with_paths(values: Any, key: str) -> Any:
    """Return the values with `{path: X}` for an earlier override `section=X` of a section around `key`."""
    for section in upwards(key.rpartition(".")[0]):
        path = OmegaConf.select(values, section, throw_on_resolution_failure=False)
        if isinstance(path, str):
            OmegaConf.update(values, section, {PATH: path})
    return values


def _parse_overrides(overrides: Sequence[str]) -> Layer:
    refused: list[tuple[str | None, str]] = []
    values: Any = OmegaConf.create()
    texts: dict[str, str] = {}

    for override in overrides:
        key, equals, written = override.partition("=")
        if not equals or "" in key.split("."):
            refused.append((None, f"{override!r} is not an override; write key.sub=value"))
            continue
        try:
            # Each override is parsed by itself, so that a broken one does not hide the others.
            values = OmegaConf.merge(_with_paths(values, key), OmegaConf.from_dotlist([override]))
            texts.update(_unquoted(yaml.compose(written, Loader=yaml.CSafeLoader), key))
        except (*_UNREADABLE, TypeError) as error:  # a TypeError for a list and a mapping at one key
            why = _half_a_reference(error) if isinstance(error, GrammarParseError) else in_one_line(error)
            refused.append((key, f"{override!r}: {why}"))

    container = OmegaConf.to_container(values)
    assert isinstance(container, Mapping)
    given = {str(key): value for key, value in container.items()}
    return Layer(COMMAND_LINE, given, refused=tuple(refused), texts=texts)
