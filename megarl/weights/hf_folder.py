"""A model as a Hugging Face folder: which tensors its files have, and what goes beside them, configuration,
tokenizer, chat templates and a custom model's code; all of it appears at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.machine.files import whole_folder, write_whole
from megarl.models.architecture import Architecture
from megarl.models.families import CRITIC_CLASS, FAMILIES, LM_CLASS, REWARD_CLASS
from megarl.models.tensor_table import Head
from megarl.weights.manifest import INDEX_FILE, SINGLE_FILE, manifest_of
from megarl.weights.shard_layout import ShardLayout, held_weights
from megarl.weights.tensors import Manifest, TensorMeta

CONFIG_FILE = "config.json"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
# the first where none fits
_CLASSES: dict[Head, tuple[str, ...]] = {"lm": (LM_CLASS,), "value": (CRITIC_CLASS, REWARD_CLASS)}


def copy_companions(
    source: Path, target: Path, dtype: torch.dtype | None = None, head: Head | None = None
) -> None:
    """Copies all but weights. config.json says `dtype` and a class with that `head`; None leaves them as they
    are."""
    # The source's index names other weight files, and config.json is written below.
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
    """A critic made from a language model is another class than the folder it came from. A value head has one
    label."""
    if model_class(config) not in _CLASSES[head]:
        config["architectures"] = [FAMILIES[config["model_type"]].class_prefix + _CLASSES[head][0]]
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
    """transformers gives the head of ...ForTokenClassification a bias; a critic has none, and zeros stand for
    it."""
    return model_class(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))) == CRITIC_CLASS


DEFAULT_FILE_BYTES = 5 * 10**9


class FilePlan(NamedTuple):
    """One file, of tensors of the pipeline stage `stage`. One of the stage's ranks writes it."""

    name: str
    stage: int
    manifest: Manifest


def plan_files(
    architecture: Architecture,
    stages: Sequence[ShardLayout],
    dtype: torch.dtype,
    head: Head = "lm",
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> tuple[FilePlan, ...]:
    """Files of at most `max_file_bytes` (a single larger tensor has one of its own).

    `stages`: the layout of a rank of each stage, of which all ranks' experts are meant.
    """
    whole = manifest_of(architecture, dtype, head)
    parts: list[tuple[int, dict]] = []

    for stage, layout in enumerate(stages):
        # A new stage begins a new file.
        room = 0
        # The given layout is that of one rank, but the stage holds the experts of all its ranks.
        layout = replace(layout, experts=range(architecture.num_experts))
        for tensor in (
            tensor
            for weight in held_weights(architecture, layout, head)
            if not weight.is_copy
            for tensor in weight.tensors
        ):
            nbytes = prod(tensor.shape) * dtype.itemsize
            if nbytes > room:
                parts.append((stage, {}))
                room = max(max_file_bytes, nbytes)
            parts[-1][1][tensor.name] = whole[tensor.name]
            room -= nbytes

    assert sorted(whole) == sorted(name for _, manifest in parts for name in manifest), (
        "stages must hold each tensor once"
    )

    # A single file holds everything, so it has the name that needs no index.
    if len(parts) == 1:
        return (FilePlan(SINGLE_FILE, *parts[0]),)
    return tuple(
        FilePlan(f"model-{number:05d}-of-{len(parts):05d}.safetensors", stage, manifest)
        for number, (stage, manifest) in enumerate(parts, start=1)
    )


def save_hf_folder(
    write_weights: Callable[[Path], None],
    files: Sequence[FilePlan],
    folder: str | Path,
    source_folder: str | Path,
    head: Head = "lm",
) -> None:
    """`write_weights` writes `files` into the folder that it is given; configuration, tokenizer and chat
    template are copied from `source_folder`, and config.json says the dtype of the weights and the class with
    that `head`.

    A folder that is there is replaced after the new one is complete. Raises ValueError where `folder` is the
    source, or exists and is not a Hugging Face folder; what `write_weights` raises, and then leaves `folder`
    as it was.
    """
    folder = Path(folder).absolute()
    source_folder = Path(source_folder).absolute()

    if folder.resolve() == source_folder.resolve():
        raise ValueError(
            f"{folder}: export would overwrite the folder it copies the tokenizer from; give another folder"
        )

    # Replacing any other folder would delete files that are not a model.
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder}: exists and is not a Hugging Face folder, so it is not replaced; give another folder"
        )

    with whole_folder(folder) as partial:
        write_hf_folder(write_weights, files, partial, source_folder, head)


def write_hf_folder(
    write_weights: Callable[[Path], None],
    files: Sequence[FilePlan],
    folder: Path,
    source_folder: Path,
    head: Head = "lm",
) -> None:
    """As save_hf_folder, into an empty folder that nobody reads before it returns. Raises what
    `write_weights` raises."""
    write_weights(folder)
    write_index(folder, [(name, meta, file.name) for file in files for name, meta in file.manifest.items()])
    copy_companions(source_folder, folder, next(iter(files[0].manifest.values())).dtype, head)


def write_index(folder: Path, tensors: Sequence[tuple[str, TensorMeta, str]]) -> None:
    """`tensors`: (name, meta, file). A single file needs none."""
    if len({file for _, _, file in tensors}) == 1:
        return
    index = {
        "metadata": {"total_size": sum(prod(meta.shape) * meta.dtype.itemsize for _, meta, _ in tensors)},
        "weight_map": {name: file for name, _, file in sorted(tensors, key=lambda tensor: tensor[0])},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
