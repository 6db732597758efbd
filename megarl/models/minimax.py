"""MiniMax-M2 (MiniMax 2025): norms of the queries and keys of all heads together, and sigmoid routers."""

from __future__ import annotations

from dataclasses import replace

from megarl.models.architecture import Architecture, Experts, QKNorm, RouterScore
from megarl.models.config_reader import OF_CLASS, ConfigReader
from megarl.models.experts import SELECTION_BIAS_ROW, expert_rows, read_softmax_experts
from megarl.models.family import Family
from megarl.models.mapping import HF_LAYER
from megarl.models.trunk import ATTENTION_ROWS_WITH_NORMS_OVER_HEADS, EXAMPLE, read_trunk, trunk_rows

_BLOCK = "block_sparse_moe"
# Fields of the published model code that select variants, with the one that this family computes.
_FIXED = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
# Layers that predict further tokens, which published folders do not have.
_HARMLESS = ("mtp_transformer_layers", "num_mtp_modules", "use_mtp")


def _read(reader: ConfigReader) -> Architecture:
    for name, supported in _FIXED.items():
        reader.require(name, supported, f"only {supported!r} is supported")
    reader.require("shared_intermediate_size", 0, "a shared expert is not supported")
    for name in _HARMLESS:
        reader.take(name)

    kinds = reader.take("attn_type_list")
    if kinds is not None and set(map(str, kinds)) != {"1"}:
        reader.refuse("attn_type_list", "only 1, full attention, is supported in every layer")

    architecture = read_trunk(
        _with_rotated_fraction(reader), qk_norm=True, read_experts=_read_experts, rotates_parts=True
    )
    return replace(architecture, qk_norm_kind=QKNorm.all_heads)


def _with_rotated_fraction(reader: ConfigReader) -> ConfigReader:
    """Return a reader with the rotated fraction of a head, which published folders have as a size.

    SGLang reads the size alone, and transformers prefers the fraction.
    """
    rotary_dim = reader.number("rotary_dim", int, None)
    if rotary_dim is None:
        return reader

    fraction = rotary_dim / reader.number("head_dim", int, OF_CLASS)
    inner = reader.fields.get("rope_parameters")
    name = "partial_rotary_factor"
    given = inner.get(name) if isinstance(inner, dict) else None
    given = reader.fields.get(name) if given is None else given
    if given is None:
        return replace(reader, fields=reader.fields | {name: fraction})

    if given != fraction:
        said = f"{fraction:g} of a head, but {name!r} is {given!r}"
        reader.conflict(f"field 'rotary_dim' is {rotary_dim}, {said}; keep one", "rotary_dim", "head_dim")
    return reader


def _read_experts(reader: ConfigReader, num_hidden_layers: int) -> Experts:
    experts = read_softmax_experts(reader, num_hidden_layers, size_field="intermediate_size")
    return replace(experts, score=RouterScore.sigmoid, has_selection_bias=True)


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    class_prefix="MiniMaxM2",
    read=_read,
    rows=(
        *trunk_rows(ATTENTION_ROWS_WITH_NORMS_OVER_HEADS),
        *expert_rows(_BLOCK, gate="w1", up="w3", down="w2"),
        replace(SELECTION_BIAS_ROW, tensors=((f"{HF_LAYER}{_BLOCK}.e_score_correction_bias", "E"),)),
    ),
    example_fields=EXAMPLE
    | {
        "head_dim": 32,
        "intermediate_size": 32,
        "partial_rotary_factor": 0.5,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    sglang_fields=_FIXED,
    sglang_derived=lambda architecture: {"rotary_dim": architecture.rotary_dim},
    sglang_differences={"a tied embedding": lambda architecture: architecture.tie_word_embeddings},
    cpu_engine_lacks="norms over all heads, which SGLang's class computes on GPUs only",
    limits=("SGLang on GPUs only",),
    models="MiniMax-M2, M2.1, M2.5 and M2.7",
)
