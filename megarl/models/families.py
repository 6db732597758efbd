"""The supported model families. Reads the architecture of a Hugging Face folder, and sizes of draft models.

A draft model of speculative decoding may be of any class that SGLang has, also one that megarl does not
train.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.machine.errors import ConfigError
from megarl.machine.files import read_json_object
from megarl.machine.folder_kinds import instead_of_model
from megarl.models.architecture import Architecture
from megarl.models.config_reader import QUANTIZATION, ConfigReader, check_quantization
from megarl.models.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
)
from megarl.models.exaone import EXAONE4
from megarl.models.family import Family, SGLangStages
from megarl.models.gemma import GEMMA3_TEXT
from megarl.models.gpt_oss import GPT_OSS
from megarl.models.hunyuan import HY_V3
from megarl.models.llama import LLAMA, MINISTRAL, MISTRAL, MIXTRAL, SMOLLM3
from megarl.models.minimax import MINIMAX_M2
from megarl.models.nemotron_h import NEMOTRON_H
from megarl.models.olmo import OLMO2, OLMO3
from megarl.models.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from megarl.models.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from megarl.models.seed_oss import SEED_OSS
from megarl.models.unsupported import UNSUPPORTED

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "glm4_moe": GLM4_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "gemma3_text": GEMMA3_TEXT,
    "ministral": MINISTRAL,
    "smollm3": SMOLLM3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "minimax_m2": MINIMAX_M2,
    "deepseek_v2": DEEPSEEK_V2,
    "hy_v3": HY_V3,
    "seed_oss": SEED_OSS,
    "exaone4": EXAONE4,
    "nemotron_h": NEMOTRON_H,
}

# Names under which models of a family are published with their own, equivalent code.
_ALIASES = {"kimi_k2": "deepseek_v3"}

# Suffixes of the class names of critics and reward models. A critic may start from any class.
CRITIC_CLASS = "ForTokenClassification"
REWARD_CLASS = "ForSequenceClassification"


def family_of(model_type: object) -> Family | None:
    """Return the family of a `model_type`, also if it is an alias. None if it is not supported."""
    return FAMILIES.get(_ALIASES.get(model_type, model_type)) if isinstance(model_type, str) else None


def read_architecture(path: str, trust_remote_code: bool = False) -> Architecture:
    """Read the architecture of a Hugging Face folder, as written by transformers v4 or v5.

    Args:
        trust_remote_code: Accept a folder with its own model code (`auto_map`). The user asserts that this
            code computes the same as the family named by `model_type`. megarl never runs it.

    Raises:
        ConfigError: The folder is not supported. Lists the file and every field that megarl cannot honor,
            with its value.
    """
    file = Path(path) / "config.json"
    fields = read_fields(path)
    model_type = fields.get("model_type")
    family = family_of(model_type)

    if family is None:
        raise ConfigError(
            str(file), [f"field 'model_type' is {model_type!r}; {_why_unsupported(model_type)}"]
        )

    reader = family.reader(fields)
    reader.take("model_type")

    # Run all checks before raising, so that the error lists every problem.
    architecture = family.read(reader)
    _check_class(reader, family, trust_remote_code)
    check_quantization(reader)
    reader.check_neutral()
    reader.check_left_over()
    if reader.problems:
        raise ConfigError(str(file), reader.problems)

    return architecture


def _why_unsupported(model_type: object) -> str:
    supported = f"the supported families are {', '.join((*FAMILIES, *_ALIASES))}"
    missing = UNSUPPORTED.get(model_type) if isinstance(model_type, str) else None
    return f"megarl does not support {missing}; {supported}" if missing else supported


def read_fields(path: str | Path) -> dict[str, Any]:
    """Read the `config.json` of a Hugging Face folder.

    Raises:
        ConfigError: There is no such file, or it is not a JSON object.
    """
    file = Path(path) / "config.json"
    if not os.path.isfile(file):
        reason = f"there is no folder {str(file.parent)!r}"
        if os.path.isdir(file.parent):
            reason = "the folder has no such file"
        needed = (
            "a model must be a local Hugging Face folder (config.json, safetensors, tokenizer); to plan a "
            "run with a model of another machine, put its config.json into "
            f"models/{file.parent.name}/ next to the configuration"
        )
        meant = instead_of_model(file.parent)
        raise ConfigError(str(file), [f"{reason}; {meant or needed}"])
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise ConfigError(str(file), [str(error)]) from error


def _check_class(reader: ConfigReader, family: Family, trust_remote_code: bool) -> None:
    """Refuse custom code in the folder, and classes of other families."""
    auto_map = reader.take("auto_map")
    if auto_map is not None and not trust_remote_code:
        reader.problems.append(
            f"field 'auto_map' is {auto_map!r}: the folder contains its own model code, which may differ "
            "from transformers' own class; set model.trust_remote_code=true if you know that it computes "
            "the same"
        )

    is_own_code = auto_map is not None and trust_remote_code

    # Any head is allowed, because a critic may start from any class of the family.
    allowed = {family.class_prefix + head for head in (family.lm_class, REWARD_CLASS, CRITIC_CLASS, "Model")}

    names = reader.fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        reader.problems.append(f"field 'architectures' is {names!r}, but must be a list of class names")
        return
    for name in names:
        if name not in allowed and not is_own_code:
            supported = ", ".join(sorted(allowed))
            reader.problems.append(f"field 'architectures' names {name!r}; supported: {supported}")


# A pipeline stage of an engine: the global numbers of its layers; whether it has the embedding; whether it
# has the last norm; and whether it has an output layer, which only the last stage uses.
EngineStage = tuple[range, bool, bool, bool]


def engine_stages(architecture: Architecture, num_stages: int) -> tuple[EngineStage, ...]:
    """Return the stages, in the order of the forward pass.

    If the layers do not divide evenly, the last stages have one more each
    (`sglang.srt.distributed.utils.get_pp_indices`).

    Args:
        architecture: A model whose family has `sglang_stages`, or of any family for one stage.
        num_stages: At most the number of layers.
    """
    each, larger = divmod(architecture.num_hidden_layers, num_stages)
    on_every = FAMILIES[architecture.model_type].sglang_stages is SGLangStages.head_on_every
    stages = []
    first = 0
    for number in range(num_stages):
        stop = first + each + (number >= num_stages - larger)
        is_last = number == num_stages - 1
        stages.append((range(first, stop), number == 0, is_last, is_last or on_every))
        first = stop
    return tuple(stages)


@dataclass(frozen=True, kw_only=True)
class DraftModel:
    """The sizes of a draft model.

    Attributes:
        draft_vocab_size: The number of tokens that it may propose.
        target_hidden_size: The width of the policy's hidden states, if the draft reads them.
        latent_size: The numbers that the cache keeps of a token in a layer with latent attention; 0 without.
        is_quantized: Whether its folder has quantized weights.
        weight_bytes: The bytes of its weight files; 0 if they are not on this machine.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    latent_size: int
    is_quantized: bool
    weight_bytes: int

    def cached_numbers(self, tensor_parallel_size: int) -> int:
        """Return the numbers that the cache keeps of a token in all layers, on one rank of an engine."""
        if self.latent_size:
            return self.num_hidden_layers * self.latent_size
        # With more ranks than key-value heads, each rank still holds one whole head.
        heads = max(1, self.num_key_value_heads // tensor_parallel_size)
        return self.num_hidden_layers * 2 * heads * self.head_dim


def read_draft(folder: str) -> DraftModel:
    """Read the sizes of a draft model from its folder.

    Raises:
        ConfigError: config.json cannot be read, or lacks a size or has one that is not a positive integer.
    """
    file = Path(folder) / "config.json"
    whole = read_fields(folder)

    # Drafts of multimodal models have their sizes in this object.
    text = whole.get("text_config")
    if not isinstance(text, dict | None):
        raise ConfigError(str(file), [f"field 'text_config' is {text!r}, but must be an object"])

    reader = ConfigReader(text or whole)
    hidden = reader.number("hidden_size", int)
    vocab = reader.number("vocab_size", int)
    heads = reader.number("num_attention_heads", int)
    latent = reader.count("kv_lora_rank", 0)
    # SGLang reads the first kind of files that the folder has.
    weights = (list(Path(folder).glob(pattern)) for pattern in ("*.safetensors", "*.bin"))
    draft = DraftModel(
        vocab_size=vocab,
        draft_vocab_size=reader.number("draft_vocab_size", int, vocab),
        hidden_size=hidden,
        target_hidden_size=reader.number("target_hidden_size", int, hidden),
        num_hidden_layers=reader.number("num_hidden_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=reader.number("num_key_value_heads", int, heads),
        head_dim=reader.number("head_dim", int, hidden // heads),
        latent_size=latent and latent + reader.count("qk_rope_head_dim", 0),
        is_quantized=whole.get(QUANTIZATION) is not None,
        weight_bytes=sum(file.stat().st_size for file in next(filter(None, weights), ())),
    )

    if reader.problems:
        raise ConfigError(str(file), reader.problems)
    return draft


@lru_cache(maxsize=8)
def read_draft_if_there(folder: str) -> DraftModel | None:
    """Return the draft model; None if its folder cannot be read, which the rules of a run report."""
    try:
        return read_draft(folder)
    except ConfigError:
        return None
