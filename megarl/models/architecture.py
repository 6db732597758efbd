"""What a Hugging Face `config.json` says about a model, as one frozen value that every layer reads. No torch.

The families differ in a handful of switches (`qkv_bias`, `qk_norm`, rope scaling, experts), so one dataclass holds
them all. A field of the JSON that would change the maths and is not handled here is refused by name; so is a field that
this module has never heard of, because a model that is silently wrong costs more than a line added to a list.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megarl.machine.errors import ConfigError
from megarl.machine.files import read_json_object


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The feed-forward networks of sparse layers, of which a router takes some for each token.

    num_experts_per_tok: those that the router takes. norm_topk_prob: their weights add up to one (always so in Mixtral).
    shared_intermediate_size: of the network that sees every token besides; 0: there is none.
    layers: the numbers of the layers that have experts; the others are dense.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int
    norm_topk_prob: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Field names are Hugging Face's. `tie_word_embeddings`: the output layer is the input embedding."""

    model_type: str  # one of `_FAMILIES`
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = None

    @property
    def num_experts(self) -> int:
        return self.experts.num_experts if self.experts else 0

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts."""
        return self.experts.layers if self.experts else ()

    @property
    def num_dense_layers(self) -> int:
        return self.num_hidden_layers - len(self.sparse_layers)


class _Family(NamedTuple):
    """What `model_type` alone decides. Defaults are those of transformers for a key that the JSON leaves out."""

    class_prefix: str  # of the names in `architectures`
    qkv_bias: bool
    qk_norm: bool
    default_head_dim: int | None  # None: hidden_size / num_attention_heads
    multi_head_by_default: bool  # no `num_key_value_heads`: as many as query heads
    default_rope_theta: float = 10000.0
    has_experts: bool = False


_FAMILIES = {
    "llama": _Family("Llama", qkv_bias=False, qk_norm=False, default_head_dim=None, multi_head_by_default=True),
    "qwen2": _Family("Qwen2", qkv_bias=True, qk_norm=False, default_head_dim=None, multi_head_by_default=False),
    "qwen3": _Family("Qwen3", qkv_bias=False, qk_norm=True, default_head_dim=128, multi_head_by_default=False),
    "mixtral": _Family(
        "Mixtral",
        qkv_bias=False,
        qk_norm=False,
        default_head_dim=None,
        multi_head_by_default=False,
        default_rope_theta=1e6,
        has_experts=True,
    ),
    "qwen2_moe": _Family("Qwen2Moe", qkv_bias=True, qk_norm=False, default_head_dim=None, multi_head_by_default=False, has_experts=True),
    "qwen3_moe": _Family("Qwen3Moe", qkv_bias=False, qk_norm=True, default_head_dim=None, multi_head_by_default=False, has_experts=True),
}


def class_prefix(model_type: str) -> str:
    """Of the names of a family's classes in `architectures`: Qwen2 of Qwen2ForCausalLM. `model_type`: a supported one."""
    return _FAMILIES[model_type].class_prefix


# What the classes of a language model, a critic and a reward model end with; a critic may start from any of them.
LM_CLASS, CRITIC_CLASS, REWARD_CLASS = "ForCausalLM", "ForTokenClassification", "ForSequenceClassification"
_HEADS = (LM_CLASS, REWARD_CLASS, CRITIC_CLASS, "Model")

# Fields that would change the forward pass, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),  # Llama and Qwen3 would put a bias on the output projection too
    "attention_dropout": (0, None),
    "router_jitter_noise": (0, None),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
    "quantization_config": (None,),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
}

# Fields that do not enter the forward pass of these families.
# fmt: off
_HARMLESS = {
    # bookkeeping; `pretraining_tp` splits the same products
    "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "architectures", "attn_implementation", "dtype",
    "finetuning_task", "initializer_range", "is_decoder", "is_llama_config", "model_type", "prefix", "pretraining_tp",
    "task_specific_params", "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # what forward() returns and keeps
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
    # of the loss that Hugging Face's own training would add; a run says its own
    "router_aux_loss_coef",
    # labels of a classification head
    "id2label", "label2id", "num_labels", "problem_type",
    # token ids
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "pad_token_id",
    "sep_token_id", "unk_token_id",
    # generation defaults that transformers v4 kept in this file; sampling comes from the run's own config
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}
# fmt: on

_ROPE_FIELDS = {
    "default": {"rope_type", "type", "rope_theta", "partial_rotary_factor"},
    "llama3": {"rope_type", "type", "rope_theta", "partial_rotary_factor", *RopeScaling.__dataclass_fields__},
}
_REQUIRED: Any = object()
_LARGEST = 1e15  # of any number in a config.json
_LARGEST_EPS = 0.01  # beside a mean square of about 1; models have 1e-5 or 1e-6


@dataclass
class _Reader:
    """Takes fields out of the JSON one by one, so that what is left over at the end is what nobody handled."""

    fields: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        self.seen.add(name)
        return self.fields.get(name)

    def number(self, name: str, kind: type[int] | type[float], default: Any = _REQUIRED, at_most: float = _LARGEST) -> Any:
        """A positive int or float of at most `at_most`, or `default` where the JSON has none or null."""
        value = self.take(name)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            self.problems.append(f"field {name!r} is missing")
        elif isinstance(value, bool) or not isinstance(value, int | kind) or not 0 < value < math.inf:  # a NaN is in no range
            self.problems.append(f"field {name!r} is {value!r}, but must be a positive {'integer' if kind is int else 'number'}")
        elif value > at_most:
            self.problems.append(f"field {name!r} is {value!r}, which no model has; it must be at most {at_most:g}")
        else:
            return kind(value)
        return kind(1)  # any value: the problem is reported before an Architecture is made

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            self.problems.append(f"field {name!r} is {value!r}, but must be true or false")
        return bool(value)


def read_architecture(path: str, trust_remote_code: bool = False) -> Architecture:
    """The architecture of the Hugging Face folder `path`, as transformers v4 or v5 wrote it.

    `trust_remote_code`: accept a folder with its own model code (`auto_map`), on the user's word that this code computes
    what the family named by `model_type` does; megarl never runs it.
    Raises ConfigError (a ValueError) that lists the file, every field it cannot honour, and the field's value.
    """
    file = Path(path) / "config.json"
    reader = _Reader(_read_json(file))
    model_type = reader.take("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConfigError(str(file), [f"field 'model_type' is {model_type!r}; the supported families are {', '.join(_FAMILIES)}"])
    architecture = _read_family(reader, model_type, family)
    _check_class(reader, family, trust_remote_code)
    _check_sliding_window(reader, architecture)
    _check_neutral(reader)
    for name in sorted(set(reader.fields) - reader.seen - _HARMLESS):
        reader.problems.append(f"field {name!r} is {reader.fields[name]!r}; megarl does not know whether it changes the model")
    if reader.problems:
        raise ConfigError(str(file), reader.problems)
    return architecture


def _read_json(file: Path) -> dict[str, Any]:
    if not os.path.isfile(file):
        reason = "the folder has no such file" if os.path.isdir(file.parent) else f"there is no folder {str(file.parent)!r}"
        raise ConfigError(str(file), [f"{reason}; a model is a local Hugging Face folder (config.json, safetensors, tokenizer)"])
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), [str(error)]) from error


def _read_family(reader: _Reader, model_type: str, family: _Family) -> Architecture:
    hidden_size = reader.number("hidden_size", int)
    num_attention_heads = reader.number("num_attention_heads", int)
    kv_heads_default = num_attention_heads if family.multi_head_by_default or "num_key_value_heads" in reader.fields else _REQUIRED
    num_key_value_heads = reader.number("num_key_value_heads", int, kv_heads_default)
    head_dim = reader.number("head_dim", int, family.default_head_dim or hidden_size // num_attention_heads)
    if reader.fields.get("head_dim") is None and family.default_head_dim is None and hidden_size % num_attention_heads:
        reader.problems.append(
            f"'hidden_size' {hidden_size} is not a multiple of 'num_attention_heads' {num_attention_heads}, and 'head_dim' is missing"
        )
    if num_attention_heads % num_key_value_heads:
        reader.problems.append(
            f"'num_attention_heads' {num_attention_heads} is not a multiple of 'num_key_value_heads' {num_key_value_heads}"
        )
    if head_dim % 2:
        reader.problems.append(f"'head_dim' is {head_dim}; rotary embeddings turn pairs, so it must be even")
    max_position_embeddings = reader.number("max_position_embeddings", int)
    rope_theta, rope_scaling = _read_rope(reader, max_position_embeddings, family.default_rope_theta)
    num_hidden_layers = reader.number("num_hidden_layers", int)
    experts = _read_experts(reader, model_type, num_hidden_layers) if family.has_experts else None
    # The size of the dense layers. Where there is none it says nothing, and a folder may leave it out.
    unused = experts.intermediate_size if experts and len(experts.layers) == num_hidden_layers else _REQUIRED
    return Architecture(
        model_type=model_type,
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=reader.number("intermediate_size", int, unused),
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        vocab_size=reader.number("vocab_size", int),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=reader.number("rms_norm_eps", float, at_most=_LARGEST_EPS),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        experts=experts,
    )


def _read_experts(reader: _Reader, model_type: str, num_hidden_layers: int) -> Experts:
    """Published folders say `num_experts`, transformers v5 writes `num_local_experts`; Mixtral has always said the latter."""
    older, newer = reader.take("num_experts"), reader.take("num_local_experts")
    if None not in (older, newer) and older != newer:
        reader.problems.append(f"fields 'num_experts' {older!r} and 'num_local_experts' {newer!r} differ; keep one")
    named = "num_experts" if newer is None else "num_local_experts"
    num_experts, chosen = reader.number(named, int), reader.number("num_experts_per_tok", int)
    is_mixtral = model_type == "mixtral"
    norm_topk_prob = is_mixtral or reader.flag("norm_topk_prob")
    if chosen > num_experts > 1:
        reader.problems.append(f"'num_experts_per_tok' {chosen} is more than '{named}' {num_experts}")
    if chosen == 1 and norm_topk_prob:
        reader.problems.append("'num_experts_per_tok' is 1 with weights that add up to one: the router would have no gradient")
    if model_type == "qwen2_moe" and reader.take("qkv_bias") not in (None, True):
        reader.problems.append(f"field 'qkv_bias' is {reader.fields['qkv_bias']!r}; only true is supported")
    layers = tuple(range(num_hidden_layers)) if is_mixtral else _sparse_layers(reader, num_hidden_layers)
    return Experts(
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        intermediate_size=reader.number("intermediate_size" if is_mixtral else "moe_intermediate_size", int),
        shared_intermediate_size=reader.number("shared_expert_intermediate_size", int) if model_type == "qwen2_moe" else 0,
        norm_topk_prob=norm_topk_prob,
        layers=layers,
    )


def _sparse_layers(reader: _Reader, num_hidden_layers: int) -> tuple[int, ...]:
    """As transformers' Qwen-MoE decides it: every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""
    step, dense = reader.number("decoder_sparse_step", int, 1), reader.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        reader.problems.append(f"field 'mlp_only_layers' is {dense!r}, but must be a list of layers' numbers")
        return ()
    layers = tuple(layer for layer in range(num_hidden_layers) if layer not in dense and (layer + 1) % step == 0)
    if not layers:
        reader.problems.append(f"'decoder_sparse_step' {step} and 'mlp_only_layers' {dense} leave no layer with experts")
    return layers


def _read_rope(reader: _Reader, max_position_embeddings: int, default_theta: float) -> tuple[float, RopeScaling | None]:
    """v5 keeps everything in `rope_parameters`; v4 has `rope_theta` at the top and `rope_scaling`, whose type may be called `type`."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(reader.take(name), dict | None):
            reader.problems.append(f"field {name!r} is {reader.fields[name]!r}, but must be an object")
            return default_theta, None
    name = "rope_scaling" if reader.fields.get("rope_scaling") else "rope_parameters"
    if reader.fields.get("rope_scaling") and reader.fields.get("rope_parameters") not in (None, {}, reader.fields["rope_scaling"]):
        reader.problems.append("fields 'rope_scaling' and 'rope_parameters' are both given and differ; keep one")
    rope = _Reader({"rope_theta": reader.take("rope_theta")} | (reader.fields.get(name) or {}))
    rope_type = rope.fields.get("rope_type", rope.fields.get("type", "default"))
    if rope.fields.get("type", rope_type) != rope_type:
        rope.problems.append(f"fields 'rope_type' {rope_type!r} and 'type' {rope.fields['type']!r} differ; keep one")
    rope_theta = rope.number("rope_theta", float, default_theta)
    outer_theta = reader.fields.get("rope_theta")
    if outer_theta is not None and outer_theta != rope.fields["rope_theta"]:
        rope.problems.append(f"field 'rope_theta' is {rope.fields['rope_theta']!r} here and {outer_theta!r} at the top; keep one")
    scaling = None
    if not isinstance(rope_type, str) or rope_type not in _ROPE_FIELDS:
        rope.problems.append(f"field 'rope_type' is {rope_type!r}; supported: {', '.join(_ROPE_FIELDS)}")
    else:
        for extra in sorted(set(rope.fields) - _ROPE_FIELDS[rope_type]):
            rope.problems.append(f"field {extra!r} is {rope.fields[extra]!r}; rope_type {rope_type!r} is not known to use it")
        scaling = _read_llama3_scaling(rope, max_position_embeddings) if rope_type == "llama3" else None
    if rope.fields.get("partial_rotary_factor") not in (None, 1):
        rope.problems.append(f"field 'partial_rotary_factor' is {rope.fields['partial_rotary_factor']!r}; only 1 is supported")
    reader.problems.extend(f"{name}: {problem}" if name in reader.fields else problem for problem in rope.problems)
    return rope_theta, scaling


def _read_llama3_scaling(rope: _Reader, max_position_embeddings: int) -> RopeScaling:
    scaling = RopeScaling(
        factor=rope.number("factor", float),
        low_freq_factor=rope.number("low_freq_factor", float),
        high_freq_factor=rope.number("high_freq_factor", float),
        original_max_position_embeddings=rope.number("original_max_position_embeddings", int, max_position_embeddings),
    )
    if not rope.problems and scaling.high_freq_factor <= scaling.low_freq_factor:
        rope.problems.append(f"'high_freq_factor' {scaling.high_freq_factor} must be above 'low_freq_factor' {scaling.low_freq_factor}")
    return scaling


def _check_class(reader: _Reader, family: _Family, trust_remote_code: bool) -> None:
    auto_map = reader.take("auto_map")
    if auto_map is not None and not trust_remote_code:
        reader.problems.append(
            f"field 'auto_map' is {auto_map!r}: the folder brings its own model code, which may compute something else than "
            "transformers' own class; set model.trust_remote_code=true if you know that it does not"
        )
    allowed = {family.class_prefix + head for head in _HEADS}
    for name in reader.fields.get("architectures") or []:
        if name not in allowed and not (auto_map is not None and trust_remote_code):
            reader.problems.append(f"field 'architectures' names {name!r}; supported: {', '.join(sorted(allowed))}")


def _check_sliding_window(reader: _Reader, architecture: Architecture) -> None:
    """A window is refused only where a layer would use it: Qwen2.5 publishes `sliding_window` with `use_sliding_window: false`.

    transformers windows the layers from `max_window_layers` on (those before it in Qwen2-MoE), unless `layer_types` says layer by layer.
    A window without its switch counts as used, one of no tokens is none.
    """
    num_hidden_layers = architecture.num_hidden_layers
    layer_types, window, switch = (reader.take(name) for name in ("layer_types", "sliding_window", "use_sliding_window"))
    first_windowed = reader.take("max_window_layers")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
            reader.problems.append(f"field 'layer_types' is {layer_types!r}, but must name one type for each of {num_hidden_layers} layers")
        elif other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            reader.problems.append(f"field 'layer_types' has {', '.join(other)}; only full_attention is supported")
    elif switch or (switch is None and window):
        if isinstance(first_windowed, int) and first_windowed >= num_hidden_layers and not architecture.experts:
            return
        reader.problems.append(
            f"field 'use_sliding_window' is {json.dumps(switch)} with 'sliding_window' {json.dumps(window)} and 'max_window_layers' "
            f"{json.dumps(first_windowed)}: not all of {num_hidden_layers} layers would see every token; only full attention is supported"
        )


def _check_neutral(reader: _Reader) -> None:
    for name, accepted in _NEUTRAL.items():
        if name in reader.fields and reader.take(name) not in accepted:
            reader.problems.append(f"field {name!r} is {reader.fields[name]!r}; only {json.dumps(accepted[0])} is supported")
