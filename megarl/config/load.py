"""From files and overrides to a frozen, typed configuration: everything that does not fit the schema is
listed at once."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Generic

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megarl.config.review import Review, each_text, item_section, key_types
from megarl.config.schema import MISSING, SCHEMAS, Device, DType, PPOConfig, RunConfig, SFTConfig
from megarl.config.schema.keys import InputKind, OutputFolder, leaves
from megarl.config.sources import Layer, in_one_line, is_hub_name, read_layers, source_name
from megarl.machine.errors import ConfigError
from megarl.machine.files import write_whole
from megarl.machine.processors import has_gpu
from megarl.machine.ray_address import cluster_address

Config = typing.TypeVar("Config")
Run = typing.TypeVar("Run", bound=RunConfig)
_KIND = "kind"
# the keys without a default whose value is a list; others are strings
_REQUIRED_LISTS = ("data.train_files",)
# bytes of a name in Linux's file systems; characters, below what a path may have
_LONGEST_NAME = 255
_LONGEST_TEXT = 4000


def load_config(
    schema: type[Config],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: Layer | None = None,
) -> Config:
    """The configuration in the YAML file `source`, or in a mapping that could stand in one, with
    `key.sub=value` overrides, as a frozen instance of `schema`. options: what a command's options say, which
    wins over all.

    What a file names that a run reads (models, data, code) is relative to that file; what overrides name, and
    the folders that a run writes, to the current one. `model.dtype: auto` becomes what it is on the device.
    Raises ConfigError with every unknown key (and the nearest known one), wrong value and missing value, and
    its source; and for a run of another kind.
    """
    return resolved(read_config(schema, source, overrides, options).required())


@dataclass(frozen=True)
class PartialConfig(Generic[Config]):
    """A configuration as far as it could be read, so that all its problems can be reported together.

    Attributes:
        source: The file, as messages name it.
        config: Refused and missing values have their default, or an empty one. `model.dtype` may still be
            `auto`.
        problems: What does not fit the schema, one line each.
        refused: The dotted keys of `problems`. What is checked later says nothing about these.
    """

    source: str
    config: Config
    problems: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()

    def required(self) -> Config:
        """Return the configuration. Raises ConfigError if there are problems."""
        if self.problems:
            raise ConfigError(self.source, self.problems)
        return self.config

    def refuses(self, keys: Sequence[str]) -> bool:
        """Whether one of `keys` was refused, or is in a section that was, or is a section that holds a
        refused key."""
        return any(_overlap(key, refused) for key in keys for refused in self.refused)


def _overlap(one: str, other: str) -> bool:
    one = one.replace("[", ".[")
    other = other.replace("[", ".[")
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def read_config(
    schema: type[Config],
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: Layer | None = None,
) -> PartialConfig[Config]:
    """Read a configuration as `load_config` does, and keep what does not fit the schema as problems.

    Raises:
        ConfigError: A file cannot be read, the run is of another kind, or a value refers to another one that
            does not exist.
    """
    return _fit(
        schema,
        source_name(source),
        [*read_layers(source, overrides), *([] if options is None else [options])],
    )


def resolved(config: Config) -> Config:
    """Return the configuration with the `model.dtype` that `auto` means on its device, as far as that is
    known before the start."""
    run = typing.cast(RunConfig, config)
    return typing.cast(Config, with_dtype(run, is_on_cuda(run.device)))


def with_dtype(config: Run, is_on_cuda: bool) -> Run:
    """The configuration with the `model.dtype` that `auto` is on the device."""
    if config.model.dtype is not DType.auto:
        return config
    return config.with_sections(
        model=replace(config.model, dtype=DType.bfloat16 if is_on_cuda else DType.float32)
    )


def is_on_cuda(device: Device) -> bool:
    """As far as it can be known before a run starts: a cluster that is joined by its address is taken for one
    with GPUs."""
    return device is Device.cuda or (device is Device.auto and (has_gpu() or cluster_address() is not None))


def schema_of(path: str, overrides: Sequence[str] = ()) -> type[RunConfig]:
    """Of the run that a file describes, by its `kind`. Raises ConfigError for what cannot be read."""
    return _schema_of_kind(_kind_of(read_layers(path, overrides))) or PPOConfig


def _kind_of(layers: Sequence[Layer]) -> str | None:
    """As it is written; None where it is not, or is no text, which its type refuses."""
    # The most important layer that names a kind decides.
    kind = next((layer.values[_KIND] for layer in reversed(layers) if _KIND in layer.values), None)
    return kind if isinstance(kind, str) else None


def _schema_of_kind(kind: str | None) -> type[RunConfig] | None:
    return next((schema for each, schema in SCHEMAS.items() if each == kind), None)


def _fit(schema: type[Config], path: str, layers: Sequence[Layer]) -> PartialConfig[Config]:
    kind = _kind_of(layers)
    # Nearly every key of another kind of run would be unknown, so this is reported alone.
    if (meant := _schema_of_kind(kind) or schema) is not schema:
        other = (
            "use `megarl train`"
            if meant is PPOConfig
            else "give the configuration of a reinforcement learning run"
        )
        raise ConfigError(path, [f"{_KIND}: is {kind!r}, which this command does not run; {other}"])

    review = Review(schema)
    given: Any = OmegaConf.create()

    # Merge the layers, the most important last, each without what does not fit the schema.
    for layer in layers:
        review.add(layer)
        # A preset replaces its whole section; keys of less important layers must not survive in it.
        for section in layer.replaces:
            given.pop(section, None)
        given = OmegaConf.unsafe_merge(given, review.fitting(schema, layer.values, "", layer))

    problems = list(review.problems)
    refused = set(review.refused)

    # Interpolations are resolved only here, and each failure hides the next: drop the key and retry.
    while True:
        try:
            merged = _merged(schema, given)
            missing = sorted(OmegaConf.missing_keys(merged))
            # Fill in empty values, so that the checks that follow can still run.
            for key in missing:
                OmegaConf.update(given, key, [] if key in _REQUIRED_LISTS else "")
            config = OmegaConf.to_object(_merged(schema, given) if missing else merged)
            break
        except (OmegaConfBaseException, ValueError) as error:  # a value refers to another one: ${...}
            key = str(getattr(error, "full_key", None) or "")
            problems.append(f"{key}: {in_one_line(error)}" if key else in_one_line(error))
            # Without a value to remove, the same error would come back forever.
            if not _drop(given, key):
                raise ConfigError(path, problems) from error
            refused.add(key)

    problems += [
        f"{key}: is missing; give it in the file or as {key}=..." for key in missing if key not in refused
    ]
    refused.update(missing)

    for key, problem in _unusable_texts(config):
        refused.add(key)
        problems.append(f"{key}: {problem}")

    # Supervised fine-tuning without `kind` would look like a PPO run full of mistakes.
    if problems and schema is PPOConfig and kind is None and _fits(SFTConfig, path, layers):
        hint = f"write `{_KIND}: sft` into it, or {_KIND}=sft on the command line"
        raise ConfigError(path, [f"is of supervised fine-tuning, but does not say so: {hint}"])

    return PartialConfig(path, typing.cast(Config, config), tuple(problems), frozenset(refused))


def _merged(schema: type, given: Any) -> Any:
    return OmegaConf.unsafe_merge(deepcopy(_structured(schema)), given)


@cache
def _structured(schema: Any) -> Any:
    """Not to be changed: what is merged with it is another."""
    return OmegaConf.structured(schema)


def _drop(given: Any, key: str) -> bool:
    """Remove a value, so that its key has its default. Returns whether there was one."""
    section, _, name = key.rpartition(".")
    values = OmegaConf.select(given, section) if section else given
    if not isinstance(values, DictConfig) or name not in values:
        return False
    del values[name]

    return True


def _fits(schema: type, path: str, layers: Sequence[Layer]) -> bool:
    try:
        return not _fit(schema, path, layers).problems
    except ConfigError:
        return False


def _unusable_texts(config: Any) -> Iterator[tuple[str, str]]:
    """Find texts that no file can have as its name, half characters, and another language's word for null.
    Yields keys and problems."""
    for leaf in leaves(config):
        key = leaf.key
        for text in leaf.value if isinstance(leaf.value, list) else [leaf.value]:
            # Members of an enumeration may be strings too, but are no text of the user's.
            if not isinstance(text, str) or isinstance(text, Enum):
                continue
            if text == "None":
                yield key, "is the text 'None'; write null for nothing"
            elif leaf.is_prose:
                if any("\ud800" <= character <= "\udfff" for character in text):
                    yield (
                        key,
                        "has half of a character (a lone surrogate), which no tokenizer can read; remove it",
                    )
            # Any other text may become part of a path, which limits its characters and its length.
            elif (
                not text.isprintable()
                or len(text) > _LONGEST_TEXT
                or any(len(part.encode()) > _LONGEST_NAME for part in text.split("/"))
            ):
                shown = f"{text[:40]!r}..." if len(text) > 40 else repr(text)
                yield (
                    key,
                    f"is {shown}, which has characters that cannot be printed, or is longer than the name "
                    f"of a file can be",
                )


def plain_values(config: Any) -> dict[str, Any]:
    """The resolved configuration as the YAML of `dump_config` has it: dicts, lists and plain values. What a
    run reads has its whole path, so that it is found from any folder."""
    return typing.cast(dict[str, Any], yaml.safe_load(_as_yaml(config)))


def with_absolute_paths(config: Config) -> Config:
    """Returns the configuration with the absolute path of everything that the run reads or writes.

    Processes on other nodes have another current folder than the driver, and must see the same files.
    """
    return _with_whole_paths(config, outputs=True)


def contents_of(config: Any) -> dict[str, Any]:
    """Return the sections and values of a configuration as dicts, lists and plain values. Choices are their
    texts."""
    return _choices_as_texts(OmegaConf.to_container(OmegaConf.structured(config)))


def _choices_as_texts(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _choices_as_texts(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_choices_as_texts(value) for value in content]

    return content.value if isinstance(content, Enum) else content


def _as_yaml(config: Any) -> str:
    # OmegaConf would write the names of choices, which are other than the texts for Python's keywords.
    return OmegaConf.to_yaml(OmegaConf.create(contents_of(_with_whole_paths(config))))


def _with_whole_paths(section: Any, outputs: bool = False) -> Any:
    changes: dict[str, Any] = {}
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            changes[entry.name] = _with_whole_paths(value, outputs)
        # A list of sections, such as reward.functions, holds paths of its own.
        elif isinstance(value, list) and item_section(
            key_types(typing.cast(type, type(section)))[entry.name]
        ):
            changes[entry.name] = [_with_whole_paths(item, outputs) for item in value]
        elif InputKind in entry.metadata:
            changes[entry.name] = each_text(value, _whole_path)
        elif outputs and OutputFolder in entry.metadata and value is not None:
            changes[entry.name] = str(Path(value).absolute())

    return replace(section, **changes)


def _whole_path(path: str) -> str:
    return path if path in ("", MISSING) or is_hub_name(path) else str(Path(path).absolute())


def dump_config(config: Any, path: Path) -> None:
    """Writes the resolved configuration as YAML that `load_config` reads back to an equal value, in any
    folder; all of it or nothing."""
    write_whole(path, _as_yaml(config))
