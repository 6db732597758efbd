"""Write a model as a Hugging Face folder.

The folder contains weight files, the configuration, the tokenizer, chat templates and the code of a custom
model. It appears atomically.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megarl.machine.files import whole_folder, write_whole
from megarl.models.architecture import Architecture
from megarl.models.config_reader import QUANTIZATION
from megarl.models.families import CRITIC_CLASS, FAMILIES, REWARD_CLASS, family_of, read_fields
from megarl.models.fp8 import scale_name, scale_shape
from megarl.models.tensor_table import Head, unique_tensors
from megarl.weights.checkpoint_index import ADAPTER_CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from megarl.weights.kept_tensors import KeptTensors
from megarl.weights.manifest import manifest_of
from megarl.weights.shard_layout import ShardLayout, held_weights
from megarl.weights.tensors import Manifest, TensorMeta

CONFIG_FILE = "config.json"
# The number of layers that predict further tokens. Models of several parts have it in one of them, too.
MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_CLASSES: dict[Head, tuple[str, ...]] = {
    "lm": tuple(dict.fromkeys(family.lm_class for family in FAMILIES.values())),
    "value": (CRITIC_CLASS, REWARD_CLASS),
}


def copy_companions(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    head: Head | None = None,
    value_class: str | None = None,
    quantization: Mapping[str, Any] | None = None,
    promises_mtp: bool = True,
) -> None:
    """Copy everything except weights.

    Args:
        source: The folder to copy from.
        target: The folder to copy to.
        dtype: The dtype that config.json specifies afterwards. None: unchanged.
        head: The head of the model class that config.json names afterwards. None: unchanged.
        value_class: The suffix of the class that config.json then names for a value head. None: the source's
            class if it has one, otherwise a critic's.
        quantization: The format that config.json specifies afterwards, if `dtype` is given.
        promises_mtp: Whether config.json keeps the number of layers that predict further tokens. False for a
            folder whose weights do not include them.
    """
    # Skip the source's index, which lists other weight files, an adapter's configuration, and config.json,
    # which is written below.
    for path in sorted({path for pattern in _COPIED for path in source.glob(pattern)}):
        skipped = path.name.endswith(".index.json") or path.name in (CONFIG_FILE, ADAPTER_CONFIG_FILE)
        if path.is_file() and not skipped:
            shutil.copyfile(path, target / path.name)

    config: dict[str, Any] = read_fields(source)
    if dtype is not None:
        config.pop("torch_dtype", None)  # the older name of the field
        config.pop(QUANTIZATION, None)
        if quantization is not None:
            config[QUANTIZATION] = dict(quantization)
        # Models of several parts also specify it for each part.
        for part in _parts(config):
            if part is config or "dtype" in part:
                part["dtype"] = str(dtype).removeprefix("torch.")

    if head is not None:
        _name_class(config, head, value_class)
    if not promises_mtp:
        for part in _parts(config):
            part.update({name: 0 for name in MTP_FIELDS if part.get(name)})
    write_whole(target / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration, and those of the parts of a model of several parts."""
    yield config
    yield from (value for value in config.values() if isinstance(value, dict))


def _name_class(config: dict[str, Any], head: Head, value_class: str | None) -> None:
    """Name a model class with the given head.

    A critic made from a language model has another class than its source folder. A value head has one label.
    """
    kept = _CLASSES[head] if head == "lm" or value_class is None else (value_class,)
    if model_class(config) not in kept:
        family = family_of(config["model_type"])
        assert family is not None, config["model_type"]
        suffix = family.lm_class if head == "lm" else value_class or CRITIC_CLASS
        config["architectures"] = [family.class_prefix + suffix]
    if head == "value":
        config.update(id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0})
    else:
        for field in ("id2label", "label2id", "num_labels", "problem_type"):
            config.pop(field, None)


def model_class(config: dict[str, Any]) -> str:
    """Return the suffix of the class name that identifies the head, such as ForCausalLM; empty if unknown."""
    (name, *_) = config.get("architectures") or [""]
    return next((kind for kinds in _CLASSES.values() for kind in kinds if name.endswith(kind)), "")


def has_bias(folder: Path) -> bool:
    """Return whether transformers expects a bias in the head, as in ...ForTokenClassification.

    A critic has none, so zeros are written.
    """
    return model_class(read_fields(folder)) == CRITIC_CLASS


DEFAULT_FILE_BYTES = 5 * 10**9
_ONE_OF_ONE = "model-00001-of-00001.safetensors"


class FilePlan(NamedTuple):
    """A weight file with tensors of one pipeline stage, written by one of the stage's ranks."""

    name: str
    stage: int
    manifest: Manifest


def plan_files(
    architecture: Architecture,
    stages: Sequence[ShardLayout],
    dtype: torch.dtype,
    head: Head = "lm",
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    quantized: Collection[str] = (),
) -> tuple[FilePlan, ...]:
    """Assign tensors to files of at most `max_file_bytes`. A larger tensor gets a file of its own.

    Args:
        architecture: The model.
        stages: The layout of one rank per pipeline stage. Experts of all ranks of the stage are included.
        dtype: The dtype of the files.
        head: The head of the model.
        max_file_bytes: The maximum size of a file.
        quantized: The names of the tensors in block-scaled FP8, whose scales are in the same file.
    """
    whole: dict[str, Manifest] = {}  # the stored tensors of each tensor
    for name, meta in manifest_of(architecture, dtype, head).items():
        whole[name] = {name: meta}
        if name in quantized:
            whole[name] = {
                name: TensorMeta(meta.shape, torch.float8_e4m3fn),
                scale_name(name): TensorMeta(scale_shape(meta.shape), torch.float32),
            }
    parts: list[tuple[int, Manifest]] = []

    for stage, layout in enumerate(stages):
        # The layout describes one rank, but the stage holds the experts of all its ranks.
        layout = replace(layout, experts=range(architecture.num_experts))
        held = unique_tensors(held_weights(architecture, layout, head))
        # A new stage begins a new file.
        parts += [(stage, file) for file in _packed((whole[each.name] for each in held), max_file_bytes)]

    assert sorted(name for metas in whole.values() for name in metas) == sorted(
        name for _, manifest in parts for name in manifest
    ), "stages must hold each tensor once"

    # A single file contains everything, and its standard name needs no index.
    if len(parts) == 1:
        return (FilePlan(SINGLE_FILE, *parts[0]),)
    return tuple(
        FilePlan(f"model-{number:05d}-of-{len(parts):05d}.safetensors", stage, manifest)
        for number, (stage, manifest) in enumerate(parts, start=1)
    )


def _packed(tensors: Iterable[Manifest], max_file_bytes: int) -> list[Manifest]:
    """Distribute tensors, each with what must be in the same file, over files."""
    files: list[dict[str, TensorMeta]] = []
    room = 0
    for tensor in tensors:
        nbytes = manifest_bytes(tensor)
        if nbytes > room:
            files.append({})
            room = max(max_file_bytes, nbytes)
        files[-1].update(tensor)
        room -= nbytes
    return list(files)


def manifest_bytes(manifest: Manifest) -> int:
    return sum(prod(meta.shape) * meta.dtype.itemsize for meta in manifest.values())


def save_hf_folder(
    write_weights: Callable[[Path], object],
    files: Sequence[FilePlan],
    folder: str | Path,
    source_folder: str | Path,
    head: Head = "lm",
    value_class: str | None = None,
    kept_tensors: KeptTensors | None = None,
) -> None:
    """Write a Hugging Face folder atomically.

    An existing Hugging Face folder is replaced once the new one is complete. Exceptions of `write_weights`
    propagate and leave `folder` as it was.

    Args:
        write_weights: Writes `files` into the folder that it is given.
        files: The weight files.
        folder: The folder to write.
        source_folder: Where the configuration, tokenizer and chat template are copied from. config.json then
            specifies the dtype of the weights and the class with the given head.
        head: The head of the model.
        value_class: See copy_companions.
        kept_tensors: Tensors of the original folder that are copied.

    Raises:
        ValueError: `folder` is the source, or exists and is not a Hugging Face folder.
    """
    folder = Path(folder).absolute()
    source_folder = Path(source_folder).absolute()

    if folder.resolve() == source_folder.resolve():
        raise ValueError(
            f"{folder}: the export would overwrite the folder that the tokenizer is copied from; choose "
            f"another folder"
        )

    # Replacing any other folder would delete files that are not a model.
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder}: exists and is not a Hugging Face folder, so it is not replaced; choose another folder"
        )

    with whole_folder(folder) as partial:
        write_weights(partial)
        complete_hf_folder(files, partial, source_folder, head, value_class, kept_tensors)


def complete_hf_folder(
    files: Sequence[FilePlan],
    folder: Path,
    source_folder: Path,
    head: Head = "lm",
    value_class: str | None = None,
    kept_tensors: KeptTensors | None = None,
) -> None:
    """Add all but the weight files to a Hugging Face folder.

    The arguments are those of `save_hf_folder`.
    """
    write_kept_tensors_and_index(folder, files, kept_tensors)
    dtype = next(iter(files[0].manifest.values())).dtype
    has_mtp = kept_tensors is not None and kept_tensors.has_mtp
    copy_companions(source_folder, folder, dtype, head, value_class, promises_mtp=has_mtp)


def write_kept_tensors_and_index(
    folder: Path,
    files: Sequence[FilePlan],
    kept_tensors: KeptTensors | None,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> list[str]:
    """Complete the weights of a folder: copy what is kept of the original folder, and write the index.

    Args:
        folder: The folder.
        files: The weight files that it has.
        kept_tensors: What is copied; None: nothing.
        max_file_bytes: The maximum size of a file.

    Returns:
        The names of all weight files.
    """
    written = {file.name: file.manifest for file in files}
    if kept_tensors is not None:
        # transformers would read a file with the standard name, and nothing else.
        if SINGLE_FILE in written:
            (folder / SINGLE_FILE).rename(folder / _ONE_OF_ONE)
            written = {_ONE_OF_ONE: written[SINGLE_FILE]}
        parts = _packed(kept_tensors.manifests, max_file_bytes)
        for number, manifest in enumerate(parts, start=1):
            of_several = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
            name = f"kept{of_several}.safetensors"
            kept_tensors.write(folder / name, manifest)
            written[name] = manifest

    # A single file needs no index.
    if len(written) > 1:
        file_of = {name: file for file, manifest in written.items() for name in manifest}
        total = sum(map(manifest_bytes, written.values()))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return list(written)
