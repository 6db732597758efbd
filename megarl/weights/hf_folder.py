"""What a Hugging Face folder holds beside its weights: configuration, tokenizer, chat templates, and a custom model's code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from megarl.config.architecture import CRITIC_CLASS, LM_CLASS, REWARD_CLASS, class_prefix
from megarl.machine.files import write_whole
from megarl.weights.name_mapping import Head

CONFIG_FILE = "config.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_CLASSES: dict[Head, tuple[str, ...]] = {"lm": (LM_CLASS,), "value": (CRITIC_CLASS, REWARD_CLASS)}  # the first where none fits


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None, head: Head | None = None) -> None:
    """Copies all but weights. config.json says `dtype` and a class with that `head`; None leaves them as they are."""
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        if path.is_file() and not path.name.endswith(".index.json") and path.name != CONFIG_FILE:
            shutil.copyfile(path, target / path.name)
    config: dict[str, Any] = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name of the field
        config["dtype"] = str(dtype).removeprefix("torch.")
    if head is not None:
        _name_class(config, head)
    write_whole(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _name_class(config: dict[str, Any], head: Head) -> None:
    """A critic made from a language model is another class than the folder it came from. A value head has one label."""
    if model_class(config) not in _CLASSES[head]:
        config["architectures"] = [class_prefix(config["model_type"]) + _CLASSES[head][0]]
    if head == "value":
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    else:
        for field in ("id2label", "label2id", "num_labels", "problem_type"):
            config.pop(field, None)


def model_class(config: dict[str, Any]) -> str:
    """The part of the class's name that says its head, such as ForCausalLM; empty for another."""
    (name, *_) = config.get("architectures") or [""]
    return next((kind for kinds in _CLASSES.values() for kind in kinds if name.endswith(kind)), "")


def has_bias(folder: Path) -> bool:
    """transformers gives the head of ...ForTokenClassification a bias; a critic has none, and zeros stand for it."""
    return model_class(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))) == CRITIC_CLASS
