"""Code shared by families with multi-head latent attention: fields of `config.json`, rows of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.models.architecture import Architecture, LatentAttention
from megarl.models.config_reader import ConfigReader
from megarl.models.mapping import HF_LAYER, MEGATRON_LAYER, MIXER, Cut, MappingRow, PartKind, StagePlacement


def megatron_sizes(architecture: Architecture) -> dict[str, Any]:
    """Return Megatron's arguments for the sizes of latent attention."""
    latent = architecture.sizes_of(LatentAttention)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
    }


def _has_latent_queries(architecture: Architecture, layer: int | None) -> bool:
    return architecture.sizes_of(LatentAttention).q_lora_rank is not None


def _blocks(sizes: Mapping[str, int], ranks: int, expert_ranks: float) -> Iterator[tuple[str, str, float]]:
    # SGLang merges q_a_proj with kv_a_proj_with_mqa, on every rank.
    if sizes["A"]:
        yield "q_a_proj", "rows", sizes["A"]

    if ranks > 1:
        yield "q_b_proj" if sizes["A"] else "q_proj", "rows", sizes["Q"] / ranks
        yield "kv_b_proj", "rows", sizes["U"] / ranks
        yield "o_proj", "columns", sizes["O"] / ranks


def latent_kind(name: str, applies: Callable[[Architecture, int | None], bool], **own: Any) -> PartKind:
    """Return a kind of layers with latent attention, with what only this kind has.

    Engines keep the latent vector and the shared key of each token, on every rank.
    """
    return PartKind(
        name=name,
        prefix=MIXER,
        applies=applies,
        of_pair=("Q", "O"),
        gathered="I",
        cached="B",
        cached_at_least="B",
        has_groups=True,
        shared_out=(("num_attention_heads", "N"),),
        replicable=(("num_key_value_heads", "G"),),
        fp8_blocks=_blocks,
        serves_adapters=False,
        megatron_arguments=megatron_sizes,
        stored_norm="self_attention.linear_qkv.layer_norm_weight",
        **own,
    )


LATENT_ATTENTION = latent_kind(
    "latent attention", lambda architecture, layer: architecture.latent is not None
)

# The down projections are replicated: their outputs are small, and every head needs all of them.
LATENT_ROWS = (
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_q_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.column,
        tensors=((HF_LAYER + "self_attn.q_proj.weight", "Q H"),),
        applies=lambda architecture, layer: not _has_latent_queries(architecture, layer),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_q_down_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.q_a_proj.weight", "A H"),),
        applies=_has_latent_queries,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.q_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.q_a_layernorm.weight", "A"),),
        applies=_has_latent_queries,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_q_up_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.column,
        tensors=((HF_LAYER + "self_attn.q_b_proj.weight", "Q A"),),
        applies=_has_latent_queries,
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_kv_down_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.kv_a_proj_with_mqa.weight", "B H"),),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.kv_layernorm.weight",
        place=StagePlacement.layer,
        cut=Cut.replicated,
        tensors=((HF_LAYER + "self_attn.kv_a_layernorm.weight", "C"),),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_kv_up_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.column,
        tensors=((HF_LAYER + "self_attn.kv_b_proj.weight", "U C"),),
    ),
    MappingRow(
        megatron=MEGATRON_LAYER + "self_attention.linear_proj.weight",
        place=StagePlacement.layer,
        cut=Cut.row,
        tensors=((HF_LAYER + "self_attn.o_proj.weight", "H O"),),
    ),
)


def read_latent(reader: ConfigReader) -> LatentAttention:
    """Read the sizes of latent attention."""
    # Moonlight has null; a folder without the field would mean transformers' default, which no model has.
    is_direct = "q_lora_rank" in reader.fields and reader.take("q_lora_rank") is None
    q_lora_rank = None if is_direct else reader.number("q_lora_rank", int)

    # Megatron has no other rotation.
    if not reader.flag("rope_interleave"):
        reader.refuse("rope_interleave", "only true is supported")

    latent = LatentAttention(
        q_lora_rank=q_lora_rank,
        kv_lora_rank=reader.number("kv_lora_rank", int),
        qk_nope_head_dim=reader.number("qk_nope_head_dim", int),
        qk_rope_head_dim=reader.number("qk_rope_head_dim", int),
        v_head_dim=reader.number("v_head_dim", int),
        # transformers' norms of latent vectors, and those of the published code, ignore `rms_norm_eps`.
        norm_eps=1e-6,
    )
    _check_head_sizes(reader, latent)
    return latent


def _check_head_sizes(reader: ConfigReader, latent: LatentAttention) -> None:
    """Refuse sizes that contradict each other. transformers v5 also writes two that follow from others."""
    key_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    derived = {
        "qk_head_dim": (key_dim, ("qk_nope_head_dim", "qk_rope_head_dim")),
        "head_dim": (latent.qk_rope_head_dim, ("qk_rope_head_dim",)),
    }

    for name, (size, sources) in derived.items():
        given = reader.number(name, int, size)
        if given != size:
            source = " + ".join(map(repr, sources))
            reader.conflict(
                f"field {name!r} is {given}, but must be {source}, which is {size}", name, *sources
            )

    if latent.qk_rope_head_dim % 2:
        reader.conflict(
            f"'qk_rope_head_dim' is {latent.qk_rope_head_dim}; rotary embeddings rotate pairs, so it must be "
            "even",
            "qk_rope_head_dim",
        )

    # Attention pads values to the size of keys.
    if latent.v_head_dim > key_dim:
        reader.conflict(
            f"'v_head_dim' is {latent.v_head_dim}, but must be at most {key_dim}, the size of a head's key",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
        )
