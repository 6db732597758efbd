"""Draft models of speculative decoding: what their folders say about their sizes.

A draft model may be of any class that SGLang has, also one that megarl does not train.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.machine.errors import ConfigError
from megarl.machine.files import read_json_object
from megarl.models.quantization import FIELD as QUANTIZATION

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_WEIGHTS = ("*.safetensors", "*.bin")  # SGLang reads the first kind that the folder has


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
        ConfigError: config.json cannot be read, or lacks a size.
    """
    file = Path(folder) / "config.json"
    try:
        whole = read_json_object(file)
    except ValueError as error:
        raise ConfigError(str(file), [str(error)]) from error
    except OSError as error:
        raise ConfigError(str(file), [f"cannot be read: {error.strerror}"]) from error

    config: Mapping[str, Any] = whole.get("text_config") or whole
    sizes = {name: config.get(name) for name in _SIZES}
    if wrong := [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]:
        raise ConfigError(
            str(file),
            [f"field {name!r} is {sizes[name]!r}, but must be a positive integer" for name in wrong],
        )

    heads = config["num_attention_heads"]
    latent = config.get("kv_lora_rank") or 0
    return DraftModel(
        vocab_size=config["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        hidden_size=config["hidden_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        latent_size=latent and latent + config.get("qk_rope_head_dim", 0),
        is_quantized=whole.get(QUANTIZATION) is not None,
        weight_bytes=_weight_bytes(Path(folder)),
    )


@lru_cache(maxsize=8)
def read_draft_if_there(folder: str) -> DraftModel | None:
    """Return the draft model; None if its folder cannot be read, which the rules of a run report."""
    try:
        return read_draft(folder)
    except ConfigError:
        return None


def _weight_bytes(folder: Path) -> int:
    for pattern in _WEIGHTS:
        if files := list(folder.glob(pattern)):
            return sum(file.stat().st_size for file in files)
    return 0
