"""Reads Megatron's distributed checkpoint (torch_dist) as a `ModelSource`, in whatever layout it was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path

import torch

from megarl.checkpoints.convert.source import ModelSource, StoredPiece, checked_tensors
from megarl.checkpoints.role_folder import MANIFEST_FILE, check_folder, read_manifest
from megarl.checkpoints.torch_dist import COMMON_FILE, DistributedTensor, StoredChunk, TorchDistIndex, check_chunk, read_chunk, read_index
from megarl.checkpoints.torch_file import refuse_code
from megarl.config.architecture import Architecture, read_architecture
from megarl.config.errors import CheckpointError
from megarl.weights.name_mapping import OUTPUT_LAYER, Cut, Head, Weight, weights_of
from megarl.weights.shard_layout import ShardLayout, pieces, shard_view
from megarl.weights.tensors import Rectangle, range_rectangles

_NUM_THREADS = 4
_PREFIXES = ("", "model.", "module.")
# Megatron names the two norms of a layer as Transformer Engine does, which holds them in the linear layer that follows.
_CANONICAL = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def canonical_key(weight: Weight) -> str:
    """The key of the tensor that holds `weight` for all layers, stacked along a first dimension."""
    if weight.layer is None:
        return weight.megatron_name
    return "decoder.layers." + canonical_rest(weight.megatron_name.removeprefix(f"decoder.layers.{weight.layer}."))


def canonical_rest(rest: str) -> str:
    return _CANONICAL.get(rest, rest)


def open_distributed(folder: Path, companions: Path, trust_remote_code: bool = False, check_contents: bool = True) -> ModelSource:
    """Where the folder has our manifest `check_contents` compares checksums too. Raises CheckpointError that names file and tensor."""
    architecture = read_architecture(str(companions), trust_remote_code)
    layout, step = "layout not recorded", None
    if (folder / MANIFEST_FILE).exists():
        if check_contents:
            check_folder(folder)
        description = read_manifest(folder).description
        sizes, step = description.layout, description.step
        layout = (
            f"written by TP {sizes.tensor_parallel_size} x PP {sizes.pipeline_parallel_size}"
            + (f" x VPP {sizes.virtual_pipeline_parallel_size}" if sizes.virtual_pipeline_parallel_size else "")
            + (f" x CP {sizes.context_parallel_size}" if sizes.context_parallel_size > 1 else "")
            + f" x DP {sizes.data_parallel_size}"
        )
    index = read_index(folder)
    model = {key: tensor for key, tensor in index.tensors.items() if "optimizer" not in key and not key.startswith("rng_state")}
    prefix = next((prefix for prefix in _PREFIXES if prefix + "embedding.word_embeddings.weight" in model), "")
    head: Head = "value" if (stored := model.get(prefix + OUTPUT_LAYER)) is not None and stored.shape[0] == 1 else "lm"
    found: dict[str, list[StoredPiece]] = {}
    dtypes: dict[str, torch.dtype] = {}
    used: set[str] = set()
    for weight in weights_of(architecture, head):
        if weight.is_copy:
            continue
        key, layer = _find(folder, model, prefix, weight)
        used.add(key)
        tensor = model[key]
        for name, piece in _stored_pieces(index, architecture, key, tensor, weight, layer):
            found.setdefault(name, []).append(piece)
            dtypes[name] = tensor.dtype
    if extra := model.keys() - used:
        raise CheckpointError(f"{folder}: {min(extra)} is not a tensor of this architecture ({len(extra)} are not)")
    if check_contents and not (folder / MANIFEST_FILE).exists():
        _check_unlisted(index, used)
    return ModelSource(
        folder=folder,
        kind="Megatron torch_dist",
        layout=layout,
        companions=companions,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(folder, architecture, head, dtypes, found),
        step=step,
    )


def _check_unlisted(index: TorchDistIndex, keys: Iterable[str]) -> None:
    """Where no manifest has checksums: the weights against those that torch.save took, and no code in `common.pt`."""
    if (index.folder / COMMON_FILE).exists():
        refuse_code(index.folder / COMMON_FILE)
    chunks = [(key, chunk) for key in sorted(keys) for chunk in index.tensors[key].chunks]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="crc") as threads:
        list(threads.map(lambda each: check_chunk(index, *each), chunks))


def _find(folder: Path, model: dict[str, DistributedTensor], prefix: str, weight: Weight) -> tuple[str, int | None]:
    """(key, place along its first dimension). Layers are stacked, or have tensors of their own."""
    stacked = prefix + canonical_key(weight)
    if stacked in model:
        return stacked, weight.layer
    rest = weight.megatron_name.removeprefix(f"decoder.layers.{weight.layer}.")
    for name in (weight.megatron_name, f"decoder.layers.{weight.layer}.{canonical_rest(rest)}"):
        if prefix + name in model:
            return prefix + name, None
    raise CheckpointError(f"{folder}: {stacked} is missing; config.json says {weight.tensors[0].name} {weight.tensors[0].shape}")


def _stored_pieces(
    index: TorchDistIndex, architecture: Architecture, key: str, tensor: DistributedTensor, weight: Weight, layer: int | None
) -> Iterator[tuple[str, StoredPiece]]:
    shape = tensor.shape if layer is None else tensor.shape[1:]
    view = _check_shape(index, architecture, key, tensor, weight, layer)
    whole = _whole_layout(architecture, shape[0] if weight.cut is Cut.vocabulary else architecture.vocab_size)
    parts = pieces(weight, whole)
    for chunk in tensor.chunks:
        box = chunk.rectangle
        if layer is not None:
            if not box.starts[0] <= layer < box.stops[0]:
                continue
            box = Rectangle(box.starts[1:], box.stops[1:])
        first_row = 0
        for region in view_regions(view, shape, box):
            num_rows = prod(region.shape[: len(view) - len(shape) + 1])
            for part in parts:
                if (common := region.intersect(part.shard)) is None:
                    continue
                place = common.relative_to(part.shard.starts, part.hf.starts)
                opened = partial(_open, index, key, chunk, layer, (first_row, first_row + num_rows), region, common)
                yield part.hf_name, StoredPiece(place=place, open=opened)
            first_row += num_rows


def _whole_layout(architecture: Architecture, padded_vocab_size: int) -> ShardLayout:
    """Of a rank that holds the model uncut: what the checkpoint's tensors are."""
    return ShardLayout(
        tensor_parallel_size=1,
        tensor_parallel_rank=0,
        layers=tuple(range(architecture.num_hidden_layers)),
        holds_embedding=True,
        holds_output=True,
        padded_vocab_size=padded_vocab_size,
    )


def _check_shape(
    index: TorchDistIndex, architecture: Architecture, key: str, tensor: DistributedTensor, weight: Weight, layer: int | None
) -> tuple[int, ...]:
    """The view in which the weight's pieces are rectangles."""
    is_vocabulary = weight.cut is Cut.vocabulary
    rows = tensor.shape[0] if is_vocabulary and tensor.shape[0] >= architecture.vocab_size else architecture.vocab_size
    view = shard_view(weight, _whole_layout(architecture, rows))
    num_leading = len(view) - len(weight.tensors[0].shape) + 1
    expected = (prod(view[:num_leading]), *view[num_leading:])
    if layer is not None:
        expected = (architecture.num_hidden_layers, *expected)
    if tensor.shape != expected:
        raise CheckpointError(f"{index.folder}: {key} has shape {tensor.shape}, config.json makes it {expected}")
    return view


def view_regions(view: tuple[int, ...], shape: tuple[int, ...], box: Rectangle) -> Iterator[Rectangle]:
    """`box` of a tensor of `shape`, whose rows `view` has split: the rectangles of the view that it is, in the order of its rows."""
    num_leading = len(view) - len(shape) + 1
    for leading in range_rectangles(view[:num_leading], box.starts[0], box.stops[0]):
        yield Rectangle((*leading.starts, *box.starts[1:]), (*leading.stops, *box.stops[1:]))


def _open(
    index: TorchDistIndex, key: str, chunk: StoredChunk, layer: int | None, rows: tuple[int, int], region: Rectangle, common: Rectangle
) -> torch.Tensor:
    stored = read_chunk(index, key, chunk)
    if layer is not None:
        stored = stored[layer - chunk.offsets[0]]
    return stored[rows[0] : rows[1]].reshape(region.shape)[common.relative_to(region.starts).slices]
