"""The decoder that all families share: pre-norm attention, RoPE and a gated feed-forward.

Qwen 2, 2.5 and 3 and Llama 2 and 3 differ in two switches: the bias of q, k and v, and the norm of q and k.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from megarl.models.architecture import Architecture, Experts, LatentAttention
from megarl.models.config_reader import REQUIRED, ConfigReader
from megarl.models.mapping import (
    EMBEDDING,
    HF_LAYER,
    MEGATRON_LAYER,
    Cut,
    MappingRow,
    StagePlacement,
    is_dense,
)
from megarl.models.rope import read_rope
from megarl.models.tensor_part import TensorPart

_LARGEST_EPS = 0.01  # added to a mean square of about 1; models have 1e-5 or 1e-6

_ROWS_BEFORE = (
    MappingRow(
        megatron=EMBEDDING,
        place=StagePlacement.embedding,
        cut=Cut.vocabulary,
        tensors=(("model.embed_tokens.weight", "V H"),),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "input_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "input_layernorm.weight", "H"),),
    ),
)

ATTENTION_ROWS = (
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_qkv.weight",
        place=StagePlacement.layer,
        cut=Cut.qkv,
        tensors=(
            (HF_LAYER + "self_attn.q_proj.weight", "Q H"),
            (HF_LAYER + "self_attn.k_proj.weight", "K H"),
            (HF_LAYER + "self_attn.v_proj.weight", "K H"),
        ),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_qkv.bias",
        place=StagePlacement.layer,
        cut=Cut.qkv,
        tensors=(
            (HF_LAYER + "self_attn.q_proj.bias", "Q"),
            (HF_LAYER + "self_attn.k_proj.bias", "K"),
            (HF_LAYER + "self_attn.v_proj.bias", "K"),
        ),
        applies=lambda architecture, layer: architecture.qkv_bias,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.q_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.q_norm.weight", "D"),),
        applies=lambda architecture, layer: architecture.qk_norm,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.k_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.k_norm.weight", "D"),),
        applies=lambda architecture, layer: architecture.qk_norm,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.row,
        tensors=((HF_LAYER + "self_attn.o_proj.weight", "H Q"),),
    ),
)

_ROWS_AFTER = (
    MappingRow(
        megatron=MEGATRON_LAYER + "pre_mlp_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "post_attention_layernorm.weight", "H"),),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "mlp.linear_fc1.weight",
        place=StagePlacement.layer,
        cut=Cut.gated,
        tensors=((HF_LAYER + "mlp.gate_proj.weight", "F H"), (HF_LAYER + "mlp.up_proj.weight", "F H")),
        applies=is_dense,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "mlp.linear_fc2.weight",
        place=StagePlacement.layer,
        cut=Cut.row,
        tensors=((HF_LAYER + "mlp.down_proj.weight", "H F"),),
        applies=is_dense,
    ),
    MappingRow(
        megatron="decoder.final_layernorm.weight",
        place=StagePlacement.output,
        cut=Cut.replicated,
        tensors=(("model.norm.weight", "H"),),
    ),
)


def trunk_rows(attention: tuple[MappingRow, ...]) -> tuple[MappingRow, ...]:
    """Return the table rows of a decoder with dense feed-forwards and the given rows of attention."""
    return (*_ROWS_BEFORE, *attention, *_ROWS_AFTER)


def with_prefix(rows: tuple[MappingRow, ...], old: str, new: str) -> tuple[MappingRow, ...]:
    """Return the rows with another prefix of the names of Hugging Face tensors."""

    def renamed(entry: tuple[str, str] | TensorPart) -> tuple[str, str] | TensorPart:
        if isinstance(entry, TensorPart):
            return replace(entry, name=new + entry.name.removeprefix(old))
        return new + entry[0].removeprefix(old), entry[1]

    return tuple(replace(row, tensors=tuple(map(renamed, row.tensors))) for row in rows)


TRUNK_ROWS = trunk_rows(ATTENTION_ROWS)

# The base of every `Family.example`. Every size is divisible by four ranks. The vocabulary is odd, so that
# every tensor-parallel size pads it.
EXAMPLE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def read_trunk(
    reader: ConfigReader,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    multi_head_by_default: bool = False,
    default_rope_theta: float = 10000.0,
    default_partial_rotary_factor: float | None = None,
    default_sliding_window: int | None = None,
    read_experts: Callable[[ConfigReader, int], Experts] | None = None,
    read_latent: Callable[[ConfigReader], LatentAttention] | None = None,
    may_have_mtp: bool = False,
    read_windows: Callable[[ConfigReader, int], tuple[int, ...]] | None = None,
) -> Architecture:
    """Read what the families share. The defaults are those of transformers for missing fields.

    Args:
        reader: The fields of `config.json`.
        qkv_bias: Whether the projections of queries, keys and values have a bias.
        qk_norm: Whether queries and keys are normalized per head.
        default_head_dim: The size of a head; None: hidden_size / num_attention_heads.
        multi_head_by_default: Whether `num_key_value_heads` defaults to the number of query heads.
        default_rope_theta: The base frequency.
        default_partial_rotary_factor: The rotated fraction of a head; None: the family rotates whole heads.
        default_sliding_window: The attention window.
        read_experts: Reads the experts of a model with the given number of layers.
        read_latent: Reads the sizes of latent attention.
        may_have_mtp: Whether models of the family may have layers that predict further tokens.
        read_windows: Reads the window of each layer; None: windows are refused.
    """
    hidden_size = reader.number("hidden_size", int)
    latent = read_latent(reader) if read_latent else None
    if latent is None:
        heads = _read_heads(reader, hidden_size, default_head_dim, multi_head_by_default)
    else:
        heads = _read_heads_of_latent(reader, latent)
    max_position_embeddings = reader.number("max_position_embeddings", int)
    rope = read_rope(reader, max_position_embeddings, default_rope_theta, default_partial_rotary_factor)

    # Layers. The dense size has no meaning if all layers are sparse, and a folder may omit it.
    num_hidden_layers = reader.number("num_hidden_layers", int)
    experts = read_experts(reader, num_hidden_layers) if read_experts else None
    is_all_sparse = experts is not None and len(experts.layers) == num_hidden_layers
    unused = experts.intermediate_size if experts is not None and is_all_sparse else REQUIRED
    windows = read_windows(reader, num_hidden_layers) if read_windows else ()
    if read_windows is None:
        window = reader.fields.get("sliding_window", default_sliding_window)
        _check_sliding_window(
            reader, num_hidden_layers, max_position_embeddings, window, has_experts=experts is not None
        )

    return Architecture(
        model_type=reader.take("model_type"),
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=reader.number("intermediate_size", int, unused),
        num_attention_heads=heads.query,
        num_key_value_heads=heads.key_value,
        head_dim=heads.dim,
        vocab_size=reader.number("vocab_size", int),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=reader.number("rms_norm_eps", float, at_most=_LARGEST_EPS),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        partial_rotary_factor=rope.partial_rotary_factor,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        experts=experts,
        latent=latent,
        num_mtp_layers=reader.count("num_nextn_predict_layers", 0) if may_have_mtp else 0,
        windows=windows,
    )


class _Heads(NamedTuple):
    """The numbers of query heads and of key-value heads, and the size of a head."""

    query: int
    key_value: int
    dim: int


def _read_heads(
    reader: ConfigReader, hidden_size: int, default_head_dim: int | None, multi_head_by_default: bool
) -> _Heads:
    """Read the heads of attention. The defaults are those of `read_trunk`."""
    num_attention_heads = reader.number("num_attention_heads", int)
    has_default = multi_head_by_default or "num_key_value_heads" in reader.fields
    default_key_value_heads = num_attention_heads if has_default else REQUIRED
    num_key_value_heads = reader.number("num_key_value_heads", int, default_key_value_heads)
    head_dim = reader.number("head_dim", int, default_head_dim or hidden_size // num_attention_heads)

    # Only a head size that is derived from the hidden size requires an even division.
    of_heads = f"a multiple of 'num_attention_heads' {num_attention_heads}"
    is_derived = reader.fields.get("head_dim") is None and default_head_dim is None
    if is_derived and hidden_size % num_attention_heads:
        reader.problems.append(f"'hidden_size' {hidden_size} is not {of_heads}, and 'head_dim' is missing")

    if num_attention_heads % num_key_value_heads:
        of_groups = f"a multiple of 'num_key_value_heads' {num_key_value_heads}"
        reader.problems.append(f"'num_attention_heads' {num_attention_heads} is not {of_groups}")

    if head_dim % 2:
        reader.problems.append(
            f"'head_dim' is {head_dim}; rotary embeddings rotate pairs, so it must be even"
        )

    return _Heads(num_attention_heads, num_key_value_heads, head_dim)


def _read_heads_of_latent(reader: ConfigReader, latent: LatentAttention) -> _Heads:
    """Read the heads of latent attention, each of which has its own keys and values."""
    num_attention_heads = reader.number("num_attention_heads", int)
    num_key_value_heads = reader.number("num_key_value_heads", int, num_attention_heads)

    if num_key_value_heads != num_attention_heads:
        needed = (
            f"'num_attention_heads' {num_attention_heads}, because every head has its own keys and values"
        )
        reader.problems.append(f"'num_key_value_heads' is {num_key_value_heads}, but must equal {needed}")

    head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    return _Heads(num_attention_heads, num_attention_heads, head_dim)


def _check_sliding_window(
    reader: ConfigReader,
    num_hidden_layers: int,
    max_position_embeddings: int,
    window: Any,
    *,
    has_experts: bool,
) -> None:
    """Refuse a sliding window that a layer would use, unless every row fits into it.

    Qwen2.5 publishes `sliding_window` with `use_sliding_window: false`. transformers applies the window to
    layers from `max_window_layers` on (in Qwen2-MoE, to the layers before it), unless `layer_types` lists the
    type of each layer. A window without its switch counts as used; a window of zero tokens does not.
    """
    layer_types = reader.take("layer_types")
    reader.take("sliding_window")
    switch = reader.take("use_sliding_window")
    first_windowed = reader.take("max_window_layers")

    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
            needed = f"must name one type for each of {num_hidden_layers} layers"
            reader.problems.append(f"field 'layer_types' is {layer_types!r}, but {needed}")
        elif other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            named = ", ".join(other)
            reader.problems.append(f"field 'layer_types' has {named}; only full_attention is supported")
    elif isinstance(window, int) and window >= max_position_embeddings:
        return
    elif switch or (switch is None and window):
        # A dense model is unaffected if its windowed layers would begin after the last layer.
        if isinstance(first_windowed, int) and first_windowed >= num_hidden_layers and not has_experts:
            return
        reader.problems.append(
            f"field 'use_sliding_window' is {json.dumps(switch)} with 'sliding_window' {json.dumps(window)} "
            f"and 'max_window_layers' {json.dumps(first_windowed)}: not all of {num_hidden_layers} layers "
            "would see every token; only full attention is supported"
        )
