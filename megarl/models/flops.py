"""The floating-point operations of training a model, and the peak rates of devices. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod

from megarl.models.adapters import OUTPUT_MODULE
from megarl.models.architecture import Architecture
from megarl.models.counts import num_active_parameters
from megarl.models.layers import pair_products, token_products, tower_of
from megarl.models.tensor_part import TensorPart
from megarl.models.tensor_table import tower_rows
from megarl.models.vision import Vision

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
    that of their inputs' gradients.

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

    for prompt, response in rows:
        length = prompt + response
        products += length * ((3 if lora is None else 2) * layers + 3 * adapters)
        products += 3 * _pair_products(architecture, length)
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
    vision = tower_of(architecture)
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
