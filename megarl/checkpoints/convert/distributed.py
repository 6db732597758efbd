"""Reads Megatron's distributed checkpoint (torch_dist), written in any layout, as a `ModelSource`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from megarl.checkpoints.convert.hugging_face import with_stored_adapters
from megarl.checkpoints.convert.source import ModelSource, StoredPiece, checked_tensors
from megarl.checkpoints.role_folder import MANIFEST_FILE, Layout, check_folder, read_description
from megarl.checkpoints.torch_dist import (
    COMMON_FILE,
    DistributedTensor,
    StoredItem,
    TorchDistIndex,
    check_chunk,
    read_chunk,
    read_index,
)
from megarl.checkpoints.torch_file import refuse_code
from megarl.machine.errors import CheckpointError
from megarl.models.adapters import is_adapter
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture
from megarl.models.layers import kind_of, stores_layers_apart
from megarl.models.mapping import FEED_FORWARD, NORM_BEFORE, Cut, num_row_axes
from megarl.models.tensor_table import OUTPUT_LAYER, Head, Weight, weights_of
from megarl.weights.peft_folder import adapter_tensors
from megarl.weights.piece import Piece
from megarl.weights.shard_layout import pieces, shard_view, whole_layout
from megarl.weights.tensors import TensorSlice, range_slices

_NUM_THREADS = 4
_PREFIXES = ("", "model.", "module.")
# Megatron stores the norms before the two parts of a layer like Transformer Engine, which has those of most
# kinds in the linear layer that follows.
_PART_AFTER = {norm: prefix for prefix, norm in NORM_BEFORE.items()}
_OF_DENSE_LAYER = "mlp.linear_fc1.layer_norm_weight"


class StoredSlice(NamedTuple):
    """The location of a weight in the checkpoint.

    Identical layers are stacked along a first dimension, and the experts of a layer along the next.

    Attributes:
        key: The name of a tensor.
        leading: The weight's index in the first dimensions of that tensor.
        sizes: The sizes of these dimensions.
    """

    key: str
    leading: tuple[int, ...]
    sizes: tuple[int, ...]


def stored_slice(architecture: Architecture, weight: Weight) -> StoredSlice:
    """Return where Megatron stores a weight. Layers of several kinds are not stacked."""
    if weight.layer is None:
        return StoredSlice(weight.megatron_name, (), ())
    return _places(architecture, weight)[stores_layers_apart(architecture)]


def _places(architecture: Architecture, weight: Weight) -> tuple[StoredSlice, StoredSlice]:
    """Return the location with stacked layers, and the one with separate layers."""
    assert weight.layer is not None
    rest = weight.megatron_name.removeprefix(f"decoder.layers.{weight.layer}.")
    if rest in _PART_AFTER:
        rest = kind_of(architecture, weight.layer, _PART_AFTER[rest]).stored_norm

    leading: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()

    if weight.expert is not None:
        rest = rest.replace(f".local_experts.{weight.expert}.", ".experts.")
        leading = (weight.expert,)
        sizes = (architecture.num_experts,)

    stacked = StoredSlice(
        f"decoder.layers.{rest}", (weight.layer, *leading), (architecture.num_hidden_layers, *sizes)
    )
    return stacked, StoredSlice(f"decoder.layers.{weight.layer}.{rest}", leading, sizes)


def _layout_in_words(sizes: Layout) -> str:
    """Describe the layout that wrote a checkpoint, such as `written by TP 2 x PP 1 x DP 4, EP 2`."""
    virtual = sizes.virtual_pipeline_parallel_size
    dimensions = [
        f"TP {sizes.tensor_parallel_size}",
        f"PP {sizes.pipeline_parallel_size}",
        *([f"VPP {virtual}"] if virtual else []),
        *([f"CP {sizes.context_parallel_size}"] if sizes.context_parallel_size > 1 else []),
        f"DP {sizes.data_parallel_size}",
    ]
    of_experts = [
        *([f"EP {sizes.expert_parallel_size}"] if sizes.expert_parallel_size > 1 else []),
        *([f"ETP {sizes.expert_tensor_parallel_size}"] if sizes.expert_tensor_parallel_size > 1 else []),
    ]

    return f"written by {', '.join([' x '.join(dimensions), *of_experts])}"


def open_distributed(
    folder: Path, companions: Path, trust_remote_code: bool = False, check_contents: bool = True
) -> ModelSource:
    """Open a distributed checkpoint.

    If the folder has megarl's manifest, `check_contents` also compares checksums.

    Raises:
        CheckpointError: Names the file and tensor.
    """
    architecture = read_architecture(str(companions), trust_remote_code)
    architecture = with_stored_adapters(architecture, companions)
    layout = "layout not recorded"
    step = None

    # Only megarl's own checkpoints have a manifest, with checksums and the layout that wrote them.
    if (folder / MANIFEST_FILE).exists():
        if check_contents:
            check_folder(folder)
        description = read_description(folder)
        step = description.step
        layout = _layout_in_words(description.layout)

    index = read_index(folder)
    # The model's tensors, without the optimizer's state and the random states.
    model = {
        key: tensor
        for key, tensor in index.tensors.items()
        if "optimizer" not in key and not key.startswith("rng_state")
    }
    prefix = next(
        (prefix for prefix in _PREFIXES if prefix + "embedding.word_embeddings.weight" in model), ""
    )
    head: Head = (
        "value" if (stored := model.get(prefix + OUTPUT_LAYER)) is not None and stored.shape[0] == 1 else "lm"
    )
    has_adapters = architecture.lora is not None
    found: dict[str, list[StoredPiece]] = {}
    dtypes: dict[str, torch.dtype] = {}
    used: set[str] = set()

    for weight in weights_of(architecture, head):
        # A tied output layer is not stored, because it is the embedding. Nor is the base of adapters.
        if weight.is_copy or (has_adapters and not weight.trains):
            continue
        place = _find(folder, architecture, model, prefix, weight)
        used.add(place.key)
        tensor = model[place.key]
        for name, piece in _stored_pieces(index, architecture, place, tensor, weight):
            found.setdefault(name, []).append(piece)
            dtypes[name] = tensor.dtype

    # A tensor that belongs to no weight means that config.json is from another model.
    if extra := model.keys() - used:
        raise CheckpointError(
            f"{folder}: {min(extra)} is not a tensor of this architecture ({len(extra)} are not)"
        )

    if check_contents and not (folder / MANIFEST_FILE).exists():
        _check_unlisted(index, used)
    return ModelSource(
        folder=folder,
        kind="Megatron torch_dist" + (" of adapters" if has_adapters else ""),
        layout=layout,
        companions=companions,
        architecture=architecture,
        head=head,
        tensors=checked_tensors(
            folder,
            architecture,
            head,
            dtypes,
            found,
            adapter_tensors(architecture, head) if has_adapters else None,
        ),
        step=step,
    )


def _check_unlisted(index: TorchDistIndex, keys: Iterable[str]) -> None:
    """Check a folder without a manifest.

    The weights are compared with the checksums that torch.save computed, and `common.pt` must not contain
    code.
    """
    if (index.folder / COMMON_FILE).exists():
        refuse_code(index.folder / COMMON_FILE)
    chunks = [chunk for key in sorted(keys) for chunk in index.tensors[key].chunks]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="crc") as threads:
        list(threads.map(partial(check_chunk, index.folder), chunks))


def _find(
    folder: Path, architecture: Architecture, model: dict[str, DistributedTensor], prefix: str, weight: Weight
) -> StoredSlice:
    """Return where a weight is stored.

    Layers may be stacked or separate, and norms may be named without Transformer Engine.
    """
    candidates = [stored_slice(architecture, weight)]
    if is_adapter(weight.tensors[0].name):
        candidates = [StoredSlice(weight.megatron_name, (), ())]
    elif weight.layer is not None:
        stacked, own = _places(architecture, weight)
        candidates += [stacked, own]
        if weight.expert is None:
            candidates.append(StoredSlice(weight.megatron_name, (), ()))
        # Megatron's local layers use the name of a dense layer.
        separate = NORM_BEFORE[FEED_FORWARD]
        if weight.megatron_name.endswith(separate):
            candidates += [
                place._replace(key=place.key.replace(separate, _OF_DENSE_LAYER)) for place in (stacked, own)
            ]

    for place in candidates:
        if prefix + place.key in model:
            return place._replace(key=prefix + place.key)

    raise CheckpointError(
        f"{folder}: {prefix}{candidates[0].key} is missing; config.json requires {weight.tensors[0].name} "
        f"{weight.tensors[0].shape}"
    )


def _stored_pieces(
    index: TorchDistIndex,
    architecture: Architecture,
    place: StoredSlice,
    tensor: DistributedTensor,
    weight: Weight,
) -> Iterator[tuple[str, StoredPiece]]:
    leading = place.leading
    num_leading = len(leading)
    shape = tensor.shape[num_leading:]
    view = _check_shape(index, architecture, place, tensor, weight)
    parts = pieces(weight, whole_layout(architecture, shape[0] if weight.cut is Cut.vocabulary else None))
    one = TensorSlice(leading, tuple(number + 1 for number in leading))

    for chunk in tensor.chunks:
        tensor_slice = chunk.tensor_slice
        # Skip the chunks of other layers or experts in the same stacked tensor.
        if num_leading:
            if (
                TensorSlice(tensor_slice.starts[:num_leading], tensor_slice.stops[:num_leading]).intersect(
                    one
                )
                is None
            ):
                continue
            tensor_slice = TensorSlice(tensor_slice.starts[num_leading:], tensor_slice.stops[num_leading:])
        first_row = 0
        for region in view_regions(view, shape, tensor_slice):
            # Each region of the view consists of whole, consecutive rows of the chunk.
            num_rows = prod(region.shape[: num_row_axes(weight.cut)])
            for part in parts:
                if (common := region.intersect(part.shard)) is None:
                    continue
                for shard, hf in part.matches(common):
                    rows = first_row, first_row + num_rows
                    inside = shard.relative_to(region.starts)
                    opened = partial(
                        _open, index.folder, leading, chunk, rows, region.shape, inside, part, hf
                    )
                    yield part.hf_name, (hf, opened)
            first_row += num_rows


def _check_shape(
    index: TorchDistIndex,
    architecture: Architecture,
    place: StoredSlice,
    tensor: DistributedTensor,
    weight: Weight,
) -> tuple[int, ...]:
    """Return the view in which the weight's pieces are slices."""
    # The stored vocabulary may be padded to any number of rows.
    has_more_rows = weight.cut is Cut.vocabulary and tensor.shape[0] >= architecture.vocab_size
    view = shard_view(weight, whole_layout(architecture, tensor.shape[0] if has_more_rows else None))
    num_split = num_row_axes(weight.cut)
    expected = (*place.sizes, prod(view[:num_split]), *view[num_split:])

    if tensor.shape != expected:
        raise CheckpointError(
            f"{index.folder}: {place.key} has shape {tensor.shape}, config.json requires {expected}"
        )

    return view


def view_regions(
    view: tuple[int, ...], shape: tuple[int, ...], tensor_slice: TensorSlice
) -> Iterator[TensorSlice]:
    """Yield the slices of a view that correspond to a slice of a tensor of `shape`, in row order.

    `view` splits the rows.
    """
    num_leading = len(view) - len(shape) + 1
    for leading in range_slices(view[:num_leading], tensor_slice.starts[0], tensor_slice.stops[0]):
        yield TensorSlice(
            (*leading.starts, *tensor_slice.starts[1:]), (*leading.stops, *tensor_slice.stops[1:])
        )


def _open(
    folder: Path,
    leading: tuple[int, ...],
    chunk: StoredItem,
    rows: tuple[int, int],
    shape: tuple[int, ...],
    inside: TensorSlice,
    piece: Piece,
    hf: TensorSlice,
) -> torch.Tensor:
    """Read the elements `hf` of a tensor: the slice `inside` of rows in `shape` of a chunk."""
    # Select the layer, and the expert, from the chunk that stacks them.
    stored = read_chunk(folder, chunk)
    for number, first in zip(leading, chunk.tensor_slice.starts, strict=False):
        stored = stored[number - first]
    return piece.in_hf_order(stored[rows[0] : rows[1]].reshape(shape)[inside.index], hf)
