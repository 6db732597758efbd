"""Code shared by families with gated delta net layers: fields of `config.json`, rows of these layers.

Their attention layers have an output gate, and all norms but that of a gated delta net are zero-centered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, DeltaNet
from megarl.models.config_reader import OF_CLASS, ConfigReader, read_layer_types
from megarl.models.mapping import (
    HF_LAYER,
    MEGATRON_LAYER,
    MIXER,
    Cut,
    MappingRow,
    PartKind,
    StagePlacement,
    TensorPart,
)
from megarl.models.trunk import ATTENTION_ROWS

_LINEAR = "linear_attention"
_HF = HF_LAYER + "linear_attn."
_MEGATRON = MEGATRON_LAYER + MIXER
MTP = {"mtp.": "the layers that predict further tokens"}
# The sizes of all queries, keys and values.
_QKV = ("J X", "J X", "Z")


def has_delta_net(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has a gated delta net instead of attention."""
    return layer in architecture.delta_layers


def _has_attention(architecture: Architecture, layer: int | None) -> bool:
    return not has_delta_net(architecture, layer)


DELTA_NET = PartKind(
    name="gated delta nets",
    prefix=MIXER,
    applies=has_delta_net,
    recurrence="3 Z X",  # the state is read by the key, changed, and read by the query
    summed="Y",
    splits_heads=True,
    state="Z X",
    has_groups=True,
    shared_out=(("linear_num_key_heads", "J"),),
    has_fp8_engine=False,
    cpu_engine_lacks="gated delta nets, whose states SGLang keeps on GPUs only",
    marks_layers=True,
    kernels={"fla": "flash-linear-attention"},
    stored_norm="self_attention.in_proj.layer_norm_weight",
)

# A head's rows of the query projection are its query, then its gate. Megatron has the queries of a query
# group before its gates.
_GATED_QUERY = TensorPart(name=HF_LAYER + "self_attn.q_proj.weight", dims="(G R 2 D) H", order="G (2 R D) H")
GATED_ATTENTION_ROWS = tuple(
    replace(
        row,
        applies=_has_attention,
        tensors=(_GATED_QUERY, *row.tensors[1:])
        if row.megatron == _MEGATRON + "linear_qkv.weight"
        else row.tensors,
    )
    for row in ATTENTION_ROWS
    if not row.megatron.endswith(".bias")
)

# Qwen3-Next packs the rows of each key head: its query, its key, and the values and gates of its value heads.
PACKED_INPUT = tuple(
    TensorPart(name=_HF + name, dims="(J P) H", sections=sections, section=number, order="(J P) H")
    for name, sections in (
        ("in_proj_qkvz.weight", ("X", "X", "L Y", "L Y")),
        ("in_proj_ba.weight", ("L", "L")),
    )
    for number in range(len(sections))
)

# Qwen3.5 has queries, keys and values in one projection, and separate ones for the others.
SEPARATE_INPUT = (
    *(
        TensorPart(name=_HF + "in_proj_qkv.weight", dims="P H", sections=_QKV, section=number)
        for number in range(3)
    ),
    (_HF + "in_proj_z.weight", "Z H"),
    (_HF + "in_proj_b.weight", "T H"),
    (_HF + "in_proj_a.weight", "T H"),
)


def delta_net_rows(projections: tuple[tuple[str, str] | TensorPart, ...]) -> tuple[MappingRow, ...]:
    """Return the table rows of gated delta net layers.

    Args:
        projections: The tensors of the input projection, in the order of Megatron: queries, keys, values,
            gates, and the two numbers of each value head from which the update strength and the decay follow.
    """
    convolution = tuple(
        TensorPart(name=_HF + "conv1d.weight", dims="P 1 W", sections=_QKV, section=number)
        for number in range(3)
    )
    return (
        _row("in_proj.weight", Cut.stacked, *projections),
        _row("conv1d.weight", Cut.stacked, *convolution),
        _row("dt_bias", Cut.column, (_HF + "dt_bias", "T")),
        _row("A_log", Cut.column, (_HF + "A_log", "T")),
        _row("out_norm.weight", Cut.replicated, (_HF + "norm.weight", "Y")),
        _row("out_proj.weight", Cut.row, (_HF + "out_proj.weight", "H Z")),
    )


def _row(name: str, cut: Cut, *tensors: tuple[str, str] | TensorPart) -> MappingRow:
    return MappingRow(
        megatron=_MEGATRON + name,
        place=StagePlacement.layer,
        cut=cut,
        tensors=tensors,
        applies=has_delta_net,
    )


def read_delta_net(reader: ConfigReader, num_hidden_layers: int) -> DeltaNet:
    """Read the sizes of gated delta net layers, and which layers they are."""
    num_key_heads = reader.number("linear_num_key_heads", int, OF_CLASS)
    num_value_heads = reader.number("linear_num_value_heads", int, OF_CLASS)
    if num_value_heads % num_key_heads:
        needed = f"a multiple of 'linear_num_key_heads' {num_key_heads}"
        reader.conflict(
            f"'linear_num_value_heads' is {num_value_heads}, but must be {needed}",
            "linear_num_value_heads",
            "linear_num_key_heads",
        )

    return DeltaNet(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=reader.number("linear_key_head_dim", int, OF_CLASS),
        value_head_dim=reader.number("linear_value_head_dim", int, OF_CLASS),
        conv_kernel_dim=reader.number("linear_conv_kernel_dim", int, OF_CLASS),
        layers=_read_layers(reader, num_hidden_layers),
    )


def _read_layers(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Return the layers without attention: those of `layer_types`, or all but every fourth one."""
    interval = reader.number("full_attention_interval", int, 4)
    kinds = read_layer_types(reader, num_hidden_layers, _LINEAR, full_every=interval)
    if len(set(kinds)) == 1 and num_hidden_layers > 1:
        reader.conflict(
            f"field 'layer_types' has {kinds[0]} only; models of this family have layers of both kinds",
            "full_attention_interval",
        )
    return tuple(number for number, kind in enumerate(kinds) if kind == _LINEAR)


def read_no_windows(reader: ConfigReader, num_hidden_layers: int) -> tuple[int, ...]:
    """Refuse sliding windows, which no layer of these families has. Folders may have the fields."""
    for name in ("sliding_window", "max_window_layers"):
        reader.take(name)
    if reader.flag("use_sliding_window"):
        reader.refuse("use_sliding_window", "attention layers of this family see every token")
    return ()


def sglang_derived(architecture: Architecture) -> Mapping[str, Any]:
    """Return the field by which SGLang knows the layers with attention. transformers v5 writes their list."""
    return {"full_attention_interval": _interval(architecture)}


def has_irregular_layers(architecture: Architecture) -> bool:
    """Return whether other layers than every n-th one have attention, which SGLang's classes assume."""
    interval = _interval(architecture)
    numbers = range(architecture.num_hidden_layers)
    return any(has_delta_net(architecture, layer) != bool((layer + 1) % interval) for layer in numbers)


def _interval(architecture: Architecture) -> int:
    """Return the number of the first layer with attention, counted from 1."""
    numbers = range(architecture.num_hidden_layers)
    with_attention = (layer + 1 for layer in numbers if _has_attention(architecture, layer))
    return next(with_attention, len(numbers) + 1)
