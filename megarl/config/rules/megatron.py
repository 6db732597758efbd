"""Rules for the options of Megatron-Core that are passed on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from megarl.config.finding import Absence, Finding, Findings
from megarl.config.layers import choose_layers, has_transformer_engine
from megarl.config.megatron_fields import DTYPES, find_megatron, megatron_fields
from megarl.config.megatron_options import (
    MOMENT_DTYPES,
    Option,
    Requirement,
    options_of,
    owned_fields,
)
from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Device, DType, Layers, RunConfig
from megarl.machine.errors import counted, written
from megarl.machine.processors import has_gpu
from megarl.machine.ray_address import cluster_address
from megarl.models.architecture import Architecture
from megarl.models.layers import routes_tokens

# Options without an effect unless another one has one of the given values.
_WITHOUT_EFFECT: Mapping[str, tuple[str, str, tuple[object, ...]]] = {
    **dict.fromkeys(MOMENT_DTYPES, ("optimizer", "use_precision_aware_optimizer", (True,))),
    **dict.fromkeys(
        (
            "fp8_recipe",
            "fp8_quantizer_factory",
            "fp8_margin",
            "fp8_interval",
            "fp8_amax_history_len",
            "fp8_amax_compute_algo",
            "fp8_wgrad",
            "fp8_dot_product_attention",
            "fp8_multi_head_attention",
            "tp_only_amax_red",
            "first_last_layers_bf16",
        ),
        ("transformer", "fp8", ("e4m3", "hybrid")),
    ),
    **dict.fromkeys(
        ("moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
        ("transformer", "moe_token_dispatcher_type", ("flex",)),
    ),
    **dict.fromkeys(("fp4_recipe", "fp4_quantizer_factory"), ("transformer", "fp4", ("e2m1",))),
}
# The numbers of ranks for which DeepEP has buffer sizes (`deep_ep.Buffer.get_dispatch_config`).
_DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
_HYBRID = "HybridEPBuffer"
# Switches of Transformer Engine that Megatron sets from attention_backend, and refuses with other values.
_SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_SWITCHED_ON = {"flash": _SWITCHES[:1], "fused": _SWITCHES[1:2], "unfused": _SWITCHES[2:], "local": ()}
_FLASH_VERSIONS = (2, 3, 4)
# Attention in FP8, for which Transformer Engine has no kernel of packed rows.
_FP8_ATTENTION = ("fp8_dot_product_attention", "fp8_multi_head_attention")


def options(config: RunConfig, role: ModelRole) -> Findings:
    """Check the options of one model: names, owners, types, and what they need."""
    given = list(options_of(role.megatron))
    # Without Megatron's source, which the machine of the run has, only the owners are known.
    is_installed = bool(given) and find_megatron() is not None

    for option in given:
        key = f"{role.megatron_key}.{option.section}.{option.name}"
        if (reason := owned_fields(option.section).get(option.name)) is not None:
            yield Finding((key,), reason.replace("{role}", role.parallel_key.removesuffix(".parallel")))
        elif is_installed and option.name not in megatron_fields(option.section):
            yield Finding((key,), f"Megatron-Core has no such field; {_nearest(option)}")
        elif is_installed and option.value not in megatron_fields(option.section)[option.name]:
            accepted = megatron_fields(option.section)[option.name]
            yield Finding((key,), f"is {option.value!r}, but must be {accepted}")
        else:
            yield from _effect(config, role, option, key)


def _nearest(option: Option) -> str:
    if near := get_close_matches(option.name, megatron_fields(option.section), n=3):
        return f"did you mean {' or '.join(near)}?"
    return f"see the fields of Megatron's configuration of {option.section}"


def _effect(config: RunConfig, role: ModelRole, option: Option, key: str) -> Findings:
    """Check that an option has an effect with the others, on the device and with the layers of the run."""
    if (needed := _WITHOUT_EFFECT.get(option.name)) is not None:
        section, name, values = needed
        if getattr(role.megatron, section).get(name) not in values:
            other = f"{role.megatron_key}.{section}.{name}"
            either = " or ".join(map(written, values))
            yield Finding(
                (key, other),
                f"{option.name} has no effect unless {name} is {either}; set {other}={written(values[0])}, "
                f"or remove {option.name}",
            )
            return

    # Other dtypes have scales of their own, which checkpoints do not store.
    if option.name in MOMENT_DTYPES and DTYPES[str(option.value)] not in ("float32", "bfloat16"):
        yield Finding((key,), f"is {option.value}, but moments are stored in float32 or bfloat16; use one")
        return

    if option.name in _FP8_ATTENTION and option.value and config.engine.packing:
        yield Finding(
            (key, "engine.packing"),
            f"{option.name} has no kernel for packed rows; remove it, or set engine.packing=false",
        )
        return

    layers = config.engine.layers
    if layers is Layers.auto and config.model.dtype is DType.float32:
        layers = Layers.local  # Transformer Engine has no float32 attention for packed rows

    if (lacking := option.lacks(on_cuda=config.device is not Device.cpu, layers=layers)) is not None:
        keys = ("device",) if lacking == "CUDA" else ("engine.layers", "model.dtype")
        yield Finding((key, *keys), f"{option.name} requires {lacking}; remove it, or change {keys[0]}")


def fit_model(_: RunConfig, role: ModelRole, architecture: Architecture) -> Findings:
    """Check that a dense model has no options for experts, and that DeepEP has buffers for others."""
    if routes_tokens(architecture):
        yield from _deepep_ranks(role)
        return
    for option in options_of(role.megatron):
        # Layers with experts read also an option whose name does not say so.
        is_of_experts = option.name.startswith("moe_") or option.name == "use_transformer_engine_op_fuser"
        if option.section == "transformer" and is_of_experts:
            yield Finding(
                (f"{role.megatron_key}.{option.section}.{option.name}",),
                f"is for mixture-of-experts models, but {role.path} is dense; remove it",
            )


def _deepep_ranks(role: ModelRole) -> Findings:
    transformer = role.megatron.transformer
    backend = transformer.get("moe_flex_dispatcher_backend", "deepep")
    if (transformer.get("moe_token_dispatcher_type"), backend) != ("flex", "deepep"):
        return
    ranks = role.parallel.expert_parallel_size * role.parallel.expert_tensor_parallel_size
    if ranks not in _DEEPEP_RANKS:
        key = f"{role.parallel_key}.expert_parallel_size"
        other = f"{role.megatron_key}.transformer.moe_token_dispatcher_type"
        yield Finding(
            (key, other),
            f"the experts of a layer are on {counted(ranks, 'rank')}, but DeepEP has buffers for "
            f"{', '.join(map(str, _DEEPEP_RANKS))}; change {key}, or set {other}=alltoall",
        )


def attention_switches(config: RunConfig) -> Findings:
    """Check that this machine's environment, which workers get, agrees with the options of attention."""
    models = {role.megatron_key: role.megatron.transformer for role in model_roles(config)}
    for section, options in models.items():
        for name, expected in _attention_environment(options).items():
            if (given := os.environ.get(name, expected)) != expected:
                key = f"{section}.transformer"
                yield Finding(
                    (key,),
                    f"with these options Megatron sets {name}={expected}, but the environment has {name}="
                    f"{given}; unset {name}, and set {key}.attention_backend or .flash_attention_version",
                )


def _attention_environment(options: Mapping[str, object]) -> dict[str, str]:
    switched_on = _SWITCHED_ON.get(str(options.get("attention_backend")), _SWITCHES)
    expected = {name: str(int(name in switched_on)) for name in _SWITCHES}
    if (version := options.get("flash_attention_version")) is not None:
        expected |= {f"NVTE_FLASH_ATTN_V{each}": "0" for each in _FLASH_VERSIONS if each != version}
    return expected


def requirements_here(config: RunConfig) -> Findings:
    """Check that this machine has what the options need, if the run joins no cluster."""
    if cluster_address() is None and config.device is not Device.cpu:
        for role in model_roles(config):
            yield from _requirements_here(config, role)


def _missing_dispatcher(role: ModelRole) -> str | None:
    """Return the package that a flexible dispatcher requires, if it is not installed."""
    backend = role.megatron.transformer.get("moe_flex_dispatcher_backend", "deepep")
    package = find_spec("deep_ep")
    if backend == "hybridep":
        # Only a branch of DeepEP has it.
        # A folder without __init__.py is a package without an origin.
        source = package.origin if package is not None else None
        has_hybrid = source is not None and _HYBRID in Path(source).read_text(encoding="utf-8")
        return None if has_hybrid else "deep_ep of DeepEP's branch hybrid-ep"
    return None if backend == "ncclep" or package is not None else "deep_ep (pip install sgl-deep-ep)"


def _requirements_here(config: RunConfig, role: ModelRole) -> Iterator[Finding]:
    for option in options_of(role.megatron):
        key = f"{role.megatron_key}.{option.section}.{option.name}"
        if option.value == "flex" and (package := _missing_dispatcher(role)):
            message = f"{option.value} requires the package {package}, which is not installed"
            yield Finding((key,), f"{message}; install it, or remove the option", Absence.package)
        # With device=cuda, the missing GPU is reported once.
        if option.requirement is not Requirement.nothing and config.device is Device.auto and not has_gpu():
            yield Finding(
                (key,),
                f"{option.name} requires CUDA, but this machine has no GPU that torch can use; remove it, or "
                "use a machine with GPUs",
                Absence.gpu,
            )
        elif option.requirement is Requirement.transformer_engine and not has_transformer_engine():
            choice = choose_layers(
                config.engine.layers, config.model.dtype, on_cuda=True, has_transformer_engine=False
            )
            # With the layers requested explicitly, the missing package is reported where they are checked.
            if choice.layers is Layers.local or option.section == "optimizer":
                yield Finding(
                    (key,),
                    f"{option.name} requires Transformer Engine, which is not installed; see "
                    "docs/install.md, or remove the option",
                    Absence.package,
                )
