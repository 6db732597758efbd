"""Identify the base of a model with adapters, whose checkpoints hold what trains only."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megarl.engine import platform
from megarl.engine.engine import MegatronEngine
from megarl.engine.offload import StatePart
from megarl.machine.errors import CheckpointError
from megarl.models.tensor_table import weights_of
from megarl.weights.checksum import MODULUS, shard_checksums
from megarl.weights.shards import Shards

# in the state that all ranks share
BASE_CHECKSUM = "base_checksum"
ORIGINALS_CHECKSUM = "originals_checksum"


def base_checksum(engine: MegatronEngine) -> Mapping[str, int]:
    """Return what a checkpoint stores of the base: checksums that do not depend on the layout.

    They are those of all frozen weights and, if the model keeps them, of the original weights of modules that
    train in full next to adapters. Without adapters, there are none.

    They are computed once, with all ranks, and the parameters are restored for them if they are offloaded.
    """
    if engine.spec.architecture.lora is None:
        return {}

    if engine.known_base_checksum is None:
        with engine.in_memory(StatePart.parameters), engine.adapters.off():
            parts = [_signed(part) for part in _own_parts(engine)]

        # Sums of int64 overflow, which is the modulus.
        totals = torch.tensor(parts, dtype=torch.int64, device=platform.current().device)
        dist.all_reduce(totals)
        frozen, originals = (int(total) % MODULUS for total in totals)
        # A pipeline stage may hold none of them.
        of_originals = {ORIGINALS_CHECKSUM: originals} if engine.spec.runs_base else {}
        engine.known_base_checksum = {BASE_CHECKSUM: frozen, **of_originals}

    return engine.known_base_checksum


def _own_parts(engine: MegatronEngine) -> tuple[int, int]:
    """Return what this rank contributes to the frozen weights, and to those that train in full.

    Elements that several ranks hold count once.
    """
    architecture = engine.spec.architecture
    head = engine.spec.head
    groups = engine.groups
    shards = Shards(
        parameters=engine.parameters(), architecture=architecture.base, layout=engine.layout, head=head
    )
    sums = shard_checksums(
        shards,
        shards.dtype,
        dense=groups.data_rank == groups.context_rank == 0,
        experts=dist.get_rank(groups.expert_data) == 0,
    )
    weights = (weight for weight in weights_of(architecture, head) if not weight.trains)
    frozen = {tensor.name for weight in weights for tensor in weight.tensors}

    # An odd factor per name, so that exchanged tensors change the sum.
    parts = {name: value * (2 * zlib.crc32(name.encode()) + 1) for name, value in sums.items()}
    of_frozen = sum(part for name, part in parts.items() if name in frozen)
    return of_frozen, sum(parts.values()) - of_frozen


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


def check_base(folder: Path, base: Mapping[str, int]) -> None:
    """Check that a checkpoint of adapters was written on this base (see `base_checksum`).

    Raises:
        CheckpointError: It was written on another base.
    """
    if not base:
        return

    stored = dist_checkpointing.load_common_state_dict(str(folder))
    if stored.get(BASE_CHECKSUM) != base[BASE_CHECKSUM]:
        raise CheckpointError(
            f"{folder}: its adapters were trained on other frozen weights than those of model.path; use the "
            "model that the run began with"
        )

    # A run without a reference keeps no originals.
    originals = [each[ORIGINALS_CHECKSUM] for each in (stored, base) if ORIGINALS_CHECKSUM in each]
    if len(set(originals)) > 1:
        raise CheckpointError(
            f"{folder}: the reference of its run had another embedding or output layer than model.path; use "
            "the model that the run began with"
        )
