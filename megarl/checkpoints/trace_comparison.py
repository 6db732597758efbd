"""Compare two traces of the same update, which two layouts, models or versions wrote (engine/step_trace.py).

A trace of a model contains `before` and `after`, the weights before and after the step, and a folder for each
mini-batch with hidden states, scores and gradients. Weights and gradients are whole tensors, so traces of
different layouts have the same names and shapes, up to the padding of the vocabulary.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.checkpoints.torch_dist import TorchDistIndex, read_chunk, read_index
from megarl.machine.errors import CheckpointError

BEFORE = "before"
AFTER = "after"
_LAYER = re.compile(r"layers\.(\d+)\.")
_STACKED = re.compile(r"layers\.(?!\d)")
# The parts of a layer in the order of the forward pass.
_ORDER = ("input_layernorm", "self_attention", "pre_mlp_layernorm", "mlp")


def mini_batch_folder(number: int) -> str:
    return f"mini_batch_{number:04d}"


def forward_file(rank: int | str) -> str:
    return f"forward_{rank}.npz"


class ComparedTensor(NamedTuple):
    """The difference of a tensor in two traces.

    Attributes:
        stage: When the tensor was computed, such as "mini-batch 1, forward pass".
        absolute: The largest absolute difference of an element.
        relative: The same, divided by the largest absolute value of the tensor in the first trace.
        is_close: Whether the tensors agree.
    """

    stage: str
    name: str
    absolute: float
    relative: float
    is_close: bool

    def describe(self) -> str:
        return (
            f"{self.stage}: {self.name}: largest difference {self.absolute:.3g}, {self.relative:.3g} of the "
            f"largest value"
        )


def compare_traces(first: Path, second: Path, tolerance: float, lr: float) -> Iterator[ComparedTensor]:
    """Yield every tensor in the order of computation.

    The order is: weights before the step; for each mini-batch, the forward pass and then gradients from the
    last layer to the first; weights after the step. Tensors agree if no element differs by more than
    `tolerance` times the largest value of the tensor. Adam divides an update by its own size, which makes
    small differences of small gradients large. An updated weight may differ further by what a gradient within
    the tolerance can cause.

    Args:
        first: The trace of a model.
        second: Another one of the same step.
        tolerance: The relative tolerance.
        lr: The learning rate of the step.

    Raises:
        CheckpointError: A trace is damaged, or the traces are not of the same model and samples.
    """
    yield from _compared("weights before the step", first / BEFORE, second / BEFORE, tolerance)
    folders = sorted(path.name for path in first.glob("mini_batch_*"))
    if folders != sorted(path.name for path in second.glob("mini_batch_*")) or not folders:
        raise CheckpointError(f"{first} and {second} do not have the same number of mini-batches")

    for number, folder in enumerate(folders, 1):
        name = f"mini-batch {number}"
        yield from _compared_forward(f"{name}, forward pass", first / folder, second / folder, tolerance)
        yield from _compared(f"{name}, gradients", first / folder, second / folder, tolerance, backwards=True)

    of_updates = [read_index(first / folder) for folder in folders]
    yield from _compared(
        "weights after the step", first / AFTER, second / AFTER, tolerance, updates=of_updates, lr=lr
    )


def _compared_forward(stage: str, first: Path, second: Path, tolerance: float) -> Iterator[ComparedTensor]:
    one, other = _forward(first), _forward(second)
    if one.keys() != other.keys():
        different = sorted(one.keys() ^ other.keys())
        raise CheckpointError(f"{first} and {second} do not have the same outputs: {', '.join(different)}")

    for name in sorted(one, key=_place_of_output):
        tokens = sorted(one[name])
        if tokens != sorted(other[name]):
            raise CheckpointError(f"{first} and {second} are not of the same samples")
        if tokens:
            before, now = (
                torch.from_numpy(np.stack([side[name][token] for token in tokens])) for side in (one, other)
            )
            yield _difference(stage, name, before, now, tolerance * before.abs().max())


def _forward(folder: Path) -> dict[str, dict[tuple[int, int], np.ndarray]]:
    """Return the recorded values by name and token."""
    found: dict[str, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
    for path in sorted(folder.glob(forward_file("*"))):
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                name, _, kind = key.rpartition("|")
                if kind == "values":
                    tokens = map(tuple, arrays[f"{name}|tokens"].tolist())
                    found[name] |= dict(zip(tokens, arrays[key], strict=True))
    return found


def _place_of_output(name: str) -> tuple[int, str]:
    # Embedding, layers, scores: a layer's name contains its padded number.
    return (0 if name == "embedding" else 1 if name.startswith("layer ") else 2, name)


def _compared(
    stage: str,
    first: Path,
    second: Path,
    tolerance: float,
    *,
    backwards: bool = False,
    updates: Sequence[TorchDistIndex] = (),
    lr: float = 0.0,
) -> Iterator[ComparedTensor]:
    one, other = read_index(first), read_index(second)
    if different := sorted(one.tensors.keys() ^ other.tensors.keys()):
        raise CheckpointError(f"{first} and {second} do not have the same tensors: {', '.join(different)}")
    entries = [entry for key, tensor in one.tensors.items() for entry in _entries(key, tensor.shape)]
    entries.sort(key=lambda entry: _place_of_weight(entry[2]), reverse=backwards)

    for key, layer, name in entries:
        before, now = (_part(_whole(index, key), layer) for index in (one, other))
        # The vocabulary is padded differently.
        if before.shape != now.shape:
            num_rows = min(len(before), len(now))
            before = before[:num_rows]
            now = now[:num_rows]
        allowed: Tensor | float = tolerance * before.float().abs().max()
        for update in updates:
            if key in update.tensors:
                gradient = _part(_whole(update, key), layer)[: len(before)].float().abs()
                # Adam's step changes at most by the learning rate times the relative change of the gradient.
                change = tolerance * gradient.max() / gradient.clamp(min=torch.finfo(torch.float32).tiny)
                allowed = allowed + 2 * lr * change.clamp(max=1.0)
        yield _difference(stage, name, before, now, allowed)


def _difference(
    stage: str, name: str, first: Tensor, second: Tensor, allowed: Tensor | float
) -> ComparedTensor:
    first, second = first.float(), second.float()
    difference = (first - second).abs()
    # A comparison with NaN is false: it counts as a difference.
    is_close = bool((difference <= allowed).all())
    absolute = float(difference.max())
    largest = float(first.abs().max())
    return ComparedTensor(stage, name, absolute, absolute / largest if largest else absolute, is_close)


def _entries(key: str, shape: Sequence[int]) -> Iterator[tuple[str, int | None, str]]:
    """Yield (key, layer, name) of the tensors in a stored one, which may contain those of all layers."""
    if _STACKED.search(key) and len(shape) > 1:
        for layer in range(shape[0]):
            yield key, layer, _STACKED.sub(f"layers.{layer}.", key, count=1)
    else:
        yield key, None, key


def _place_of_weight(name: str) -> tuple[int, int, str]:
    layer = _LAYER.search(name)
    if layer is None:
        # Embeddings and the vision tower come before the first layer, everything else after the last.
        return (-1 if "embedding" in name or "vision" in name else 10**6, 0, name)
    parts = [place for place, part in enumerate(_ORDER) if f".{part}." in name]
    return (int(layer[1]), parts[0] if parts else len(_ORDER), name)


def _part(tensor: Tensor, layer: int | None) -> Tensor:
    return tensor if layer is None else tensor[layer]


def _whole(index: TorchDistIndex, key: str) -> Tensor:
    stored = index.tensors[key]
    whole = torch.empty(stored.shape, dtype=stored.dtype)
    for chunk in stored.chunks:
        whole[chunk.tensor_slice.index] = read_chunk(index.folder, chunk)
    return whole
