"""Nemotron-H: layers that are a Mamba-2 mixer, attention, a feed-forward or experts.

A layer has one part, with a norm before it. Attention has no rotary embedding. Feed-forwards have no gate,
but a squared ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.machine.errors import counted
from megarl.models.architecture import Activation, Architecture, Experts, Mamba, RouterScore
from megarl.models.class_defaults import CLASS_DEFAULTS
from megarl.models.config_reader import FULL, OF_CLASS, ConfigReader
from megarl.models.experts import (
    SELECTION_BIAS_ROW,
    check_num_chosen,
    check_router_gradient,
    expert_rows,
    read_groups,
    shared_expert_rows,
)
from megarl.models.family import Family
from megarl.models.mamba import has_mamba, mamba_rows
from megarl.models.mapping import (
    FEED_FORWARD,
    MEGATRON_LAYER,
    MIXER,
    NORM_BEFORE,
    Cut,
    MappingRow,
    StagePlacement,
    TensorPart,
    has_feed_forward,
    has_mixer,
)
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_heads, with_names

_MAMBA = "linear_attention"
_DENSE = "mlp"
_SPARSE = "moe"
# The types of layers in transformers v5, by their letters in patterns and their names in transformers v4.
_LETTERS = {"M": _MAMBA, "*": FULL, "-": _DENSE, "E": _SPARSE}
_OLDER = {"mamba": _MAMBA, "attention": FULL}

# Fields that change the model, with the values that this family computes.
_FIXED: dict[str, object] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "residual_in_fp32": False,
    "hidden_dropout": 0,
    "sliding_window": None,
    "n_shared_experts": 1,
    "moe_latent_size": None,
    "tie_word_embeddings": False,
}
# Fields that initialize weights, select kernels or describe layers that predict further tokens. Attention has
# no rotary embedding, and `expand` has no effect, unlike the number of heads and their size.
_HARMLESS = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "use_mamba_kernels", "time_step_floor", "time_step_max", "time_step_min"),
    *("mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor"),
)
_LARGEST_EPS = 0.01


def _read(reader: ConfigReader) -> Architecture:
    for name in _HARMLESS:
        reader.take(name)
    for name, supported in _FIXED.items():
        if reader.value(name) != supported:
            reader.refuse(name, f"only {supported!r} is supported")

    # Other code clamps time steps. transformers does so at `time_step_min`, which initializes weights in
    # the code of published folders; Megatron-Core and SGLang do not, and `time_step_limit` says so.
    limit = reader.take("time_step_limit")
    if limit is not None and limit not in ([0, math.inf], [0, {"__float__": "Infinity"}]):
        reader.refuse("time_step_limit", "only [0, Infinity] is supported")

    kinds = _read_kinds(reader)
    layers = range(len(kinds))
    num_attention_heads, num_key_value_heads, head_dim = read_heads(reader, reader.number("hidden_size", int))
    for name, other in (("attention_head_dim", head_dim), ("norm_eps", reader.value("layer_norm_epsilon"))):
        reader.require(name, other, f"must be {other}, as in transformers' own field")

    return Architecture(
        model_type=reader.take("model_type"),
        num_hidden_layers=len(kinds),
        hidden_size=reader.number("hidden_size", int),
        intermediate_size=reader.number("intermediate_size", int),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=reader.number("vocab_size", int),
        max_position_embeddings=reader.number("max_position_embeddings", int),
        rms_norm_eps=reader.number("layer_norm_epsilon", float, OF_CLASS, at_most=_LARGEST_EPS),
        rope_theta=1.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        activation=Activation.squared_relu,
        layers_without_rope=tuple(layers),
        layers_without_mixer=tuple(layer for layer in layers if kinds[layer] in (_DENSE, _SPARSE)),
        layers_without_feed_forward=tuple(layer for layer in layers if kinds[layer] in (_MAMBA, FULL)),
        mamba=_read_mamba(reader, tuple(layer for layer in layers if kinds[layer] == _MAMBA)),
        experts=_read_experts(reader, tuple(layer for layer in layers if kinds[layer] == _SPARSE)),
        num_mtp_layers=reader.count("num_nextn_predict_layers", OF_CLASS),
    )


def _read_kinds(reader: ConfigReader) -> list[str]:
    """Read the type of each layer: a pattern of letters in published folders, or a list of names."""
    pattern = reader.take("hybrid_override_pattern")
    named = reader.take("layers_block_type")
    num_layers = reader.take("num_hidden_layers")
    name = "hybrid_override_pattern" if named is None else "layers_block_type"
    given = pattern if named is None else named

    kinds: list[str] = []
    if isinstance(given, str):
        kinds = [_LETTERS.get(letter, letter) for letter in given]
    elif isinstance(given, list):
        kinds = [_OLDER.get(kind, kind) for kind in map(str, given)]
    if not kinds or set(kinds) - set(_LETTERS.values()):
        known = ", ".join((*_LETTERS, *_LETTERS.values(), *_OLDER))
        reader.problems.append(f"field {name!r} is {given!r}, but must have a type for each layer: {known}")
        return [_MAMBA]

    if num_layers not in (None, len(kinds)):
        reader.problems.append(
            f"field {name!r} has {counted(len(kinds), 'layer')}, but 'num_hidden_layers' is {num_layers!r}"
        )
    return kinds


def _read_mamba(reader: ConfigReader, layers: tuple[int, ...]) -> Mamba | None:
    """Read the sizes of Mamba-2 mixers. Without such layers, the fields have no effect."""
    num_groups = reader.number("n_groups", int, OF_CLASS)
    num_heads = reader.number("mamba_num_heads", int, OF_CLASS)
    if num_heads % num_groups:
        needed = f"a multiple of 'n_groups' {num_groups}"
        reader.conflict(
            f"'mamba_num_heads' is {num_heads}, but must be {needed}", "mamba_num_heads", "n_groups"
        )
    mamba = Mamba(
        num_groups=num_groups,
        num_heads=num_heads,
        head_dim=reader.number("mamba_head_dim", int, OF_CLASS),
        state_dim=reader.number("ssm_state_size", int, OF_CLASS),
        conv_kernel_dim=reader.number("conv_kernel", int, OF_CLASS),
        layers=layers,
    )
    return mamba if layers else None


def _read_experts(reader: ConfigReader, layers: tuple[int, ...]) -> Experts | None:
    """Read the experts. Without such layers, the fields have no effect."""
    num_experts = reader.number("n_routed_experts", int, OF_CLASS)
    chosen = reader.number("num_experts_per_tok", int, OF_CLASS)
    norm_topk_prob = reader.flag("norm_topk_prob")
    experts = Experts(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=reader.number("moe_intermediate_size", int, OF_CLASS),
        shared_intermediate_size=reader.number("moe_shared_expert_intermediate_size", int, OF_CLASS),
        norm_topk_prob=norm_topk_prob,
        layers=layers,
        score=RouterScore.sigmoid,
        has_selection_bias=True,
        groups=read_groups(reader, num_experts, chosen),
        scaling_factor=reader.number("routed_scaling_factor", float, OF_CLASS),
    )
    if not layers:
        return None

    check_num_chosen(reader, chosen, "n_routed_experts", num_experts)
    check_router_gradient(reader, chosen, norm_topk_prob)
    if not norm_topk_prob and chosen > 1:
        reader.refuse("norm_topk_prob", "only true is supported with sigmoid scores")
    return experts


def _has_attention(architecture: Architecture, layer: int | None) -> bool:
    return has_mixer(architecture, layer) and not has_mamba(architecture, layer)


_OF_NORMS = {
    MEGATRON_LAYER + NORM_BEFORE[MIXER]: has_mixer,
    MEGATRON_LAYER + NORM_BEFORE[FEED_FORWARD]: has_feed_forward,
}
_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.layers.": "backbone.layers.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".norm.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}


def _of_part(row: MappingRow) -> MappingRow:
    """Return a row of other families as that of a layer with one part, whose feed-forward has no gate."""
    if row.megatron.startswith(MEGATRON_LAYER + MIXER):
        row = replace(row, applies=_has_attention)
    row = replace(row, applies=_OF_NORMS.get(row.megatron, row.applies))
    if row.cut is not Cut.gated:
        return row

    # Only the projection that the activation follows is left.
    up = row.tensors[-1]
    fused = row.place is StagePlacement.expert
    alternative = (
        (TensorPart(name="model.layers.{layer}.mlp.experts.up_proj", dims="E M H"),) if fused else ()
    )
    return replace(row, cut=Cut.column, tensors=(up,), alternative=alternative)


def _renamed(name: str) -> str:
    for other, own in _NAMES.items():
        name = name.replace(other, own)
    return name


_ABSENT = ("linear_qkv.bias", "q_layernorm.weight", "k_layernorm.weight")
_ROWS = (
    *map(
        _of_part,
        (
            *(row for row in TRUNK_ROWS if not row.megatron.endswith(_ABSENT)),
            *expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
            *shared_expert_rows("mlp.shared_experts"),
            SELECTION_BIAS_ROW,
        ),
    ),
    *mamba_rows("mixer"),
)


# Fields of other families that transformers' class lacks, or has with one value.
_ABSENT_FIELDS = ("rms_norm_eps", "rope_theta", "hidden_act", "num_hidden_layers", "tie_word_embeddings")


def _sglang_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that SGLang's class has under other names."""
    names = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"}
    return {own: fields[name] for name, own in names.items() if name in fields}


def _sglang_refuses(fields: Mapping[str, Any]) -> str:
    """Return what to write instead of the names of layers of transformers v5, which SGLang does not know."""
    named = fields.get("layers_block_type")
    if not isinstance(named, list) or not {_MAMBA, FULL} & set(named):
        return ""
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    pattern = "".join(letters[_OLDER.get(kind, kind)] for kind in named)
    return (
        "'layers_block_type' with the names of transformers v5; replace it in config.json by "
        f"'hybrid_override_pattern': {pattern!r}, as published folders have it"
    )


NEMOTRON_H = Family(
    model_type="nemotron_h",
    class_prefix="NemotronH",
    read=_read,
    rows=with_names(_ROWS, _renamed),
    module_prefixes={"model.": "backbone."},
    # Both pipeline stages have every kind of layer.
    example_fields={name: value for name, value in EXAMPLE.items() if name not in _ABSENT_FIELDS}
    | {
        "layers_block_type": [_MAMBA, FULL, _SPARSE, _DENSE, _MAMBA, _SPARSE, FULL, _DENSE],
        "head_dim": 32,
        "layer_norm_epsilon": 1e-5,
        "n_groups": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    kept={"mtp.": "the layers that predict further tokens"},
    # SGLang reads this name, but has a default of another one.
    sglang_fields={"n_groups": CLASS_DEFAULTS["nemotron_h"]["n_groups"]},
    sglang_replaced=_sglang_fields,
    sglang_refuses=_sglang_refuses,
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano",
    limits=(
        "experts of a latent size are refused",
        "layers that predict further tokens are not trained, but "
        "[kept](large_models.md#multi-token-prediction)",
        "SGLang on GPUs only, for folders with `hybrid_override_pattern`, as published ones have it",
        "each response that shares a prompt computes the states of the prompt again",
        "time steps are not clamped, as in Megatron-Core and SGLang, unlike in transformers "
        "(`time_step_min`)",
        "in Megatron's format a mixer is `self_attention`, so checkpoints of Megatron's own hybrid models "
        "are not read",
        "not run on a GPU",
    ),
)
