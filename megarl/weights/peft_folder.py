"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megarl.machine.errors import counted
from megarl.machine.files import read_json_object, write_whole
from megarl.models.adapters import SAVED_MODULES, adapter_names, is_adapter
from megarl.models.architecture import Architecture, LoRA
from megarl.models.config_reader import ConfigReader
from megarl.models.families import REWARD_CLASS
from megarl.models.tensor_table import VALUE_HEAD_TENSOR, Head, hf_tensors, trained_tensors
from megarl.weights.checkpoint_index import ADAPTER_CONFIG_FILE
from megarl.weights.piece import Piece
from megarl.weights.safetensors_file import check_finite
from megarl.weights.tensors import WeightTransferError

CONFIG_FILE = ADAPTER_CONFIG_FILE
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_HEADS = {"classifier", "score"}  # PEFT lists both for a model with a value head
SEQUENCE_TASK = "SEQ_CLS"  # of a reward model, whose head returns one score
_TASKS: dict[Head, str] = {"lm": "CAUSAL_LM", "value": "TOKEN_CLS"}
# The fields of PEFT's LoraConfig, with the values that mean plain LoRA. Other fields are refused, because
# they may change what is computed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Other initializations change the base model, and PEFT repeats the change when it loads the adapter.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_rslora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "ensure_weight_tying": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": (None, []),
    "layers_pattern": (None, []),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "runtime_config": (None, {"ephemeral_gpu_offload": False}),
    "loftq_config": (None, {}),
    "arrow_config": (None,),
    "corda_config": (None,),
    "eva_config": (None,),
    "kasa_config": (None,),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
# Fields that are read, and fields without an effect on a trained adapter.
_READ = {"peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "task_type"}
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
}
_DEFAULT_NUMBER = 8  # of `r` and of `lora_alpha` in PEFT
# The beginning of a full path, with which PEFT names the projections of a small model.
_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def adapter_tensors(architecture: Architecture, head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model's adapters, by the name in the tensor table.

    A critic's head and saved modules are among them, because they train.
    """
    trained = trained_tensors(architecture, head)
    return {tensor.name: tensor.shape for tensor in hf_tensors(architecture, head) if tensor.name in trained}


def has_adapter(folder: Path) -> bool:
    """Return whether a folder has the configuration of an adapter."""
    return (folder / CONFIG_FILE).is_file()


def read_lora(folder: Path) -> LoRA:
    """Read the rank, the scale, the targets and the saved modules of an adapter.

    Raises:
        WeightTransferError: The folder is not an adapter in PEFT's format, or has options that change what
            is computed. The message names them.
    """
    file = folder / CONFIG_FILE
    try:
        fields = read_json_object(file)
    except (OSError, ValueError) as error:
        raise WeightTransferError(f"{file}: not an adapter in PEFT's format: {error}") from error

    problems = [] if fields.get("peft_type") == "LORA" else [f"peft_type is {fields.get('peft_type')!r}"]
    known = _READ | _HARMLESS
    problems += [
        f"{name} is {value!r}"
        for name, value in fields.items()
        if name not in known and value not in _NEUTRAL.get(name, ())
    ]

    numbers = ConfigReader(fields)
    rank = numbers.number("r", int, _DEFAULT_NUMBER)
    alpha = numbers.number("lora_alpha", float, float(_DEFAULT_NUMBER))
    problems += numbers.problems

    targets = fields.get("target_modules")
    names = targets if isinstance(targets, list) and all(isinstance(name, str) for name in targets) else []
    if not names:
        problems.append(f"target_modules is {targets!r}, not a list of names")

    modules = fields.get("modules_to_save") or []
    saved = set(map(str, modules)) - _HEADS if isinstance(modules, list) else {str(modules)}
    if not saved.issubset(SAVED_MODULES):
        problems.append(f"modules_to_save has {', '.join(sorted(saved.difference(SAVED_MODULES)))}")

    if problems:
        raise WeightTransferError(f"{file}: only plain LoRA is supported, but {'; '.join(problems)}")

    # Targets are suffixes of names in the tensor table, in which numbers are placeholders. Whether every
    # layer and every expert has the adapter shows in the tensors of the folder.
    suffixes = {_EXPERT_NUMBER.sub("{expert}", _LAYER.sub("", name)) for name in names}
    return LoRA(
        rank=rank,
        alpha=alpha,
        targets=tuple(sorted(suffixes)),
        modules_to_save=tuple(sorted(saved)),
    )


def open_adapter(folder: Path, architecture: Architecture, head: Head) -> Callable[[Piece], torch.Tensor]:
    """Check a folder against the model's adapters, and return a function that reads pieces of it.

    Raises:
        WeightTransferError: Rank, scale, saved modules, names or shapes differ. The message names them.
    """
    stored = read_lora(folder)
    lora = architecture.lora
    assert lora is not None
    if (stored.rank, stored.alpha) != (lora.rank, lora.alpha):
        raise WeightTransferError(
            f"{folder}: has rank {stored.rank} and alpha {stored.alpha:g}, but the run has rank {lora.rank} "
            f"and alpha {lora.alpha:g}; set lora.rank={stored.rank} and lora.alpha={stored.alpha:g}"
        )

    if stored.modules_to_save != lora.modules_to_save:
        raise WeightTransferError(
            f"{folder}: has {_listed(stored.modules_to_save)} in modules_to_save, but the run has "
            f"{_listed(lora.modules_to_save)}; set lora.modules_to_save=[{','.join(stored.modules_to_save)}]"
        )

    file = folder / WEIGHTS_FILE
    tensors = adapter_tensors(architecture, head)
    # A critic's own head is read with its folder.
    wanted = {name: shape for name, shape in tensors.items() if name != VALUE_HEAD_TENSOR}
    values = read_adapter(folder)
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    faults = [f"has no {name}" for name in wanted if name not in shapes]
    faults += [
        f"{name} is not an adapter of this run" for name in shapes if is_adapter(name) and name not in wanted
    ]
    faults += [
        f"{name} has shape {shapes[name]}, not {shape}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if faults:
        named = "; ".join(faults[:4])
        raise WeightTransferError(
            f"{file}: differs in {counted(len(faults), 'tensor')} (see lora.targets): {named}"
        )

    return lambda piece: values[piece.hf_name][piece.hf.index]


def _listed(modules: Sequence[str]) -> str:
    return ", ".join(modules) or "nothing"


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an adapter, by the names in the tensor table.

    Raises:
        WeightTransferError: The file cannot be read, or has values that are not finite.
    """
    file = folder / WEIGHTS_FILE
    try:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            tensors = {name.removeprefix(_PREFIX): opened.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise WeightTransferError(f"{file}: cannot be read: {error}") from error

    for name, values in tensors.items():
        check_finite(values, name, file)
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    architecture: Architecture,
    base: str,
    head: Head = "lm",
    value_class: str | None = None,
) -> None:
    """Write an adapter into an existing folder.

    Args:
        folder: The folder.
        tensors: All tensors of `adapter_tensors`, by the names in the tensor table.
        architecture: The model with its adapters.
        base: The folder of the base model, or its name on the Hugging Face hub.
        head: The head of the model.
        value_class: The class of a value head, see copy_companions.
    """
    named = {_PREFIX + name: value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    write_config(folder, architecture, base, head, value_class)


def write_config(
    folder: Path, architecture: Architecture, base: str, head: Head = "lm", value_class: str | None = None
) -> None:
    """Write `adapter_config.json`. The arguments are those of `write_adapter`.

    Fields that are missing have PEFT's defaults.
    """
    assert architecture.lora is not None
    alpha = architecture.lora.alpha
    saved = [*architecture.lora.modules_to_save, *(["score"] if head == "value" else [])]

    config = {
        "peft_type": "LORA",
        "task_type": SEQUENCE_TASK if value_class == REWARD_CLASS else _TASKS[head],
        "base_model_name_or_path": base,
        "r": architecture.lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(architecture, head),
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    write_whole(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _target_modules(architecture: Architecture, head: Head) -> list[str]:
    """Return suffixes that match exactly the projections with an adapter, as PEFT compares them.

    The last part of a name is enough if every projection of that name has an adapter.
    """
    adapted: set[str] = set()
    others: set[str] = set()
    names = {tensor.name for tensor in hf_tensors(architecture, head)}
    for name in names:
        if not is_adapter(name):
            (adapted if adapter_names(name)[0] in names else others).add(name.removesuffix(".weight"))

    others_last = {name.rpartition(".")[2] for name in others}
    return sorted(
        {
            last if last not in others_last else ".".join(name.split(".")[-2:])
            for name in adapted
            for last in [name.rpartition(".")[2]]
        }
    )
