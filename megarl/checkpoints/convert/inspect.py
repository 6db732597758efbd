"""Describes the model in a folder as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoints.convert.source import ModelSource
from megarl.config.rules.reward import has_chat_template
from megarl.machine.errors import CheckpointError
from megarl.machine.files import parse_json
from megarl.models.architecture import Architecture
from megarl.weights.hf_folder import CONFIG_FILE

TOKENIZER_CONFIG = "tokenizer_config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HEADS = {"lm": "language model", "value": "value head (critic or reward model)"}


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The description of a model.

    Attributes:
        step: The step of the run that saved it.
        model_class: From config.json; empty if it specifies none.
        num_parameters: Counts stored tensors, so a tied output layer is not counted twice.
        tokenizer: A description of the tokenizer.
        architecture: The fields that determine the model's shapes and computation.
        tensors: The name, shape, dtype and size (`nbytes`) of each tensor.
    """

    folder: str
    format: str
    layout: str
    step: int | None
    family: str
    model_class: str
    head: str
    dtype: str
    num_parameters: int
    nbytes: int
    tokenizer: str
    architecture: dict[str, Any]
    tensors: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def describe(source: ModelSource) -> ModelDescription:
    """Describe a model. Raises CheckpointError if its configuration or its tokenizer's is damaged."""
    (name, *_) = _read_json(source.companions / CONFIG_FILE).get("architectures") or [""]
    return ModelDescription(
        folder=str(source.folder),
        format=source.kind,
        layout=source.layout,
        step=source.step,
        family=source.architecture.model_type,
        model_class=name,
        head=_HEADS[source.head],
        dtype=str(source.dtype).removeprefix("torch."),
        num_parameters=source.num_parameters,
        nbytes=source.nbytes,
        tokenizer=_tokenizer(source.companions),
        architecture=architecture_fields(source.architecture),
        tensors=tuple(
            {
                "name": name,
                "shape": tensor.hf.shape,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "nbytes": tensor.nbytes,
            }
            for name, tensor in source.tensors.items()
        ),
    )


def architecture_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of an architecture as plain values. Programs read the parts of pairs by name."""
    fields = asdict(architecture)
    experts = fields["experts"]
    if experts is not None and experts["groups"] is not None:
        experts["groups"] = dict(zip(("num_groups", "num_selected"), experts["groups"], strict=True))
    if fields["local_rope"] is not None:
        fields["local_rope"] = dict(zip(("theta", "scaling"), fields["local_rope"], strict=True))
    return fields


def _tokenizer(companions: Path) -> str:
    """Describe the tokenizer from its files, without loading it."""
    files = [name for name in _TOKENIZER_FILES if (companions / name).is_file()]
    if not files:
        return "none"
    config = _read_json(companions / TOKENIZER_CONFIG) if (companions / TOKENIZER_CONFIG).is_file() else {}
    kind = config.get("tokenizer_class") or "a tokenizer"

    return (
        f"{kind} ({', '.join(files)}), {'with' if has_chat_template(companions) else 'without'} a chat "
        f"template"
    )


def _read_json(path: Path) -> dict:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
