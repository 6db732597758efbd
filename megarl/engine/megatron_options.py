"""Build Megatron's configurations from megarl's own values and the options that a run passes on."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from megarl.config.megatron_fields import DTYPES
from megarl.config.megatron_options import options_of
from megarl.config.schema import Layers, MegatronConfig

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def build_config[Config](
    config_class: type[Config], own: Mapping[str, Any], options: Mapping[str, Any]
) -> Config:
    """Return one of Megatron's configurations, with the options of a run in addition to megarl's own values.

    Raises:
        ValueError: Megatron refuses the options, or needs a package for them that is not installed.
    """
    if not options:
        return config_class(**own)
    types = typing.get_type_hints(config_class)
    converted = {name: _converted(value, types[name]) for name, value in options.items()}

    # Megatron checks combinations of its fields with assertions and several kinds of errors.
    try:
        return config_class(**{**own, **converted})
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        raise ValueError(
            f"Megatron's {config_class.__name__} refuses the options {given}: {error}"
        ) from error


def _converted(value: Any, kind: Any) -> Any:
    """Return a value of a file as Megatron's type: a member of an enumeration, a dtype, or a tuple."""
    kinds = typing.get_args(kind) or (kind,)
    if isinstance(value, list):
        is_tuple = any(typing.get_origin(each) is tuple or each is tuple for each in (kind, *kinds))
        items = [_converted(item, kind) for item in value]
        return tuple(items) if is_tuple else items
    if not isinstance(value, str):
        return value

    if torch.dtype in kinds:
        return getattr(torch, DTYPES[value])
    for each in kinds:
        if isinstance(each, type) and issubclass(each, Enum) and value in each.__members__:
            return each[value]
    return value


def require_supported(config: MegatronConfig, layers: Layers, *, on_cuda: bool) -> None:
    """Check that all options work on this device and with these layers.

    Raises:
        ValueError: An option would be ignored, or would fail later.
    """
    for option in options_of(config):
        if (lacking := option.lacks(on_cuda=on_cuda, layers=layers)) is not None:
            raise ValueError(
                f"megatron.{option.section}.{option.name}={option.value} requires {lacking}, but this "
                f"process is on {'CUDA' if on_cuda else 'a CPU'} with {layers.value} layers; remove it"
            )
