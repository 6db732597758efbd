"""The rank side of the engine tests: an engine in a layout, and its shards merged into Hugging Face tensors.

Megatron is imported inside functions, after the platform is active.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megarl.batch.data_proto import DataProto
from megarl.batch.metrics import Metric
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import IMAGE_GRIDS, PIXEL_VALUES
from megarl.config.schema import (
    CPCommType,
    Device,
    DType,
    EngineConfig,
    Layers,
    ParallelConfig,
    RoutingReplay,
)
from megarl.engine import platform
from megarl.engine.spec import ModelSpec
from megarl.models.architecture import LoRA
from megarl.models.families import read_architecture
from megarl.models.tensor_table import embedding_tensor
from megarl.weights.tensors import TensorSlice
from tests.ranks import gather

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine
    from megarl.engine.groups import ParallelGroups

_TP, _PP, _VPP, _DP, _CP, _EP, _ETP = (
    {f"{name}_parallel_size": 2}
    for name in ("tensor", "pipeline", "virtual_pipeline", "data", "context", "expert", "expert_tensor")
)  # each is 1 (or None) if omitted
LAYOUTS: dict[str, ParallelConfig] = {
    "TP1": ParallelConfig(),
    "TP2": ParallelConfig(**_TP),
    "PP2": ParallelConfig(**_PP),
    "TP2xPP2": ParallelConfig(**_TP, **_PP),
    "PP2xVPP2": ParallelConfig(**_PP, **_VPP),
    "DP2": ParallelConfig(**_DP),
    "TP2+SP": ParallelConfig(**_TP, sequence_parallel=True),
}
MIXED_LAYOUTS: dict[str, ParallelConfig] = {
    "TP2+SPxDP2": ParallelConfig(**_TP, **_DP, sequence_parallel=True),
    "PP2xDP2": ParallelConfig(**_PP, **_DP),
}
CONTEXT_LAYOUTS: dict[str, ParallelConfig] = {
    "CP2": ParallelConfig(**_CP),
    "CP4": ParallelConfig(context_parallel_size=4),
    "CP2xTP2+SP": ParallelConfig(**_CP, **_TP, sequence_parallel=True),
    "CP2xPP2": ParallelConfig(**_CP, **_PP),
    "CP2xDP2": ParallelConfig(**_CP, **_DP),
    "CP2xPP2xVPP2": ParallelConfig(**_CP, **_PP, **_VPP),
}
ALL_LAYOUTS = {**LAYOUTS, **MIXED_LAYOUTS, **CONTEXT_LAYOUTS}
# Of the four layers of each model, three are on one stage.
UNEVEN_LAYOUTS = {
    "PP2 3+1": ParallelConfig(**_PP, pipeline_layout=[3, 1]),
    "PP2xTP2+SP 1+3": ParallelConfig(**_PP, **_TP, sequence_parallel=True, pipeline_layout=[1, 3]),
}
# For MoE models; the first two are used with every family.
EXPERT_LAYOUTS: dict[str, ParallelConfig] = {
    "DP2xEP2": ParallelConfig(**_DP, **_EP),
    "TP2+SPxEP2": ParallelConfig(**_TP, **_EP, sequence_parallel=True),
    "TP2+SPxETP2": ParallelConfig(**_TP, **_ETP, sequence_parallel=True),
    "PP2": ParallelConfig(**_PP),
    "CP2xEP2": ParallelConfig(**_CP, **_EP),
    "PP2xDP2xEP2": ParallelConfig(**_PP, **_DP, **_EP),
    "TP2+SPxDP2xEP2xETP2": ParallelConfig(**_TP, **_DP, **_EP, **_ETP, sequence_parallel=True),
}

Tensors = dict[str, Tensor]
Rows = dict[str, RaggedTensor]


def start(parallel: ParallelConfig) -> ParallelGroups:
    platform.activate(Device.cpu)
    from megarl.engine import groups

    return groups.initialize(parallel, seed=0)


def build(
    groups: ParallelGroups,
    folder: str,
    *,
    dtype: torch.dtype = torch.float32,
    packing: bool = True,
    share_prompts: bool = False,
    chunk_tokens: int = 8,
    layers: Layers = Layers.auto,
    routing_replay: RoutingReplay = RoutingReplay.off,
    cp_comm_type: CPCommType = CPCommType.auto,
    lora: LoRA | None = None,
    **spec: Any,
) -> MegatronEngine:
    """Build an engine.

    `spec` contains other fields of ModelSpec. Chunks have 8 tokens, so that larger micro-batches have
    several.
    """
    from megarl.engine.engine import MegatronEngine

    architecture = replace(read_architecture(folder), lora=lora)
    if architecture.indexer is not None:
        trains = spec.get("indexer_loss", 0) > 0
        architecture = replace(architecture, indexer=replace(architecture.indexer, trains=trains))
    made = ModelSpec(
        path=folder,
        architecture=architecture,
        dtype=DType(str(dtype).removeprefix("torch.")),
        parallel=groups.parallel,
        engine=EngineConfig(
            packing=packing,
            share_prompts=share_prompts,
            log_prob_chunk_tokens=chunk_tokens,
            layers=layers,
            routing_replay=routing_replay,
            cp_comm_type=cp_comm_type,
        ),
        device=Device(platform.current().name),
        **{"head": "lm", "seed": 0, **spec},
    )
    return MegatronEngine(made, groups)


def replica_rows(groups: ParallelGroups, num_rows: int) -> list[int]:
    """Return the rows of this data-parallel rank, round-robin, so that replicas can have different numbers of rows."""
    return list(range(groups.data_rank, num_rows, groups.parallel.data_parallel_size))


def deal(num_rows: int, num_micro_batches: int) -> list[list[int]]:
    """Return micro-batches of unequal sizes whose rows are not in order."""
    return [list(range(first, num_rows, num_micro_batches))[::-1] for first in range(num_micro_batches)]


def unpadded(batch: Mapping[str, Tensor]) -> Rows:
    """Convert a padded batch, whose other columns are (B, R), to the engine's format."""
    made = DataProto.from_dict(batch)
    lengths = made.ragged["responses"].lengths
    others = {key: column for key, column in made.columns.items() if isinstance(column, Tensor)}
    return {
        **made.ragged,
        **{key: RaggedTensor.from_padded(column, lengths) for key, column in others.items()},
    }


def take(batch: Mapping[str, Any], rows: Sequence[int]) -> Rows:
    """Select rows of a padded batch in the engine's format. `images` are those of each row, see RowImages."""
    columns = {key: value[list(rows)] for key, value in batch.items() if key != "images"}
    images = [batch["images"][row] for row in rows] if "images" in batch else []
    return unpadded(columns) | (image_columns(images) if images else {})


class RowImages(NamedTuple):
    """The images of a row: (P, patch elements) patches, and (I, 3) numbers of patches."""

    pixels: Tensor
    grids: Tensor


def image_columns(rows: Sequence[RowImages | None]) -> Rows:
    """Return the columns of images. Rows with the same object share values, as samples of a prompt do."""
    distinct = list({id(row): row for row in rows if row is not None}.values())
    place = {id(row): number for number, row in enumerate(distinct)}
    order = torch.tensor([place.get(id(row), len(distinct)) for row in rows])
    pixels = [*(row.pixels.flatten().numpy() for row in distinct), []]
    grids = [*(row.grids.flatten().numpy() for row in distinct), []]
    return {
        PIXEL_VALUES: RaggedTensor.of_rows(pixels, torch.float32).select(order),
        IMAGE_GRIDS: RaggedTensor.of_rows(grids, torch.int32).select(order),
    }


def join_rows(rows: Sequence[int], outputs: Mapping[str, RaggedTensor] | None, num_rows: int) -> Tensors:
    """Return (B, R, ...) on every rank, as a driver would collect it, from the outputs of this replica's last stage.

    Positions after a row's tokens are 0.
    """
    values = {key: list(column.each()) for key, column in (outputs or {}).items()}
    gathered = gather((list(rows), values))
    found: dict[str, dict[int, Tensor]] = {}

    for part_rows, part in gathered:
        for key, of_rows in part.items():
            found.setdefault(key, {}).update(zip(part_rows, of_rows, strict=True))

    return {
        key: pad_sequence([of_rows[row] for row in range(num_rows)], batch_first=True)
        for key, of_rows in found.items()
    }


def hf_weights(engine: MegatronEngine) -> Tensors:
    return _hf_tensors(engine, engine.parameters())


def hf_gradients(engine: MegatronEngine) -> Tensors:
    """Merge the gradients. Each data-parallel rank has its own reduced slice. Frozen parameters have 0."""
    for chunk in engine.chunks:
        for buffers, group in (
            (chunk.buffers, engine.groups.data_context),
            (chunk.expert_parallel_buffers, engine.groups.expert_data),
        ):
            for bucket in (bucket for buffer in buffers for bucket in buffer.buckets):
                slices = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(slices, slices[group.rank()].clone(), group=group)

    nothing = {name: torch.zeros_like(value) for name, value in engine.parameters().items()}
    return _hf_tensors(engine, nothing | engine.gradients())


def _hf_tensors(engine: MegatronEngine, named: Tensors) -> Tensors:
    """Return this stage's Hugging Face tensors on tensor-parallel rank 0, float32, and nothing elsewhere.

    Experts of all stages are on the very first rank. All ranks must call this function.
    """
    from megarl.weights.manifest import manifest_of
    from megarl.weights.message_words import slice_in_words, word_counts
    from megarl.weights.shards import Shards, held_slices
    from megarl.weights.tensors import Part

    _check_copies(engine, named)
    spec = engine.spec
    layout = engine.layout
    shards = Shards(parameters=named, architecture=spec.architecture, layout=layout, head=spec.head)
    counts = word_counts(spec.architecture, shards.dtype.itemsize, spec.head)

    def elements(name: str, tensor_slice: TensorSlice) -> Tensor:
        part = Part(name, slice_in_words(tensor_slice, counts.get(name, 1)))
        words = torch.cat([region.reshape(-1) for region in shards.regions(part)])
        return words.view(torch.float32 if name in counts else words.dtype).float().cpu()

    own = {
        (name, tensor_slice): elements(name, tensor_slice)
        for name, slices in held_slices(spec.architecture, layout, spec.head).items()
        if not (
            name == embedding_tensor(spec.architecture) and not layout.holds_embedding
        )  # the tied copy on another stage
        for tensor_slice in slices
    }
    experts = {place: own.pop(place) for place in list(own) if ".experts." in place[0]}
    gathered = gather(own, engine.groups.tensor)
    gathered_experts = gather(experts)
    parts = [
        *(gathered if layout.tensor_parallel_rank == 0 else ()),
        *(gathered_experts if dist.get_rank() == 0 else ()),
    ]
    manifest = manifest_of(spec.architecture, torch.float32, spec.head)
    tensors: Tensors = {}

    for (name, tensor_slice), elements in (item for part in parts for item in part.items()):
        whole = tensors.setdefault(name, torch.full(manifest[name].shape, torch.nan))
        copy = whole[tensor_slice.index]
        assert copy.isnan().all() or torch.equal(copy, elements.view(tensor_slice.shape)), (
            f"copies of {name} differ"
        )
        copy.copy_(elements.view(tensor_slice.shape))

    return tensors


def _check_copies(engine: MegatronEngine, named: Tensors) -> None:
    """Check that copies are equal: replicated parameters of a stage, and both ends of tied weights."""
    from megarl.models.mapping import Cut
    from megarl.models.tensor_table import OUTPUT_LAYER
    from megarl.weights.shard_layout import held_weights

    architecture = engine.spec.architecture
    groups = engine.groups
    parallel = engine.spec.parallel

    for weight in held_weights(architecture, engine.layout, engine.spec.head):
        if parallel.tensor_parallel_size > 1 and weight.cut is Cut.replicated and weight.expert is None:
            mine = named[weight.megatron_name].contiguous()
            copies = [torch.empty_like(mine) for _ in range(parallel.tensor_parallel_size)]
            dist.all_gather(copies, mine, group=groups.tensor)
            assert all(torch.equal(copy, mine) for copy in copies), (
                f"tensor-parallel ranks disagree on {weight.megatron_name}"
            )

    if architecture.tie_word_embeddings and engine.spec.head == "lm":
        ends = gather(named.get(OUTPUT_LAYER, named.get("embedding.word_embeddings.weight")), groups.pipeline)
        held = [end for end in (ends[0], ends[-1]) if end is not None]
        assert len(held) == 2
        assert torch.equal(*held), "the tied output layer is not the embedding"


def merge(parts: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Merge the stages' tensors into one model. Replicas of a stage must be bitwise identical."""
    merged: Tensors = {}
    for part in parts:
        for name, value in part.items():
            if name in merged:
                assert torch.equal(merged[name], value), f"replicas disagree on {name}"
            merged[name] = value

    return merged


def weighted_sum(keys: Sequence[str]) -> Callable[..., Any]:
    """Return a loss for the engine: the sum over outputs k of k * rows["weight/k"].

    It is linear, so that the reference is a single line.
    """

    def loss(outputs: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Metric]]:
        value = sum((outputs[key] * rows[f"weight/{key}"]).sum() for key in keys)
        assert isinstance(value, Tensor)
        return value, {}

    return loss
