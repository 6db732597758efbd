"""Read the fields of a Hugging Face `config.json` one by one, so that no field is silently ignored.

A field that would change the forward pass and that no family handles is rejected by name. So is a field that
megarl does not know: a silently wrong model costs more than a line added to a list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
        default = self.defaults.get(name)
        value = self.take(name)
        return value if name in self.fields else default

    def count(self, name: str, default: Any) -> int:
        """Read a non-negative int. The arguments are those of `number`."""
        given = self.value(name) if default is OF_CLASS else self.fields.get(name)
        if given == 0 and not isinstance(given, bool):
            self.seen.add(name)
            return 0
        number: int = self.number(name, int, default)
        return number

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
