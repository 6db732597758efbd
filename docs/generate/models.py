"""Generates docs/models.md from the families of megarl/models and the models of configs/models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.shipped import CONFIGS_DIR
from megarl.models.architecture import (
    Activation,
    Architecture,
    LinearScaling,
    Llama3Scaling,
    QKNorm,
    RouterScore,
    YarnScaling,
)
from megarl.models.counts import num_active_parameters, num_parameters
from megarl.models.families import FAMILIES, read_architecture
from megarl.models.family import Family
from megarl.models.unsupported import MISSING_PARTS

_HEAD = """# Model families

This page lists the model families that megarl trains, what each of them supports, and published models whose
parameters, memory and FLOPs `megarl check` and `megarl check --plan` compute without their weights.

A family consists of all models with the same `model_type` in `config.json`. Every family is tested on a CPU in
the same way: outputs, all gradients and an optimizer step are [compared with
transformers](evidence.md#model-families-compared-with-hugging-face) in float32 and in several layouts; a
folder is converted to Megatron's format and back bitwise; every tensor is found in SGLang's class, if it has
one; and parameter counts are those of transformers. [How to add a family](extending.md#a-model-family) shows one as
an example.
"""

_COMMON = """## What all families support

- **Roles**: policy, reference, critic and reward model, with a tied or a separate output layer.
- **Layouts**: tensor and sequence parallelism, pipelines with virtual stages, replicas, and [context
  parallelism](large_models.md#context-parallelism-and-long-sequences). Models with experts also have expert and expert-tensor parallelism, and need
  sequence parallelism with tensor parallelism ([mixture of experts](large_models.md#mixture-of-experts-moe)).
- **Rows**: packed or padded, and shared prompts. Rows may be as long as `max_position_embeddings`
  unless the table names another limit.
- **Rollout**: SGLang on GPUs and on a CPU, with the exceptions in the table. The engine `hf` generates with
  models without experts.
- **[RoPE scaling](large_models.md#longer-than-the-model-was-trained-for)**: `linear`, `llama3` and `yarn`, in
  the forms of transformers v4 and v5.

A field of `config.json` that megarl does not know, or whose value it does not support, is refused by name. A
missing field has the default of transformers' class for that `model_type`, or is refused by name if it is a size.
"""

_REFUSED = """## Refused by name

Every other type for which transformers has a language model is refused with what is missing:
"""

_NEXT = """
Next: [the architecture](architecture.md), if you want to change the code.
"""


_ACTIVATIONS = {
    Activation.silu: "",
    Activation.gelu_tanh: ", GELU",
    Activation.squared_relu: ", squared ReLU without a gate",
}


def models_page() -> str:
    families = _table(
        ("`model_type`", "models", "attention", "feed-forward", "SGLang's class", "limits"),
        (
            (
                f"`{name}`",
                family.models or family.class_prefix,
                _attention(_example(name)),
                _feed_forward(_example(name)),
                _sglang_class(family),
                "; ".join(family.limits) or "-",
            )
            for name, family in FAMILIES.items()
        ),
    )
    published = _table(
        ("model", "`model_type`", "parameters", "active", "layers", "hidden size", "tokens", "RoPE"),
        _published(),
    )
    refused = _table(
        ("what is missing", "`model_type`"),
        ((missing, ", ".join(f"`{name}`" for name in names)) for missing, names in MISSING_PARTS.items()),
    )
    sizes = "## Published models\n\nTheir files are in `configs/models`, so you can plan a run without them."

    return "\n".join(
        [_HEAD, "## Families\n", families, _COMMON, sizes, "", published, _REFUSED, refused.rstrip(), _NEXT]
    )


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), "|".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "".join(f"|{line}|\n" if line.startswith("---") else f"| {line} |\n" for line in lines)


def _sglang_class(family: Family) -> str:
    name = f"{family.class_prefix}{family.lm_class}"
    return f"`{name}`" if family.sglang_class else "none"


def _example(model_type: str) -> Architecture:
    family = FAMILIES[model_type]
    return family.read(family.reader(family.example()))


def _attention(architecture: Architecture) -> str:
    parts = ["latent" if architecture.latent else "grouped-query"]
    if architecture.indexer is not None:
        parts.append("sparse (DSA)")
    if architecture.delta_net:
        parts = ["gated delta nets", *parts]
    if architecture.mamba:
        parts = ["Mamba-2 mixers", *parts]
    if architecture.has_output_gate:
        parts.append("output gate")
    if architecture.qkv_bias:
        parts.append("bias of q, k and v")
    if architecture.qk_norm:
        over = " over all heads" if architecture.qk_norm_kind is QKNorm.all_heads else ""
        parts.append(f"norm of q and k{over}")
    if architecture.partial_rotary_factor != 1:
        parts.append(f"{architecture.partial_rotary_factor:.0%} of a head rotated")
    if architecture.has_sinks:
        parts.append("sinks")
    if any(architecture.windows):
        parts.append("sliding windows")
    if architecture.vision is not None:
        parts.append("positions in three axes, [vision tower](data.md#images)")
    if architecture.local_rope is not None:
        parts.append("two rotary embeddings")
    if len(architecture.layers_without_rope) == architecture.num_hidden_layers:
        parts.append("no rotary embedding")
    elif architecture.layers_without_rope:
        parts.append("layers without rotary embedding")
    if architecture.layers_without_mixer:
        parts.append("layers of one part")
    if architecture.norms.after:
        parts.append("norms before and after blocks" if architecture.norms.before else "norms after blocks")
    return ", ".join(parts)


def _feed_forward(architecture: Architecture) -> str:
    experts = architecture.experts
    if experts is None:
        return "dense" + _ACTIVATIONS[architecture.activation]

    parts = [f"{'sigmoid' if experts.score is RouterScore.sigmoid else 'softmax'} router"]
    if experts.has_selection_bias:
        parts.append("selection bias")
    if experts.shared_intermediate_size:
        parts.append("shared expert")
    if architecture.linear_bias:
        parts.append("biases")
    return f"experts{_ACTIVATIONS[architecture.activation]}: " + ", ".join(parts)


def _published() -> Iterator[tuple[str, ...]]:
    for folder in sorted(CONFIGS_DIR.glob("models/*/config.json"), key=lambda file: file.parent.name.lower()):
        model = read_architecture(str(folder.parent), trust_remote_code=True)
        yield (
            folder.parent.name,
            f"`{model.model_type}`",
            _billions(num_parameters(model)),
            _billions(num_active_parameters(model)) if model.experts else "-",
            str(model.num_hidden_layers),
            f"{model.hidden_size:,}",
            f"{model.max_position_embeddings:,}",
            _rope(model),
        )


def _billions(number: int) -> str:
    return f"{number / 1e9:.2f} B"


def _rope(model: Architecture) -> str:
    if len(model.layers_without_rope) == model.num_hidden_layers:
        return "none"
    match model.rope_scaling:
        case LinearScaling(factor=factor):
            return f"linear {factor:g}"
        case Llama3Scaling(factor=factor):
            return f"llama3 {factor:g}"
        case YarnScaling(factor=factor):
            return f"yarn {factor:g}"
        case None:
            return f"base {model.rope_theta:,.0f}"
