"""`megarl config CONFIG`: prints a configuration with everything merged, or the schema of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megarl.config.json_schema import json_schema
from megarl.config.load import plain_values, read_config
from megarl.config.schema import RunConfig
from megarl.config.schema.keys import default_of
from megarl.config.values import contents_of


def run(config_path: str | None, overrides: Sequence[str], changed: bool = False) -> None:
    """Print the configuration as YAML, which `megarl train` reads back to the same run.

    Values that depend on the machine, such as `device: auto`, stay as they are.

    Args:
        changed: Print only the keys that differ from their defaults.

    Raises:
        ConfigError: The configuration has errors.
        ValueError: There is no configuration.
    """
    if config_path is None:
        raise ValueError("give the CONFIG to print, or --schema for the JSON Schema of configuration files")
    config = read_config(RunConfig, config_path, overrides).required()
    values = plain_values(config)
    if changed:
        values = _differing(values, contents_of(default_of(type(config))))
    # Without its kind, a file is read as a reinforcement learning run.
    values = {"kind": config.kind.value} | values
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000), end="")


def schema(kind: str) -> None:
    """Print the JSON Schema of one of `json_schema.KINDS`."""
    print(json.dumps(json_schema(kind), indent=2))


def _differing(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not the defaults, without the sections that have none of them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        default = defaults.get(name)
        if value == default:
            continue
        is_section = isinstance(value, dict) and isinstance(default, dict) and bool(default)
        found[name] = _differing(value, default) if is_section else value
    return found
