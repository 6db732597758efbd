"""The decoder that all families share: attention with RoPE and a gated feed-forward, each with norms.

Qwen 2, 2.5 and 3 and Llama 2 and 3 differ in two switches: the bias of q, k and v, and the norm of q and k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, Experts, LatentAttention
from megarl.models.config_reader import OF_CLASS, REQUIRED, ConfigReader, check_sliding_window
from megarl.models.mapping import (
    EMBEDDING,
    FEED_FORWARD,
    HF_LAYER,
    MEGATRON_LAYER,
    MIXER,
    Cut,
    MappingRow,
    PartKind,
    StagePlacement,
    TensorPart,
    is_dense,
)
from megarl.models.rope import has_rope_by_layer_type, read_rope, read_ropes_by_layer_type

_LARGEST_EPS = 0.01  # added to a mean square of about 1; models have 1e-5 or 1e-6

_EMBEDDING_ROW = MappingRow(
    megatron=EMBEDDING,
    place=StagePlacement.embedding,
    cut=Cut.vocabulary,
    tensors=(("model.embed_tokens.weight", "V H"),),
)


def _attention_blocks(
    sizes: Mapping[str, int], ranks: int, expert_ranks: float
) -> Iterator[tuple[str, str, float]]:
    yield "q_proj", "rows", sizes["Q"] / ranks
    # With more ranks than key-value heads, SGLang replicates the heads.
    yield "k_proj and v_proj", "rows", max(sizes["D"], sizes["K"] / ranks)


def _mlp_blocks(
    sizes: Mapping[str, int], ranks: int, expert_ranks: float
) -> Iterator[tuple[str, str, float]]:
    yield "gate_proj and up_proj", "rows", sizes["F"] / ranks


# Each query has a product with a key and one with a value. A rank of an engine has at least one whole head.
ATTENTION = PartKind(
    name="attention",
    prefix=MIXER,
    of_pair=("Q", "O"),
    cached="2 K",
    cached_at_least="2 D",
    has_groups=True,
    shared_out=(("num_attention_heads", "N"),),
    replicable=(("num_key_value_heads", "G"),),
    fp8_blocks=_attention_blocks,
    megatron_arguments=lambda architecture: {"kv_channels": architecture.head_dim},
    stored_norm="self_attention.linear_qkv.layer_norm_weight",
)
# Megarl's core is in all layers of a model with sinks or windows.
SINK_ATTENTION = replace(
    ATTENTION,
    name="attention sinks",
    replaces_core=True,
    applies=lambda architecture, layer: architecture.has_sinks,
    cpu_engine_lacks="attention sinks, which SGLang's attention for CPUs lacks",
)
WINDOWED_ATTENTION = replace(
    ATTENTION,
    name="sliding windows",
    replaces_core=True,
    applies=lambda architecture, layer: any(architecture.windows),
)
MLP = PartKind(
    name="dense feed-forwards",
    prefix=FEED_FORWARD,
    applies=is_dense,
    shared_out=(("intermediate_size", "F"),),
    fp8_blocks=_mlp_blocks,
    stored_norm="mlp.linear_fc1.layer_norm_weight",
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


def _over_all_heads(row: MappingRow) -> MappingRow:
    """Return the row of a norm of queries or keys with a weight for each head, sharded like the heads."""
    dimensions = {"q_layernorm": "Q", "k_layernorm": "K"}.get(row.megatron.split(".")[-2])
    if dimensions is None:
        return row
    (entry,) = row.tensors
    assert isinstance(entry, tuple)
    return replace(row, cut=Cut.column, tensors=((entry[0], dimensions),))


# The rows of attention with norms of queries and keys over all heads (`QKNorm.all_heads`).
ATTENTION_ROWS_WITH_NORMS_OVER_HEADS = tuple(_over_all_heads(row) for row in ATTENTION_ROWS)

_FEED_FORWARD_ROWS = (
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
)

_LAST_NORM_ROW = MappingRow(
    megatron="decoder.final_layernorm.weight",
    place=StagePlacement.output,
    cut=Cut.replicated,
    tensors=(("model.norm.weight", "H"),),
)


def trunk_rows(
    attention: tuple[MappingRow, ...],
    *,
    before_attention: str | None = "input_layernorm",
    after_attention: str | None = None,
    before_feed_forward: str | None = "post_attention_layernorm",
    after_feed_forward: str | None = None,
) -> tuple[MappingRow, ...]:
    """Return the table rows of a decoder with dense feed-forwards.

    The arguments are the Hugging Face names of the norms of a layer's blocks; None: the layer has no such
    norm. A norm of a block's output belongs to the last linear layer of the block, where Megatron-Bridge has
    it too.
    """
    return (
        _EMBEDDING_ROW,
        *_norm_row("input_layernorm", before_attention),
        *attention,
        *_norm_row("self_attention.linear_proj.post_layernorm", after_attention),
        *_norm_row("pre_mlp_layernorm", before_feed_forward),
        *_FEED_FORWARD_ROWS,
        *_norm_row("mlp.linear_fc2.post_layernorm", after_feed_forward),
        _LAST_NORM_ROW,
    )


def _norm_row(megatron: str, hf: str | None) -> tuple[MappingRow, ...]:
    if hf is None:
        return ()
    row = MappingRow(
        megatron=f"{MEGATRON_LAYER}{megatron}.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((f"{HF_LAYER}{hf}.weight", "H"),),
    )
    return (row,)


def with_prefix(rows: tuple[MappingRow, ...], old: str, new: str) -> tuple[MappingRow, ...]:
    """Return the rows with another prefix of the names of Hugging Face tensors."""
    return with_names(rows, lambda name: new + name.removeprefix(old))


def with_names(rows: tuple[MappingRow, ...], rename: Callable[[str], str]) -> tuple[MappingRow, ...]:
    """Return the rows with other names of Hugging Face tensors."""

    def renamed(entry: tuple[str, str] | TensorPart) -> tuple[str, str] | TensorPart:
        if isinstance(entry, TensorPart):
            return replace(entry, name=rename(entry.name))
        return rename(entry[0]), entry[1]

    return tuple(
        replace(
            row,
            tensors=tuple(map(renamed, row.tensors)),
            alternative=tuple(map(renamed, row.alternative)),
        )
        for row in rows
    )


TRUNK_ROWS = trunk_rows(ATTENTION_ROWS)

# The base of every `Family.example_fields`. Every size is divisible by four ranks. The vocabulary is odd, so
# that every tensor-parallel size pads it.
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
    read_experts: Callable[[ConfigReader, int], Experts] | None = None,
    read_latent: Callable[[ConfigReader], LatentAttention] | None = None,
    may_have_mtp: bool = False,
    read_windows: Callable[[ConfigReader, int], tuple[int, ...]] | None = None,
    local_theta_field: str | None = None,
    rotates_parts: bool = False,
) -> Architecture:
    """Read what the families share.

    Args:
        qkv_bias: Whether the projections of queries, keys and values have a bias.
        qk_norm: Whether queries and keys are normalized per head.
        read_experts: Reads the experts of a model with the given number of layers.
        may_have_mtp: Whether models of the family may have layers that predict further tokens.
        read_windows: Reads the window of each layer; None: windows are refused.
        local_theta_field: The field of transformers v4 that has the base frequency of layers with a window;
            None if it had none.
        rotates_parts: As in `read_rope`.
    """
    hidden_size = reader.number("hidden_size", int)
    latent = read_latent(reader) if read_latent else None
    num_attention_heads, num_key_value_heads, head_dim = (
        read_heads(reader, hidden_size) if latent is None else _read_heads_of_latent(reader, latent)
    )

    # Layers with a window may have a rotary embedding of their own.
    max_position_embeddings = reader.number("max_position_embeddings", int)
    rope_of_windows = None
    if has_rope_by_layer_type(reader):
        rope, rope_of_windows = read_ropes_by_layer_type(reader, max_position_embeddings, local_theta_field)
    else:
        rope = read_rope(reader, max_position_embeddings, rotates_parts=rotates_parts)
    theta, scaling, partial_rotary_factor = rope

    num_hidden_layers = reader.number("num_hidden_layers", int)
    experts = read_experts(reader, num_hidden_layers) if read_experts else None
    windows: tuple[int, ...] = ()
    if read_windows is not None:
        windows = read_windows(reader, num_hidden_layers)
    else:
        check_sliding_window(
            reader, num_hidden_layers, max_position_embeddings, has_experts=experts is not None
        )

    return Architecture(
        model_type=reader.take("model_type"),
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=_read_intermediate_size(reader, num_hidden_layers, experts),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=reader.number("vocab_size", int),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=reader.number("rms_norm_eps", float, at_most=_LARGEST_EPS),
        rope_theta=theta,
        rope_scaling=scaling,
        partial_rotary_factor=partial_rotary_factor,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        experts=experts,
        latent=latent,
        num_mtp_layers=reader.count("num_nextn_predict_layers", OF_CLASS) if may_have_mtp else 0,
        windows=windows,
        local_rope=rope_of_windows,
    )


def _read_intermediate_size(reader: ConfigReader, num_hidden_layers: int, experts: Experts | None) -> int:
    """Read the size of dense feed-forwards. A folder may omit it if all layers have experts."""
    if experts is not None and len(experts.layers) == num_hidden_layers:
        return reader.number("intermediate_size", int, OF_CLASS, null=experts.intermediate_size)
    return reader.number("intermediate_size", int)


def read_heads(reader: ConfigReader, hidden_size: int) -> tuple[int, int, int]:
    """Read the numbers of query heads and of key-value heads, and the size of a head."""
    num_attention_heads = reader.number("num_attention_heads", int)
    num_key_value_heads = _read_key_value_heads(reader, num_attention_heads)
    head_dim = reader.number("head_dim", int, OF_CLASS, null=hidden_size // num_attention_heads)

    # Only a head size that is derived from the hidden size requires an even division.
    of_heads = f"a multiple of 'num_attention_heads' {num_attention_heads}"
    is_derived = reader.value("head_dim") is None
    if is_derived and hidden_size % num_attention_heads:
        reader.conflict(
            f"'hidden_size' {hidden_size} is not {of_heads}, and 'head_dim' is missing",
            "hidden_size",
            "num_attention_heads",
        )
    elif head_dim % 2:
        reader.conflict(
            f"'head_dim' is {head_dim}; rotary embeddings rotate pairs, so it must be even",
            "head_dim",
            *(("hidden_size", "num_attention_heads") if is_derived else ()),
        )

    if num_attention_heads % num_key_value_heads:
        of_groups = f"a multiple of 'num_key_value_heads' {num_key_value_heads}"
        reader.conflict(
            f"'num_attention_heads' {num_attention_heads} is not {of_groups}",
            "num_attention_heads",
            "num_key_value_heads",
        )

    return num_attention_heads, num_key_value_heads, head_dim


def _read_key_value_heads(reader: ConfigReader, num_attention_heads: int) -> int:
    """Read the number of key-value heads. Null means as many as query heads.

    The field is required if transformers' class has a number that only fits its own default sizes.
    """
    name = "num_key_value_heads"
    is_derived = reader.value(name) is None and (name in reader.fields or name in reader.defaults)
    return reader.number(name, int, num_attention_heads if is_derived else REQUIRED)


def _read_heads_of_latent(reader: ConfigReader, latent: LatentAttention) -> tuple[int, int, int]:
    """Read the heads of latent attention as `read_heads` does. Each has its own keys and values."""
    num_attention_heads = reader.number("num_attention_heads", int)
    num_key_value_heads = _read_key_value_heads(reader, num_attention_heads)

    if num_key_value_heads != num_attention_heads:
        needed = (
            f"'num_attention_heads' {num_attention_heads}, because every head has its own keys and values"
        )
        reader.conflict(
            f"'num_key_value_heads' is {num_key_value_heads}, but must equal {needed}",
            "num_key_value_heads",
            "num_attention_heads",
        )

    return num_attention_heads, num_attention_heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
