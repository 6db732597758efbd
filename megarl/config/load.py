"""Loads files and overrides into a frozen, typed configuration, and reports all schema violations at once."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from megarl.config.dotted import flat, with_value
from megarl.config.migration import with_current_keys
from megarl.config.review import Review
from megarl.config.schema import (
    MISSING,
    RESUME_AUTO,
    RESUME_DISABLE,
    SCHEMAS,
    Device,
    DType,
    PPOConfig,
    RunConfig,
    SFTConfig,
)
from megarl.config.schema.keys import PathKind, leaves, names_code, naming
from megarl.config.sources import GIVEN, Layer, is_hub_name, read_layers
from megarl.config.values import contents_of, each_text, escaped
from megarl.machine.errors import ConfigError
from megarl.machine.files import parse_yaml, write_whole
from megarl.machine.processors import has_gpu
from megarl.machine.ray_address import cluster_address

_KIND = "kind"


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
        has_unknown_keys: Whether a key is mistyped, which is reported before inputs are read.
        absent: What is missing on this machine, one line each, which begins with the key: files, models with
            only a `config.json`, and inputs that a run would fetch from a hub.
        warnings: What only a plan assumes, and probable mistakes, one line each.
    """

    source: str
    config: Config
    problems: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()
    has_unknown_keys: bool = False
    absent: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def required(self, found: Iterable[object] = ()) -> Config:
        """Return the configuration. Raises ConfigError if it has problems, or if checks have `found` some."""
        if problems := [*self.problems, *map(str, found)]:
            raise ConfigError(self.source, problems)
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

    review = Review(schema, path)
    for layer in layers:
        review.read(layer)
    config, found = review.build()
    problems = tuple(problem for _, problem in found)
    refused = frozenset(key for key, _ in found if key is not None)

    # Supervised fine-tuning without `kind` would look like a PPO run full of mistakes.
    if problems and schema is PPOConfig and kind is None and _is_sft(source, overrides, options):
        hint = f"write `{_KIND}: sft` into the file, or {_KIND}=sft on the command line"
        raise ConfigError(path, [f"is a supervised fine-tuning run without its kind; {hint}"])

    return Loaded(path, config, problems, refused, review.has_unknown_keys)


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


def _is_sft(source: str | Path | Mapping[str, Any], overrides: Sequence[str], options: Layer | None) -> bool:
    """Whether a configuration has no problems as one of supervised fine-tuning."""
    try:
        return not read_config(SFTConfig, source, overrides, options).problems
    except ConfigError:
        return False


def plain_values(config: Any) -> dict[str, Any]:
    """Return the resolved configuration as dicts, lists and plain values, as `dump_config` writes it.

    Input paths are absolute, so that they are valid in any folder.
    """
    return typing.cast(dict[str, Any], yaml.safe_load(_as_yaml(config)))


def with_absolute_paths[Config](config: Config) -> Config:
    """Return the configuration with absolute paths of all inputs and outputs.

    Processes on other nodes have a different current folder than the driver, but must use the same files.
    """
    return with_paths(
        config,
        lambda kind, path: str(Path(path).absolute()) if kind is PathKind.output else _whole_path(path),
    )


def with_paths[Section](section: Section, change: Callable[[PathKind, str], str]) -> Section:
    """Return a configuration, or a section of one, with each of its paths changed.

    Args:
        change: Called with the kind of a path, and the path.
    """

    def changed(kind: PathKind, path: str) -> str:
        has_no_file = kind is PathKind.function and not names_code(path)
        return path if has_no_file else change(kind, path)

    for leaf in leaves(section):
        if leaf.path is not None:
            section = with_value(section, leaf.key, each_text(leaf.value, partial(changed, leaf.path)))
        elif inputs := leaf.entry.metadata.get(naming):
            paths = {name: value for name, value in leaf.value.items() if name in inputs}
            whole = each_text(paths, partial(change, PathKind.data))
            section = with_value(section, leaf.key, leaf.value | whole)

    return section


def _as_yaml(config: Any) -> str:
    whole = with_paths(config, lambda kind, path: path if kind is PathKind.output else _whole_path(path))
    # OmegaConf would write the names of members, which differ from their values for Python keywords.
    return OmegaConf.to_yaml(OmegaConf.create(escaped(contents_of(whole))))


def _whole_path(path: str) -> str:
    return path if path in ("", MISSING) or is_hub_name(path) else str(Path(path).absolute())


def dump_config(config: Any, path: Path) -> None:
    """Write the resolved configuration atomically, as YAML.

    `load_config` reads it back to an equal value in any folder.
    """
    write_whole(path, _as_yaml(config))


# ---- the configuration of a checkpoint, compared with the one that resumes from it

ABSENT = "(no such key)"

# Keys that must not change when a run resumes, with what each determines.
FIXED = {
    "model.dtype": "the numbers that the optimizer continues with",
    "data.shuffle": "the order of the data",
    "data.seed": "the order of the data",
    "trainer.seed": "the samples that are drawn",
    "trainer.prompts_per_step": "which data a step has",
    "trainer.samples_per_step": "which data a step has",
    "trainer.pairs_per_step": "which data a step has",
    "algorithm.advantage.estimator": "which models are trained",
}
# Keys that identify a run that starts from its beginning, in addition to all of `algorithm` and `loss`.
_OF_THE_RUN = ("model.path", "data.train_files", *FIXED)
# The key that selects the checkpoint to resume from does not affect what a run computes.
_RESUME = "checkpoint.resume"


class Difference(NamedTuple):
    key: str
    before: Any
    now: Any


def differences(saved: Path, config: RunConfig) -> list[Difference]:
    """Return the keys whose values differ, sorted. A list counts as one value.

    Args:
        saved: A resolved `config.yaml`.
        config: The configuration to compare it with.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not YAML, or not a mapping.
    """
    return [each for each in _all_differences(saved, config) if each.key != _RESUME]


def other_run(saved: Path, config: RunConfig) -> list[Difference]:
    """Return the differences that make `config` a different run than `saved`.

    There are none for the same run started from its beginning. Arguments and exceptions are those of
    `differences`.
    """
    return [
        each
        for each in _all_differences(saved, config)
        if each.key in _OF_THE_RUN
        or each.key.startswith(("algorithm.", "loss."))
        # Only the path of a checkpoint changes where a run starts; `auto` and `disable` do not.
        or (each.key == _RESUME and not {each.before, each.now} <= {RESUME_AUTO, RESUME_DISABLE})
    ]


def _all_differences(saved: Path, config: RunConfig) -> list[Difference]:
    values = parse_yaml(saved.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(
            f"it is {'empty' if values is None else f'a {type(values).__name__}'}, not a mapping of keys"
        )

    # A key that only one of the two has is a difference too, because versions add keys.
    before = dict(flat(with_current_keys(values)[0]))
    now = dict(flat(plain_values(config)))
    return [
        Difference(key, before.get(key, ABSENT), now.get(key, ABSENT))
        for key in sorted(before.keys() | now.keys(), key=str)
        if before.get(key, ABSENT) != now.get(key, ABSENT)
    ]
