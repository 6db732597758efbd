"""Read the fields of a Hugging Face `config.json` one by one, so that no field is silently ignored.

A field that would change the forward pass and that no family handles is rejected by name. So is a field that
megarl does not know: a silently wrong model costs more than a line added to a list. Types of layers, sliding
windows and `quantization_config`, the format in which a folder stores matrices, are read for all families.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.machine.errors import counted

# Fields that would change the forward pass, with the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),  # Llama and Qwen3 would add a bias to the output projection too
    "attention_dropout": (0, None),
    "router_jitter_noise": (0, None),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    "use_mrope": (False, None),
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
    "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "architectures",
    "attn_implementation", "dtype", "finetuning_task", "initializer_range", "is_decoder", "is_llama_config",
    "model_type", "prefix", "pretraining_tp", "task_specific_params", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    # what forward() returns and keeps
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
    # coefficient of the loss in Hugging Face's own training; a run configures its own
    "router_aux_loss_coef",
    # labels of a classification head
    "id2label", "label2id", "num_labels", "problem_type",
    # token ids
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "pad_token_id", "sep_token_id", "unk_token_id",
    # generation defaults that transformers v4 kept in this file; sampling uses the run's own configuration
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_scores", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
}
# fmt: on

REQUIRED: Any = object()
OF_CLASS: Any = object()  # the default of transformers' class
_LARGEST = 1e15  # the largest accepted number in a config.json


@dataclass
class ConfigReader:
    """Reads the fields of one JSON object and collects all problems.

    Attributes:
        fields: The object as it is in the file.
        defaults: The defaults of transformers' class for this object, with nested objects. See
            class_defaults.py.
        problems: One line for each field that megarl cannot honor.
        seen: The fields that were read. The remaining ones are unknown.
        invalid: The numbers that could not be read. Their problems are listed, and 1 takes their place.
    """

    fields: dict[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    invalid: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        self.seen.add(name)
        return self.fields.get(name)

    def number(
        self,
        name: str,
        kind: type[int] | type[float],
        default: Any = REQUIRED,
        at_most: float = _LARGEST,
        null: Any = REQUIRED,
    ) -> Any:
        """Read a positive int or float up to `at_most`.

        Args:
            default: The number if the field is missing or null. `OF_CLASS`: a missing field has the default
                of transformers' class, and null is refused.
            at_most: The largest number.
            null: With `OF_CLASS`, the number that null means, also if it is the default of the class.
        """
        value = self.take(name)
        if default is OF_CLASS:
            value = self.value(name)
            default = null
        if value is None and default is not REQUIRED:
            return default

        # The range check also rejects NaN.
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if value is None:
            problem = f"field {name!r} is missing"
        elif not is_number or not 0 < value < math.inf:
            noun = "integer" if kind is int else "number"
            problem = f"field {name!r} is {value!r}, but must be a positive {noun}"
        elif value > at_most:
            problem = f"field {name!r} is {value!r}, which no model has; it must be at most {at_most:g}"
        else:
            return kind(value)

        # A field that is read twice has one problem.
        self.conflict(problem, name)
        self.invalid.add(name)
        return kind(1)  # arbitrary: the problem is raised before an Architecture is created

    def value(self, name: str) -> Any:
        """Return a field as it is, or the default of transformers' class if it is missing."""
        default = self.defaults.get(name)  # asked for in any case, so that the generated defaults list it
        value = self.take(name)
        return value if name in self.fields else default

    def count(self, name: str, default: Any) -> int:
        """Read a non-negative int. The arguments are those of `number`."""
        given = self.value(name) if default is OF_CLASS else self.fields.get(name)
        if given == 0 and not isinstance(given, bool):
            self.seen.add(name)
            return 0
        return self.number(name, int, default)

    def flag(self, name: str) -> bool:
        """Read a boolean.

        A missing field has the default of transformers' class, or is false if the class has none. Null is
        false, as it is in Python.
        """
        value = self.value(name)
        if not isinstance(value, bool | None):
            self.problems.append(f"field {name!r} is {value!r}, but must be true or false")
        return bool(value)

    def object(self, name: str) -> dict[str, Any]:
        """Read a nested object; empty if the field is something else."""
        value = self.take(name)
        if isinstance(value, dict):
            return value
        self.problems.append(f"field {name!r} is {value!r}, but must be an object")
        return {}

    def nested(self, name: str, fields: dict[str, Any] | None = None) -> ConfigReader:
        """Return a reader of a nested object, with the defaults of its class.

        Args:
            fields: The fields of the object; None: those of the file.
        """
        inner = self.object(name) if fields is None else fields
        return ConfigReader(inner, defaults=self.defaults.get(name, {}))

    def refuse(self, name: str, reason: str) -> None:
        """Add the problem that the value of a field is not supported."""
        self.problems.append(f"field {name!r} is {self.value(name)!r}; {reason}")

    def require(self, name: str, value: Any, reason: str) -> None:
        """Refuse a field that is neither missing, null nor `value`."""
        if self.take(name) not in (None, value):
            self.refuse(name, reason)

    def conflict(self, problem: str, *names: str) -> None:
        """Add a problem of fields that do not fit together.

        The problem is left out if one of the fields is an invalid number, which has a problem of its own.
        """
        if self.invalid.isdisjoint(names):
            self.problems.append(problem)

    def check_neutral(self) -> None:
        """Refuse each field that would change the forward pass, unless the family has read it."""
        for name, accepted in _NEUTRAL.items():
            if name in self.fields and name not in self.seen and self.take(name) not in accepted:
                self.refuse(name, f"only {json.dumps(accepted[0])} is supported")

    def check_nested(self, name: str, nested: ConfigReader) -> None:
        """Refuse what is left of a nested object, and add its problems with its name."""
        nested.check_neutral()
        nested.check_left_over()
        self.problems += [f"{name}: {problem}" for problem in nested.problems]

    def check_left_over(self) -> None:
        """Refuse each field that was not read and is not known to be harmless."""
        for name in sorted(set(self.fields) - self.seen - _HARMLESS):
            self.refuse(name, "megarl does not know whether it changes the model")


BLOCK = 128
QUANTIZATION = "quantization_config"
# The field of folders in block-scaled FP8, for SGLang and transformers.
BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}

# The fields that change how stored values are read, with the supported values; None: the field is missing.
_FIXED_QUANTIZATION: Mapping[str, tuple[object, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "activation_scheme": ("dynamic", None),
    # the values of scales, whose dtype the files contain
    "scale_fmt": ("ue8m0", "float", None),
    "dequantize": (False, None),
}
# Lists of layers: the files show which matrices are quantized.
_LISTS_OF_MODULES = {"modules_to_not_convert", "ignored_layers", "modules_to_convert"}
_HINT = "convert the folder to bfloat16 or to FP8 in blocks of 128 x 128 first"


def check_quantization(reader: ConfigReader) -> None:
    """Refuse all formats except block-scaled FP8, unless the family has read the field."""
    if QUANTIZATION in reader.seen:
        return
    quantization = reader.take(QUANTIZATION)
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        reader.refuse(QUANTIZATION, "must be an object")
        return
    reader.problems.extend(
        f"field {QUANTIZATION!r}: {problem}" for problem in _quantization_problems(quantization)
    )


def _quantization_problems(quantization: Mapping[str, object]) -> Iterator[str]:
    method = quantization.get("quant_method")
    if method != BLOCK_FP8["quant_method"]:
        yield f"'quant_method' is {method!r}, but only 'fp8' is supported; {_HINT}"
        return

    block = quantization.get("weight_block_size")
    if block != BLOCK_FP8["weight_block_size"]:
        yield f"'weight_block_size' is {block!r}, but only {[BLOCK, BLOCK]} is supported; {_HINT}"

    for name, supported in _FIXED_QUANTIZATION.items():
        if quantization.get(name) not in supported:
            yield f"{name!r} is {quantization[name]!r}, but only {supported[0]!r} is supported; {_HINT}"

    known = {"quant_method", "weight_block_size", *_FIXED_QUANTIZATION, *_LISTS_OF_MODULES}
    for name in sorted(set(quantization) - known):
        yield f"{name!r} is {quantization[name]!r}, and megarl does not know whether it changes the weights"


_WINDOWED = "sliding_attention"
FULL = "full_attention"


def read_layer_types(
    reader: ConfigReader, num_hidden_layers: int, other: str, *, full_every: int | None
) -> list[str]:
    """Read the type of each layer: full attention, or the other type of a family. Empty if it is invalid.

    Args:
        full_every: Without `layer_types`, each layer whose number, counted from 1, is a multiple of this has
            full attention; None: no layer has.
    """
    kinds = reader.take("layer_types")
    if kinds is None:
        kinds = [
            FULL if full_every is not None and number % full_every == 0 else other
            for number in range(1, num_hidden_layers + 1)
        ]

    is_list = isinstance(kinds, list) and len(kinds) == num_hidden_layers
    if not is_list or not all(kind in (other, FULL) for kind in kinds):
        needed = f"must name {other} or {FULL} for each of {counted(num_hidden_layers, 'layer')}"
        reader.conflict(f"field 'layer_types' is {kinds!r}, but {needed}", "num_hidden_layers")
        return []
    return kinds


def read_windows(reader: ConfigReader, num_hidden_layers: int, *, full_every: int | None) -> tuple[int, ...]:
    """Read the window of each layer: the number of tokens that it sees, or 0 for all.

    Args:
        full_every: As in `read_layer_types`.
    """
    window = reader.number("sliding_window", int, OF_CLASS)
    kinds = read_layer_types(reader, num_hidden_layers, _WINDOWED, full_every=full_every)
    return tuple(window if kind == _WINDOWED else 0 for kind in kinds)


def check_sliding_window(
    reader: ConfigReader,
    num_hidden_layers: int,
    max_position_embeddings: int,
    *,
    has_experts: bool,
) -> None:
    """Refuse a sliding window that a layer would use, unless every row fits into it.

    Qwen2.5 publishes `sliding_window` with `use_sliding_window: false`. transformers applies the window to
    layers from `max_window_layers` on (in Qwen2-MoE, to the layers before it), unless `layer_types` lists the
    type of each layer. A window without its switch counts as used; a window of zero tokens does not.
    """
    layer_types = reader.take("layer_types")
    window = reader.value("sliding_window")
    switch = reader.value("use_sliding_window")
    first_windowed = reader.value("max_window_layers")

    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_hidden_layers:
            needed = f"must name one type for each of {counted(num_hidden_layers, 'layer')}"
            reader.conflict(f"field 'layer_types' is {layer_types!r}, but {needed}", "num_hidden_layers")
        elif other := sorted({str(kind) for kind in layer_types} - {"full_attention"}):
            named = ", ".join(other)
            reader.problems.append(f"field 'layer_types' has {named}; only full_attention is supported")
    elif isinstance(window, int) and window >= max_position_embeddings:
        return
    elif switch or (switch is None and window):
        # A dense model is unaffected if its windowed layers would begin after the last layer.
        if isinstance(first_windowed, int) and first_windowed >= num_hidden_layers and not has_experts:
            return
        reader.conflict(
            f"field 'use_sliding_window' is {json.dumps(switch)} with 'sliding_window' {json.dumps(window)} "
            f"and 'max_window_layers' {json.dumps(first_windowed)}: not all of "
            f"{counted(num_hidden_layers, 'layer')} would see every token; only full attention is supported",
            "num_hidden_layers",
            "max_position_embeddings",
        )
