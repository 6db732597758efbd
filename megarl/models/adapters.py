"""Low-rank adapters as rows of the tensor table.

Every Hugging Face projection has its own pair of matrices, as in PEFT's format, also where Megatron fuses
several projections: A has the projection's name with `lora_A`, B the one with `lora_B`. The rows are derived
from the family's rows of linear layers. An adapter is sharded like its projection: if outputs are sharded, A
is replicated and B has the rank's outputs; if inputs are sharded, A has the rank's inputs and B is
replicated. The down projections of latent attention are replicated, and so are both matrices.

The embedding and the output layer can train in full next to the adapters, as PEFT's `modules_to_save`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import sqrt

from megarl.models.architecture import Architecture, LoRA
from megarl.models.mapping import Cut, MappingRow

# The linear layers that take adapters, by Megatron's names.
_LINEAR = re.compile(
    r"(.+\.linear_(?:qkv|proj|fc1|fc2|q_proj|q_down_proj|q_up_proj|kv_down_proj|kv_up_proj))\.weight"
)
_WITH_SHARDED_OUTPUTS = (Cut.column, Cut.qkv, Cut.gated)
_SUFFIX = ".weight"
ADAPTER = ".lora."  # in Megatron's names, between the linear layer's and the projection's

# The projections whose adapters an engine can apply itself.
ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SERVED_PROJECTIONS = ATTENTION_PROJECTIONS + FEED_FORWARD_PROJECTIONS


# The modules that can train in full next to adapters, by PEFT's names.
EMBEDDING_MODULE = "embed_tokens"
OUTPUT_MODULE = "lm_head"
SAVED_MODULES = (EMBEDDING_MODULE, OUTPUT_MODULE)

_RATE_FACTOR = 10.0
_WIDTH_OF_FACTOR = 2048


def adapter_rate_factor(hidden_size: int) -> float:
    """Return how many times the learning rate of full training is usual for adapters.

    "LoRA Without Regret" (Schulman et al. 2025) measures 10 for models of 2,048 and more hidden units. In
    narrower ones the factor falls with the square root of the width: the largest stable rate of adapters with
    a random A is of the order width^-1/2 (Hayou et al. 2024, arXiv:2406.08447), and that of full training of
    the order width^-1 (Yang et al. 2022, arXiv:2203.03466).
    """
    return _RATE_FACTOR * min(1.0, sqrt(hidden_size / _WIDTH_OF_FACTOR))


def adapter_names(projection: str) -> tuple[str, str]:
    """Return the names of A and B for the name of a projection's weight, such as `....q_proj.weight`."""
    stem = projection.removesuffix(_SUFFIX)
    return f"{stem}.lora_A{_SUFFIX}", f"{stem}.lora_B{_SUFFIX}"


def is_adapter(name: str) -> bool:
    """Return whether a Hugging Face name is that of a matrix of an adapter."""
    return name.endswith((f".lora_A{_SUFFIX}", f".lora_B{_SUFFIX}"))


def parameter_names(linear: str, projection: str) -> tuple[str, str]:
    """Return the Megatron names of A and B of the adapter of a projection.

    Args:
        linear: The Megatron name of the linear layer's weight.
        projection: The Hugging Face name of the projection's weight.
    """
    prefix = f"{linear.removesuffix(_SUFFIX)}{ADAPTER}{module_of(projection)}"
    return f"{prefix}.a", f"{prefix}.b"


@lru_cache(maxsize=64)
def with_adapters(
    rows: tuple[MappingRow, ...], lora: LoRA, trained: MappingRow | None = None
) -> tuple[MappingRow, ...]:
    """Return the rows of a model with adapters, each after the row of its linear layer.

    Args:
        trained: The row that always trains although it is not an adapter. Other rows are frozen, except
            those of modules that the adapters save.
    """
    adapted: list[MappingRow] = []
    for row in rows:
        adapted.append(row if row == trained or _is_saved(row, lora) else replace(row, trains=False))
        for name, dims in _targets_of(row, lora):
            adapted += _pair(row, name, dims)
    return tuple(adapted)


def _targets_of(row: MappingRow, lora: LoRA) -> Iterator[tuple[str, str]]:
    """Yield the name and the dimensions of each projection of a row that has an adapter."""
    if _LINEAR.fullmatch(row.megatron) is None:
        return
    for entry in row.tensors:
        if isinstance(entry, tuple) and _is_target(entry[0], lora):
            yield entry


def _is_target(name: str, lora: LoRA) -> bool:
    stem = f".{name.removesuffix(_SUFFIX)}"
    return not lora.targets or any(stem.endswith(f".{target}") for target in lora.targets)


def _is_saved(row: MappingRow, lora: LoRA) -> bool:
    """Return whether a row is the weight of a module that trains in full."""
    (entry, *others) = row.tensors
    return not others and isinstance(entry, tuple) and module_of(entry[0]) in lora.modules_to_save


def module_of(name: str) -> str:
    """Return the name of the module that a Hugging Face tensor belongs to, such as `lm_head`."""
    return name.removesuffix(_SUFFIX).rpartition(".")[2]


def _pair(row: MappingRow, name: str, dims: str) -> tuple[MappingRow, MappingRow]:
    outputs, inputs = dims.split()
    megatron_a, megatron_b = parameter_names(row.megatron, name)
    stored_a, stored_b = adapter_names(name)

    # The product B A is split as its weight is: by outputs in B, or by inputs in A. All ranks have the other
    # factor.
    has_sharded_outputs = row.cut in _WITH_SHARDED_OUTPUTS
    a = MappingRow(
        megatron=megatron_a,
        place=row.place,
        cut=Cut.replicated if has_sharded_outputs else row.cut,
        tensors=((stored_a, f"r {inputs}"),),
        applies=row.applies,
    )
    b = MappingRow(
        megatron=megatron_b,
        place=row.place,
        cut=Cut.column if has_sharded_outputs else Cut.replicated,
        tensors=((stored_b, f"{outputs} r"),),
        applies=row.applies,
    )

    return a, b


def available_targets(rows: Sequence[MappingRow]) -> tuple[str, ...]:
    """Return the names of the projections that can have an adapter, without repetitions."""
    names = (name for row in rows for name, _ in _targets_of(row, LoRA(rank=1, alpha=1)))
    return tuple(dict.fromkeys(map(module_of, names)))


def adapter_problems(
    architecture: Architecture, rows: Sequence[MappingRow], targets: Sequence[str]
) -> Iterator[str]:
    """Yield why a model cannot have adapters at these targets.

    Args:
        rows: The rows of the model without adapters.
        targets: As in `LoRA`.
    """
    name = architecture.model_type
    if architecture.linear_bias:
        yield (
            f"{name} has experts with biases, fused in one tensor per layer, whose projections cannot have "
            "adapters yet; train all weights (lora.rank=null)"
        )
        return

    # Projections that are parts of a fused tensor have no name of their own in PEFT's format.
    parts = [
        row.megatron
        for row in rows
        if _LINEAR.fullmatch(row.megatron) and any(not isinstance(entry, tuple) for entry in row.tensors)
    ]
    if parts:
        yield (
            f"{name} stores {parts[0]} as a part of a tensor, which cannot have an adapter yet; train all "
            "weights (lora.rank=null)"
        )
        return

    for target in targets:
        lora = LoRA(rank=1, alpha=1, targets=(target,))
        if not any(True for row in rows for _ in _targets_of(row, lora)):
            known = ", ".join(available_targets(rows))
            yield f"{target!r} is not a projection of {name} that can have an adapter; it has {known}"
