"""Count the parameters of a model, the operations of training it, and the peak rates of devices.

Parameters are sums of the rows of the tensor table: a row is counted once and multiplied by the number of
layers, and of experts, that have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megarl.models.adapters import OUTPUT_MODULE
from megarl.models.architecture import Architecture
from megarl.models.families import engine_stages
from megarl.models.layers import pair_products, selection_products, token_products
from megarl.models.mapping import Cut, MappingRow, StagePlacement, TensorPart
from megarl.models.tensor_table import dimension_sizes, entry_size, rows_of, tower_rows
from megarl.models.vision import Vision

_VOCABULARY_DIVISOR = 128  # each rank's vocabulary rows are a multiple of this, for matrix-unit efficiency


class ParameterCount(NamedTuple):
    """Numbers of parameters. Experts are counted separately, because other ranks hold copies of them.

    Attributes:
        dense: All parameters except experts, including routers and shared experts.
        of_experts: The parameters of the experts that a router selects from.
        replicated: The part of `dense` in the layers and after them that each tensor-parallel rank has a copy
            of, such as norms, routers and the down projections of latent attention.
    """

    dense: int
    of_experts: int
    replicated: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.of_experts


def num_parameters(
    architecture: Architecture, with_value_head: bool = False, *, trained_only: bool = False
) -> int:
    """Count the parameters as Hugging Face does, and those of adapters. A tied embedding counts once.

    Args:
        with_value_head: The output layer has (H) weights instead of (V, H).
        trained_only: Whether to leave out parameters that are frozen.
    """
    return _whole(architecture, with_value_head, trained_only).total


def num_expert_parameters(architecture: Architecture, *, trained_only: bool = False) -> int:
    """Count the parameters of all experts of all layers, without routers and shared experts."""
    return _whole(architecture, with_value_head=False, trained_only=trained_only).of_experts


@lru_cache(maxsize=32)
def num_tower_parameters(architecture: Architecture) -> int:
    """Count the parameters of the vision tower, which is on the first pipeline stage; 0 if there is none."""
    return sum(_row_size(row, {}) for row in tower_rows(architecture))


def num_active_parameters(architecture: Architecture) -> int:
    """Count the parameters that one token uses: only the selected experts are included."""
    whole = _whole(architecture, with_value_head=False, trained_only=False)
    sizes = dimension_sizes(architecture)
    return whole.dense + whole.of_experts // max(1, sizes["E"]) * sizes["e"]


def without_saved_modules(architecture: Architecture) -> Architecture:
    """Return a model with adapters, of which nothing else trains."""
    assert architecture.lora is not None
    return replace(architecture, lora=replace(architecture.lora, modules_to_save=()))


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Return the number of vocabulary rows of a stage in Megatron-Core, including padding.

    It is the smallest multiple of 128 x `tensor_parallel_size` that is at least the vocabulary size.
    """
    multiple = _VOCABULARY_DIVISOR * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


@lru_cache(maxsize=256)
def rank_parameters(
    architecture: Architecture,
    *,
    layers: tuple[int, ...],
    is_first_stage: bool,
    is_last_stage: bool,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    expert_tensor_parallel_size: int,
    with_value_head: bool = False,
    trained_only: bool = False,
    pads_vocabulary: bool = True,
) -> ParameterCount:
    """Count the parameters that one rank of a pipeline stage holds.

    Args:
        architecture: The model. The sizes below must divide it.
        layers: The global numbers of the stage's layers.
        is_first_stage: Whether the stage has the embedding.
        is_last_stage: Whether the stage has the last norm and the output layer.
        tensor_parallel_size: The number of ranks that shard everything except experts.
        expert_parallel_size: The number of ranks that a layer's experts are distributed over.
        expert_tensor_parallel_size: The number of ranks that shard each expert.
        with_value_head: Whether the output layer is a value head.
        trained_only: Whether to leave out parameters that are frozen.
        pads_vocabulary: Whether to include the rows that pad the vocabulary.
    """
    sizes = dimension_sizes(architecture)
    if pads_vocabulary:
        sizes = sizes | {"V": padded_vocab_size(architecture.vocab_size, tensor_parallel_size)}
    num_experts = architecture.num_experts // expert_parallel_size
    dense = 0
    of_experts = 0
    replicated = 0

    for row in rows_of(architecture, "value" if with_value_head else "lm"):
        if trained_only and not row.trains:
            continue
        whole = _row_size(row, sizes)
        # Experts have a parallelism of their own and are counted separately.
        if row.place is StagePlacement.expert:
            held = whole if row.cut is Cut.replicated else whole // expert_tensor_parallel_size
            of_experts += held * num_experts * _num_layers(row, architecture, layers)
            continue

        held = whole if row.cut is Cut.replicated else whole // tensor_parallel_size
        if row.place is StagePlacement.layer:
            held *= _num_layers(row, architecture, layers)
        elif row.place is StagePlacement.embedding:
            held *= is_first_stage
        else:
            # A tied output layer on the stage of the embedding is the embedding's own parameter.
            held *= is_last_stage and not (row.is_copy and is_first_stage)

        dense += held
        if row.cut is Cut.replicated and row.place is not StagePlacement.embedding:
            replicated += held

    return ParameterCount(dense, of_experts, replicated)


def _whole(architecture: Architecture, with_value_head: bool, trained_only: bool) -> ParameterCount:
    """Count the parameters of the whole model, without padding."""
    return rank_parameters(
        architecture,
        layers=tuple(range(architecture.num_hidden_layers)),
        is_first_stage=True,
        is_last_stage=True,
        tensor_parallel_size=1,
        expert_parallel_size=1,
        expert_tensor_parallel_size=1,
        with_value_head=with_value_head,
        trained_only=trained_only,
        pads_vocabulary=False,
    )


def _row_size(row: MappingRow, sizes: dict[str, int]) -> int:
    return sum(entry_size(entry, sizes, row.place) for entry in row.tensors)


def _num_layers(row: MappingRow, architecture: Architecture, layers: Iterable[int]) -> int:
    return sum(row.applies(architecture, layer) for layer in layers)


@lru_cache(maxsize=64)
def stage_shares(architecture: Architecture, num_stages: int) -> tuple[float, ...]:
    """Return the parameters of each stage, relative to those of the model.

    A tied embedding counts on the first stage and on the last.
    """
    if num_stages == 1:
        return (1.0,)
    head = architecture.vocab_size * architecture.hidden_size
    shares = []
    for layers, is_first, is_last, has_head in engine_stages(architecture, num_stages):
        held = rank_parameters(
            architecture,
            layers=tuple(layers),
            is_first_stage=is_first,
            is_last_stage=is_last,
            tensor_parallel_size=1,
            expert_parallel_size=1,
            expert_tensor_parallel_size=1,
        ).total
        held += head * (has_head and not is_last)
        shares.append(held / num_parameters(architecture))
    return tuple(shares)


# Peak bfloat16 TFLOP/s of dense matrix products, from NVIDIA's data sheets. The first row whose words all
# occur in torch.cuda.get_device_name() applies.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak bfloat16 TFLOP/s of a GPU by its name, None if the GPU is unknown."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in _PEAK_TFLOPS if all(word in words for word in name.split())), None)


def training_flops(
    architecture: Architecture, rows: Iterable[tuple[int, int]], *, with_value_head: bool = False
) -> int:
    """Return the floating-point operations of a forward and backward pass, as defined by PaLM.

    The count follows Chowdhery et al. 2022 (PaLM, appendix B): six times the multiply-adds of the forward
    pass, because the backward pass has two products for each product of the forward pass. Recomputation is
    not counted. Attention counts the pairs that the causal mask leaves, the output layer counts the positions
    that predict response tokens, and experts count only if selected. A gated delta net counts its recurrence,
    whose operations are linear in the length of a row. Frozen matrices have one product in the backward pass,
    that of their inputs' gradients. Sparse attention counts the pairs that are selected, and indexers every
    pair; those that do not train have no backward pass.

    Args:
        rows: (prompt tokens, response tokens) of each row.
        with_value_head: Whether the output layer is a value head.
    """
    layers = token_products(architecture)
    output = architecture.hidden_size * (1 if with_value_head else architecture.vocab_size)
    lora = architecture.lora
    adapters = 0 if lora is None else _adapters(architecture)
    trained_output = with_value_head or architecture.trains_fully(OUTPUT_MODULE)
    products = 0  # multiply-adds of forward and backward passes
    indexer = architecture.indexer
    of_token, of_pair = selection_products(architecture) if indexer and not indexer.trains else (0, 0)

    for prompt, response in rows:
        length = prompt + response
        products += length * ((3 if lora is None else 2) * layers + 3 * adapters)
        products += 3 * _pair_products(architecture, length)
        products -= (2 if lora is None else 1) * length * of_token + length * (length + 1) * of_pair
        products += (3 if trained_output else 2) * response * output

    return 2 * products


@lru_cache(maxsize=32)
def _adapters(architecture: Architecture) -> int:
    """Return the multiply-adds of one token in all adapters: one per parameter, of selected experts only."""
    return num_active_parameters(architecture) - num_active_parameters(architecture.base)


def tower_flops(architecture: Architecture, grids: Iterable[tuple[int, int, int]], *, trains: bool) -> int:
    """Return the floating-point operations of a vision tower: the forward pass, and backward if it trains.

    Args:
        architecture: The model, which has a tower.
        grids: The number of patches of each image in time, height and width.
        trains: Whether the tower is trained.
    """
    vision = architecture.sizes_of(Vision)
    per_patch, per_token = _tower_products(architecture)
    multiply_adds = 0

    for time, height, width in grids:
        patches = time * height * width
        multiply_adds += patches * per_patch + patches // vision.patches_per_token * per_token
        for block in range(vision.depth):
            pairs = time * pairs_of_block(vision, block, height, width)
            # A pair has one product with the key, and one with the value.
            multiply_adds += pairs * 2 * vision.hidden_size

    # The backward pass has two products for each one of the forward pass.
    return (3 if trains else 1) * 2 * multiply_adds


@lru_cache(maxsize=32)
def tower_matrices(architecture: Architecture) -> tuple[tuple[int, int, bool, bool], ...]:
    """Return the matrices of a model's vision tower.

    Each is (outputs, inputs, whether it multiplies each image token instead of each patch, whether it belongs
    to a block).
    """
    found = []
    for row in tower_rows(architecture):
        (entry,) = row.tensors
        assert not isinstance(entry, TensorPart), "tensors of towers are whole"
        outputs, *inputs = (int(size) for size in entry[1].split())
        if inputs and "pos_embed" not in row.megatron:
            found.append((outputs, prod(inputs), "merger" in row.megatron, ".blocks." in row.megatron))

    return tuple(found)


@lru_cache(maxsize=32)
def _tower_products(architecture: Architecture) -> tuple[int, int]:
    """Return the elements of the tower's matrices that multiply each patch, and each image token."""
    sizes = {True: 0, False: 0}
    for outputs, inputs, per_token, _ in tower_matrices(architecture):
        sizes[per_token] += outputs * inputs
    return sizes[False], sizes[True]


def pairs_of_block(vision: Vision, block: int, height: int, width: int) -> int:
    """Return the pairs of patches of a frame that attend to each other in a block."""
    if not vision.window_size or block in vision.full_attention_blocks:
        return (height * width) ** 2

    # Windows at the right and at the bottom may be smaller.
    side = vision.window_size // vision.patch_size
    squares = [
        sum(min(side, size - start) ** 2 for start in range(0, size, side)) for size in (height, width)
    ]
    return squares[0] * squares[1]


def _pair_products(architecture: Architecture, length: int) -> int:
    """Return the multiply-adds for the pairs of tokens of a row that the masks of all layers leave."""
    products = 0
    for window, of_pair in pair_products(architecture).items():
        # A token sees those before it and itself, at most as many as the window has.
        growing = min(length, window or length)
        products += of_pair * (growing * (growing + 1) // 2 + (length - growing) * growing)
    return products
