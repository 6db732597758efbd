"""Loads files and overrides into a frozen, typed configuration, and reports all schema violations at once."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from megarl.config.references import drop_missing, escaped, resolve
from megarl.config.review import Review, each_text, item_section, key_types
from megarl.config.schema import MISSING, SCHEMAS, Device, DType, PPOConfig, RunConfig, SFTConfig
from megarl.config.schema.keys import InputArguments, InputKind, OutputFolder, default_of, leaves
from megarl.config.sources import GIVEN, Layer, is_hub_name, read_layers
from megarl.machine.errors import ConfigError
from megarl.machine.files import write_whole
from megarl.machine.processors import has_gpu
from megarl.machine.ray_address import cluster_address

_KIND = "kind"
# The required keys whose value is a list. The others are strings.
_REQUIRED_LISTS = ("data.train_files",)
# The limit of a file name on Linux file systems, in bytes, and a limit of paths, in characters.
_LONGEST_NAME = 255
_LONGEST_TEXT = 4000


def load_config[Config](
    schema: type[Config],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: Layer | None = None,
) -> Config:
    """Load a configuration as a frozen instance of `schema`.

    Input paths in a file (models, data, code) are relative to that file. Paths in overrides, and output
    folders, are relative to the current folder; an output folder in a file may begin with
    `${file_folder}/`. `model.dtype: auto` is resolved for the device.

    Args:
        schema: The class of the configuration. `RunConfig` stands for a run of any kind.
        source: A YAML file, or the mapping that such a file would contain.
        overrides: Values in the form `key.sub=value`.
        options: Values from a command's options, which take precedence over everything else.

    Raises:
        ConfigError: Lists every unknown key with the nearest known one, every wrong or missing value, and
            where each comes from. Also raised for a run of another kind.
    """
    return resolved(read_config(schema, source, overrides, options).required())


@dataclass(frozen=True)
class Loaded[Config]:
    """A configuration with the problems found so far, so that all problems can be reported together.

    Attributes:
        source: The name of the file in messages.
        config: The configuration, with a default or empty value for each refused or missing one.
            `model.dtype` may still be `auto`.
        problems: The schema violations, one line each.
        refused: The dotted keys of `problems`. Later checks do not report them again.
        absent: What is missing on this machine, one line each, which begins with the key: files, models with
            only a `config.json`, and inputs that a run would fetch from a hub.
        warnings: What only a plan assumes, and probable mistakes, one line each.
    """

    source: str
    config: Config
    problems: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def required(self) -> Config:
        """Return the configuration. Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.source, self.problems)
        return self.config

    def refuses(self, keys: Sequence[str]) -> bool:
        """Whether one of `keys`, a section around it or a key inside it was refused."""
        return any(_overlap(key, refused) for key in keys for refused in self.refused)


def _overlap(one: str, other: str) -> bool:
    one = one.replace("[", ".[")
    other = other.replace("[", ".[")
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def read_config[Config](
    schema: type[Config],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: Layer | None = None,
) -> Loaded[Config]:
    """Read a configuration as `load_config` does, but collect schema violations instead of raising them.

    Raises:
        ConfigError: A file cannot be read, the run is of another kind, or a value refers to a key that does
            not exist.
    """
    path = GIVEN if isinstance(source, Mapping) else str(source)
    layers = [*read_layers(source, overrides), *([] if options is None else [options])]
    return _loaded(schema, path, layers)


def _loaded[Config](schema: type[Config], path: str, layers: Sequence[Layer]) -> Loaded[Config]:
    """Merge the layers of a configuration, and collect what violates the schema. Raises as `read_config`."""
    kind = _kind_of(layers)
    if schema is RunConfig:
        schema = typing.cast(type[Config], _schema_of_kind(kind) or PPOConfig)
    # Nearly every key of another kind of run would be unknown, so this is reported alone.
    if (meant := _schema_of_kind(kind) or schema) is not schema:
        other = (
            "use `megarl train`"
            if meant is PPOConfig
            else "give the configuration of a reinforcement learning run"
        )
        raise ConfigError(path, [f"{_KIND} is {kind!r}, which this command does not support; {other}"])

    review = Review(schema)
    values: dict[str, Any] = {}

    # Merge the layers in order of precedence, each without the values that violate the schema.
    for layer in layers:
        # A preset replaces its whole section; keys of layers with lower precedence must not remain in it.
        for section in layer.replaces:
            _remove(values, section)
        _merge_into(values, review.read(layer))

    review.explain_unknown()

    # What references stand for, and which values are still missing, is known once the layers are merged.
    defaults = default_of(typing.cast(type, schema))
    if unusable := dict(resolve(schema, values, contents_of(defaults))):
        values = review.read(Layer(f"{path}, with its references", values))
    unusable |= dict(drop_missing(schema, values))

    problems = [*review.problems, *(problem for problem in unusable.values() if problem is not None)]
    refused = review.refused | {key for key, problem in unusable.items() if problem is not None}

    # Missing values are empty, so that the following checks can run.
    missing: list[str] = []
    config = _built(defaults, values, "", missing)
    missing.sort()
    problems += [
        f"{key}: is required; set it in the file or as {key}=..." for key in missing if key not in refused
    ]
    refused.update(missing)

    for key, problem in _unusable_texts(config):
        refused.add(key)
        problems.append(f"{key}: {problem}")

    # Supervised fine-tuning without `kind` would look like a PPO run full of mistakes.
    is_ppo_by_default = schema is PPOConfig and kind is None
    if problems and is_ppo_by_default and _has_no_problems(SFTConfig, path, layers):
        hint = f"write `{_KIND}: sft` into the file, or {_KIND}=sft on the command line"
        raise ConfigError(path, [f"is a supervised fine-tuning run without its kind; {hint}"])

    return Loaded(path, typing.cast(Config, config), tuple(problems), frozenset(refused))


def resolved[Config](config: Config) -> Config:
    """Return the configuration with `model.dtype: auto` resolved for its device.

    It stays `auto` if the device is not known before the start.
    """
    run = typing.cast(RunConfig, config)
    return typing.cast(Config, with_dtype(run, is_on_cuda(run.device)))


def with_dtype[Run: RunConfig](config: Run, is_on_cuda: bool) -> Run:
    """Return the configuration with `model.dtype: auto` resolved for the device."""
    if config.model.dtype is not DType.auto:
        return config
    return config.with_sections(
        model=replace(config.model, dtype=DType.bfloat16 if is_on_cuda else DType.float32)
    )


def is_on_cuda(device: Device) -> bool:
    """Whether a run will use CUDA, as known before it starts.

    A cluster that is joined by its address is assumed to have GPUs.
    """
    return device is Device.cuda or (device is Device.auto and (has_gpu() or cluster_address() is not None))


def schema_of(path: str, overrides: Sequence[str] = ()) -> type[RunConfig]:
    """Return the schema of the run that a file describes, by its `kind`.

    Raises:
        ConfigError: The file cannot be read.
    """
    return _schema_of_kind(_kind_of(read_layers(path, overrides))) or PPOConfig


def _kind_of(layers: Sequence[Layer]) -> str | None:
    """Return the kind as written; None if it is absent or not a string, which the schema refuses later."""
    # The layer with the highest precedence decides.
    kind = next((layer.values[_KIND] for layer in reversed(layers) if _KIND in layer.values), None)
    return kind if isinstance(kind, str) else None


def _schema_of_kind(kind: str | None) -> type[RunConfig] | None:
    return next((schema for each, schema in SCHEMAS.items() if each == kind), None)


def _remove(values: dict[str, Any], section: str) -> None:
    """Remove a section, named by its dotted key, so that its keys have their defaults."""
    *outer, name = section.split(".")
    for each in outer:
        values = values.get(each, {})
    values.pop(name, None)


def _merge_into(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    """Set `others` in `values`, section by section. Lists and plain values are replaced."""
    for name, value in others.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _merge_into(values[name], value)
        else:
            values[name] = deepcopy(value)


def _built(default: Any, values: Mapping[str, Any], prefix: str, missing: list[str]) -> Any:
    """Return a section, from values in the types of their keys. Missing keys are added to `missing`."""
    hints = key_types(type(default))
    given: dict[str, Any] = {}

    for entry in fields(default):
        name = entry.name
        key = f"{prefix}{name}"
        value = values.get(name, getattr(default, name))
        if is_dataclass(hints[name]):
            given[name] = _built(getattr(default, name), values.get(name, {}), f"{key}.", missing)
        elif isinstance(value, str) and value == MISSING:
            missing.append(key)
            # A value of the right type, so that the rest of the section is still checked.
            given[name] = [] if key in _REQUIRED_LISTS else ""
        elif (item := item_section(hints[name])) and name in values and value is not None:
            given[name] = [
                _built(default_of(item), row, f"{key}[{index}].", missing) for index, row in enumerate(value)
            ]
        else:
            given[name] = deepcopy(value)

    return replace(default, **given)


def _has_no_problems(schema: type, path: str, layers: Sequence[Layer]) -> bool:
    try:
        return not _loaded(schema, path, layers).problems
    except ConfigError:
        return False


def _unusable_texts(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys and problems of strings that no file name or text can contain.

    Such a string cannot be part of a path, contains a lone surrogate, or is Python's `None`.
    """
    for leaf in leaves(config):
        key = leaf.key
        for text in leaf.value if isinstance(leaf.value, list) else [leaf.value]:
            # Members of an enumeration are strings too, but do not come from the user.
            if not isinstance(text, str) or isinstance(text, Enum):
                continue
            if text == "None":
                yield key, "is the string 'None'; write null for no value"
            elif leaf.is_prose:
                if any("\ud800" <= character <= "\udfff" for character in text):
                    yield (
                        key,
                        "contains a lone surrogate (half a character), which no tokenizer reads; remove it",
                    )
            # Any other string may become part of a path, which limits its characters and its length.
            elif (
                not text.isprintable()
                or len(text) > _LONGEST_TEXT
                or any(len(part.encode()) > _LONGEST_NAME for part in text.split("/"))
            ):
                shown = f"{text[:40]!r}..." if len(text) > 40 else repr(text)
                yield (
                    key,
                    f"is {shown}, which contains non-printable characters or is longer than a file name can "
                    f"be",
                )


def plain_values(config: Any) -> dict[str, Any]:
    """Return the resolved configuration as dicts, lists and plain values, as `dump_config` writes it.

    Input paths are absolute, so that they are valid in any folder.
    """
    return typing.cast(dict[str, Any], yaml.safe_load(_as_yaml(config)))


def with_absolute_paths[Config](config: Config) -> Config:
    """Return the configuration with absolute paths of all inputs and outputs.

    Processes on other nodes have a different current folder than the driver, but must use the same files.
    """
    return _with_whole_paths(config, outputs=True)


def contents_of(config: Any) -> dict[str, Any]:
    """Return the sections and values of a configuration as dicts, lists and plain values.

    Members of enumerations are strings.
    """
    return typing.cast(dict[str, Any], _as_plain(config))


def _as_plain(content: Any) -> Any:
    if is_dataclass(content):
        return {entry.name: _as_plain(getattr(content, entry.name)) for entry in fields(content)}
    if isinstance(content, dict):
        return {key: _as_plain(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_as_plain(value) for value in content]

    return content.value if isinstance(content, Enum) else content


def _as_yaml(config: Any) -> str:
    # OmegaConf would write the names of members, which differ from their values for Python keywords.
    return OmegaConf.to_yaml(OmegaConf.create(escaped(contents_of(_with_whole_paths(config)))))


def _with_whole_paths(section: Any, outputs: bool = False) -> Any:
    changes: dict[str, Any] = {}
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            changes[entry.name] = _with_whole_paths(value, outputs)
        # A list of sections, such as reward.functions, contains paths too.
        elif isinstance(value, list) and item_section(key_types(type(section))[entry.name]):
            changes[entry.name] = [_with_whole_paths(item, outputs) for item in value]
        elif InputKind in entry.metadata:
            changes[entry.name] = each_text(value, _whole_path)
        elif inputs := entry.metadata.get(InputArguments):
            changes[entry.name] = {
                name: each_text(item, _whole_path) if name in inputs else item for name, item in value.items()
            }
        elif outputs and OutputFolder in entry.metadata and value is not None:
            changes[entry.name] = str(Path(value).absolute())

    return replace(section, **changes)


def _whole_path(path: str) -> str:
    return path if path in ("", MISSING) or is_hub_name(path) else str(Path(path).absolute())


def dump_config(config: Any, path: Path) -> None:
    """Write the resolved configuration atomically, as YAML.

    `load_config` reads it back to an equal value in any folder.
    """
    write_whole(path, _as_yaml(config))
