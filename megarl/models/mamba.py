"""Code shared by families with Mamba-2 mixers: the rows of these layers, and their kind."""

from __future__ import annotations

from megarl.models.architecture import Architecture
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

_MEGATRON = MEGATRON_LAYER + MIXER
# The sizes of all inputs, writing vectors and reading vectors.
_CHANNELS = ("Z", "J X", "J X")


def has_mamba(architecture: Architecture, layer: int | None) -> bool:
    """Return whether a layer has a Mamba-2 mixer instead of attention."""
    return layer in architecture.mamba_layers


# Context-parallel ranks exchange their tokens for groups, whose heads are normalized together.
MAMBA = PartKind(
    name="Mamba-2 mixers",
    prefix=MIXER,
    applies=has_mamba,
    recurrence="2 Z X",  # the state is changed, and read
    splits_heads=True,
    state="Z X",
    shared_out=(("n_groups", "J"),),
    has_fp8_engine=False,
    cpu_engine_lacks="Mamba-2 mixers, whose kernels SGLang has for GPUs only",
    marks_layers=True,
    kernels={"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"},
    stored_norm="self_attention.in_proj.layer_norm_weight",
)


def mamba_rows(name: str) -> tuple[MappingRow, ...]:
    """Return the table rows of layers with a Mamba-2 mixer.

    Args:
        name: The family's name for the mixer of a layer.
    """
    hf = f"{HF_LAYER}{name}."
    return (
        _row("in_proj.weight", Cut.stacked, *_sections(hf + "in_proj.weight", "P H", ("Z", *_CHANNELS, "T"))),
        _row("conv1d.weight", Cut.stacked, *_sections(hf + "conv1d.weight", "P 1 W", _CHANNELS)),
        _row("conv1d.bias", Cut.stacked, *_sections(hf + "conv1d.bias", "P", _CHANNELS)),
        _row("dt_bias", Cut.column, (hf + "dt_bias", "T")),
        _row("A_log", Cut.column, (hf + "A_log", "T")),
        _row("D", Cut.column, (hf + "D", "T")),
        _row("norm.weight", Cut.column, (hf + "norm.weight", "Z")),
        _row("out_proj.weight", Cut.row, (hf + "out_proj.weight", "H Z")),
    )


def _sections(name: str, dims: str, sections: tuple[str, ...]) -> tuple[TensorPart, ...]:
    return tuple(
        TensorPart(name=name, dims=dims, sections=sections, section=number) for number in range(len(sections))
    )


def _row(name: str, cut: Cut, *tensors: tuple[str, str] | TensorPart) -> MappingRow:
    return MappingRow(
        megatron=_MEGATRON + name,
        place=StagePlacement.layer,
        cut=cut,
        tensors=tensors,
        applies=has_mamba,
    )
