"""Resolves `engine.layers` for a device, and tells which kernels of flash attention are installed."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from megarl.config.schema import Device, DType, FlashAttention, Layers, RunConfig

_TRANSFORMER_ENGINE = "transformer_engine"
# Transformer Engine's Python modules on a machine without a GPU. Only dry runs import from this folder: other
# packages, such as peft, fail where they can import the modules without the compiled part.
DRY_RUN_MODULES = Path(sys.prefix) / "share" / "megarl" / "dry_run"

# The packages that contain kernels of flash attention, and how to install them.
_FLASH_ATTENTION_PACKAGES = {
    FlashAttention.fa3: (
        "flash-attn-3",
        "build it from the folder `hopper` of FlashAttention's sources, or use engine.flash_attention=fa2",
    ),
    FlashAttention.fa4: (
        "flash-attn-4",
        "pip install --pre flash-attn-4, or use engine.flash_attention=fa2",
    ),
}


class LayerChoice(NamedTuple):
    layers: Layers  # never `auto`
    why: str


def has_transformer_engine() -> bool:
    """Whether Transformer Engine and its compiled torch extension are installed. Imports neither.

    The extension is next to the package if both were compiled together, and inside it if it came as a package
    of its own. In the second case no import system finds it: Transformer Engine loads the file.
    """
    package = _package_folder(importlib.util.find_spec(_TRANSFORMER_ENGINE))
    if package is None:
        return False

    folders = (package.parent, package, package / "wheel_lib")
    return any(next(folder.glob("transformer_engine_torch*.so"), None) is not None for folder in folders)


def missing_flash_attention(asked: FlashAttention) -> tuple[str, str] | None:
    """Return the package of the requested kernels and how to install it, if it is not installed.

    Imports nothing.
    """
    package, hint = _FLASH_ATTENTION_PACKAGES.get(asked, (None, ""))
    return None if package is None or is_installed(package) else (package, hint)


def is_installed(distribution: str) -> bool:
    """Whether a distribution is installed. Imports nothing."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def find_transformer_engine() -> Path | None:
    """Return the folder of the Transformer Engine that a dry run imports. Imports nothing.

    It is the installed package, or the one in `DRY_RUN_MODULES`.
    """
    installed = importlib.util.find_spec(_TRANSFORMER_ENGINE)
    return _package_folder(installed or PathFinder.find_spec(_TRANSFORMER_ENGINE, [str(DRY_RUN_MODULES)]))


def _package_folder(spec: ModuleSpec | None) -> Path | None:
    if spec is None or spec.submodule_search_locations is None:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def has_transformer_engine_modules() -> bool:
    """Whether a dry run can import Transformer Engine's Python modules. Imports nothing."""
    return find_transformer_engine() is not None and importlib.util.find_spec("einops") is not None


def choose_layers(
    asked: Layers, dtype: DType, *, on_cuda: bool, has_transformer_engine: bool, has_adapters: bool = False
) -> LayerChoice:
    """Choose the layers of a model. `has_adapters` is set if the model trains low-rank adapters."""
    # An explicit choice is kept; `rules.run.layers` reports where it cannot work.
    if asked is not Layers.auto:
        return LayerChoice(asked, f"engine.layers={asked.value}")
    for exists, why in (
        (not on_cuda, "Transformer Engine does not support CPU"),
        (dtype is DType.float32, "Transformer Engine has no float32 attention for packed rows"),
        (not has_transformer_engine, "Transformer Engine is not installed"),
        (has_adapters, "adapters (lora) are added to local layers"),
    ):
        if exists:
            return LayerChoice(Layers.local, why)
    return LayerChoice(Layers.transformer_engine, "on CUDA with Transformer Engine installed")


def trains_adapters(config: RunConfig) -> bool:
    """Whether a model of the run may train low-rank adapters."""
    return any(model.adapters is not None for model in config.trained_models.values())


def simulated_layers(config: RunConfig) -> LayerChoice:
    """Choose the layers of a dry run, which simulates the compiled part of Transformer Engine in bfloat16.

    Raises:
        ValueError: The requested layers cannot be simulated.
    """
    asked = config.engine.layers
    dtype = config.model.dtype
    installed = has_transformer_engine_modules()

    if asked is Layers.transformer_engine and not installed:
        raise ValueError(
            "engine.layers=transformer_engine: a dry run uses Transformer Engine's Python modules, which are "
            f"not installed: pip install --no-deps --target {DRY_RUN_MODULES} transformer-engine (no GPU or "
            "compiler is needed), or use engine.layers=local"
        )
    if asked is Layers.transformer_engine and dtype is DType.float32:
        raise ValueError(
            "engine.layers=transformer_engine: a dry run simulates its kernels in bfloat16, but model.dtype "
            "is float32: use engine.layers=local or model.dtype=bfloat16"
        )

    return choose_layers(
        asked,
        dtype,
        on_cuda=True,
        has_transformer_engine=installed,
        has_adapters=trains_adapters(config),
    )


def describe_layers(config: RunConfig) -> str:
    """Describe the layers in one line, for this process's environment. `device: auto` may be CPU or CUDA."""
    devices = {Device.cpu: (False,), Device.cuda: (True,), Device.auto: (False, True)}[config.device]
    installed = has_transformer_engine()
    choices = [
        choose_layers(
            config.engine.layers,
            config.model.dtype,
            on_cuda=cuda,
            has_transformer_engine=installed,
            has_adapters=trains_adapters(config),
        )
        for cuda in devices
    ]
    # One line suffices where the device makes no difference.
    if len(set(choices)) == 1:
        return f"{choices[0].layers.value} ({choices[0].why})"

    return "; ".join(
        f"on {'CUDA' if cuda else 'CPU'}: {choice.layers.value} ({choice.why})"
        for cuda, choice in zip(devices, choices, strict=True)
    )
