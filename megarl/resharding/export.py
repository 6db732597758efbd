"""Writes a stream of weight buckets as a complete Hugging Face folder: all of it appears at once, or nothing does."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.protocol.weights import Manifest, WeightBucket, WeightReceipt
from megarl.resharding.manifest import INDEX_FILE, SINGLE_FILE

# What a folder holds beside its weights: configuration, tokenizer, chat templates, and a custom model's code.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_DEFAULT_SHARD_BYTES = 5 * 10**9


def save_hf_folder(
    buckets: Iterable[WeightBucket],
    manifest: Manifest,
    folder: str | Path,
    source_folder: str | Path,
    max_shard_size: int = _DEFAULT_SHARD_BYTES,
) -> None:
    """Writes safetensors of at most `max_shard_size` bytes (a single larger tensor has a file of its own) and copies
    configuration, tokenizer and chat template from `source_folder`; config.json says the dtype of the weights.

    A folder that is there is replaced after the new one is complete. Beside the buckets, memory for one file is used.
    Raises WeightTransferError for tensors that are missing, extra or doubled, and then leaves `folder` as it was;
    ValueError where `folder` is the source, or exists and is not a Hugging Face folder.
    """
    folder, source_folder = Path(folder).absolute(), Path(source_folder).absolute()
    if folder.resolve() == source_folder.resolve():
        raise ValueError(f"{folder}: export would overwrite the folder it copies the tokenizer from; give another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: exists and is not a Hugging Face folder, so it is not replaced; give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.partial-", dir=folder.parent) as scratch:
        partial = Path(scratch) / "new"
        partial.mkdir()
        _write_weights(buckets, manifest, partial, max_shard_size)
        _copy_companions(source_folder, partial, next(iter(manifest.values())).dtype)
        if folder.exists():
            os.rename(folder, Path(scratch) / "old")
        os.rename(partial, folder)


def _write_weights(buckets: Iterable[WeightBucket], manifest: Manifest, folder: Path, max_shard_size: int) -> None:
    receipt = WeightReceipt(manifest)
    writer = _ShardWriter(folder, max_shard_size)
    incomplete: dict[str, tuple[torch.Tensor, int]] = {}  # tensor, elements still to come
    for chunk in (chunk for bucket in buckets for chunk in bucket.chunks):
        receipt.record(chunk.meta, chunk.data.dtype)
        if chunk.name not in incomplete:
            shape = manifest[chunk.name].shape
            incomplete[chunk.name] = (torch.empty(shape, dtype=chunk.data.dtype), prod(shape))
        tensor, remaining = incomplete.pop(chunk.name)
        tensor.view(-1)[chunk.offset : chunk.offset + chunk.data.numel()].copy_(chunk.data)
        remaining -= chunk.data.numel()
        if remaining > 0:
            incomplete[chunk.name] = (tensor, remaining)
        else:
            writer.add(chunk.name, tensor)
    receipt.close()
    writer.close()


class _ShardWriter:
    """Fills one file after the other; the names that tell their number are given when the number is known."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._written: list[list[str]] = []  # names of each file's tensors

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"

    def close(self) -> None:
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self._folder / SINGLE_FILE)
            return
        weight_map = {}
        for number, names in enumerate(self._written):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def _copy_companions(source: Path, target: Path, dtype: torch.dtype) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the field
    config["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
