"""Seed-OSS: Llama's layers with a bias of q, k and v."""

from __future__ import annotations

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.family import Family
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
    # Both are dropouts of pre-training. Rollout engines have none, so neither has training.
    reader.take("attention_dropout")
    reader.take("residual_dropout")

    # In transformers this field concerns q, k and v only, and the output projection has one of its own.
    qkv_bias = reader.fields.get("attention_bias", True)
    reader.flag("attention_bias")
    if reader.flag("attention_out_bias"):
        reader.refuse("attention_out_bias", "a bias of the output projection is not supported")

    return read_trunk(reader, qkv_bias=bool(qkv_bias))


SEED_OSS = Family(
    model_type="seed_oss",
    class_prefix="SeedOss",
    read=_read,
    rows=TRUNK_ROWS,
    example_fields=EXAMPLE | {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
    sglang_class=False,
    models="Seed-OSS-36B",
)
