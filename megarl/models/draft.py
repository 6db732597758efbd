"""Draft models of speculative decoding: what their folders say about their sizes.

A draft model may be of any class that SGLang has, also one that megarl does not train.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megarl.machine.errors import ConfigError
from megarl.models.config_reader import QUANTIZATION, ConfigReader
from megarl.models.families import read_fields


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
