"""Identify the frozen base of a model with adapters, whose checkpoints hold the adapters only."""

from __future__ import annotations

import zlib
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

BASE_CHECKSUM = "base_checksum"  # in the state that all ranks share


def base_checksum(engine: MegatronEngine) -> int | None:
    """Return a checksum of all frozen weights, which does not depend on the layout. None without adapters.

    It is computed once, with all ranks, and restores the parameters for it if they are offloaded.
    """
    if engine.spec.architecture.lora is None:
        return None

    if engine.known_base_checksum is None:
        offloaded = {StatePart.parameters} & engine.training_state().places.offloaded
        engine.restore(*offloaded)
        total = torch.tensor(_signed(_own_part(engine)), dtype=torch.int64, device=platform.current().device)
        engine.offload(*offloaded)

        # Sums of int64 overflow, which is the modulus.
        dist.all_reduce(total)
        engine.known_base_checksum = int(total) % MODULUS

    return engine.known_base_checksum


def _own_part(engine: MegatronEngine) -> int:
    """Return what this rank contributes. Elements that several ranks hold count once."""
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
    return sum(value * (2 * zlib.crc32(name.encode()) + 1) for name, value in sums.items() if name in frozen)


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


def check_base(folder: Path, base: int | None) -> None:
    """Check that a checkpoint of adapters was written on this base. `base` is None without adapters.

    Raises:
        CheckpointError: It was written on another base.
    """
    if base is None:
        return
    stored = dist_checkpointing.load_common_state_dict(str(folder)).get(BASE_CHECKSUM)
    if stored != base:
        raise CheckpointError(
            f"{folder}: its adapters were trained on other frozen weights than those of model.path; use the "
            "model that the run began with"
        )
