"""Floating-point operations that training a model needs, and how many a device can do. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from megarl.models.architecture import Architecture

# TFLOP/s of bfloat16 matrix products without sparsity, as NVIDIA's data sheets say, by words of
# torch.cuda.get_device_name(): the first row whose words are all in it.
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
    """In bfloat16, of a GPU called so; None of one that is not in the table."""
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak in _PEAK_TFLOPS if all(word in words for word in name.split())), None)


def training_flops(
    architecture: Architecture, rows: Iterable[tuple[int, int]], *, with_value_head: bool = False
) -> int:
    """Of the forward and the backward pass over `rows`, each of so many prompt and response tokens.

    What the model needs, as Chowdhery et al. 2022 (PaLM, appendix B) count it: twice the multiply-adds of the
    forward pass once more for each of the two products of the backward pass; nothing that is computed again;
    of attention the pairs that the causal mask leaves; of the output layer the places that predict response
    tokens; of experts those that a token meets.
    """
    hidden = architecture.hidden_size
    head_dim = architecture.head_dim
    query = architecture.num_attention_heads * head_dim
    key_value = architecture.num_key_value_heads * head_dim

    # Multiply-adds of one token in all layers: projections of the attention, and the feed-forward.
    layers = architecture.num_hidden_layers * hidden * (2 * query + 2 * key_value) + _feed_forward(
        architecture
    )
    output = hidden * (1 if with_value_head else architecture.vocab_size)
    multiply_adds = 0

    for prompt, response in rows:
        length = prompt + response
        # Each pair takes part in two products: the scores, and the weighted sum of the values.
        pairs = length * (length + 1) // 2
        multiply_adds += (
            length * layers + architecture.num_hidden_layers * 2 * pairs * query + response * output
        )

    return 3 * 2 * multiply_adds


def _feed_forward(architecture: Architecture) -> int:
    """Multiply-adds of a token, of all layers."""
    dense = architecture.num_dense_layers * 3 * architecture.intermediate_size
    experts = architecture.experts
    sparse = 0

    if experts is not None:
        # Three projections of each expert, the router's outputs, and the gate of a shared expert.
        met = experts.num_experts_per_tok * experts.intermediate_size + experts.shared_intermediate_size
        sparse = len(experts.layers) * (
            3 * met + experts.num_experts + bool(experts.shared_intermediate_size)
        )

    return architecture.hidden_size * (dense + sparse)
