"""Check that weights are bitwise those that other ranks hold, or those that adapters were trained on.

Each rank sums the bits of each parameter. Ranks that hold the same parameters reduce the sums to their
minimum and maximum, so that few bytes are sent. Only after a mismatch, which is silent corruption, are all
sums gathered. A checkpoint of a model with adapters holds what trains only, and identifies its base by
checksums.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megarl.engine import platform
from megarl.engine.engine import MegatronEngine
from megarl.engine.offload import StatePart
from megarl.machine.errors import CheckpointError, ReplicaMismatchError
from megarl.models.tensor_table import weights_of
from megarl.weights.checksum import MODULUS, shard_checksums
from megarl.weights.shard_layout import AXES, held_weights
from megarl.weights.shards import Shards

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_EXPERT = ".experts."


# For each group of ranks with equal parameters, its ranks and a rank's sums by parameter.
HeldSums = Sequence[tuple[tuple[int, ...], Mapping[str, int]]]


def check_replicas(engine: MegatronEngine, owner: str) -> None:
    """Compare the parameters of all ranks of a model. All of them call this function.

    Args:
        engine: The model. Its parameters are in memory.
        owner: This rank and its node, for the error.

    Raises:
        ReplicaMismatchError: The parameters of this rank are not those of most others.
        ConnectionAbortedError: Those of another rank are not.
    """
    groups = engine.groups
    # The bits of all elements, read as integers: one changed bit always changes the sum.
    sums = {
        name: parameter.view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
        for name, parameter in engine.parameters().items()
    }
    dense = {name: value for name, value in sums.items() if _EXPERT not in name}
    experts = {name: value for name, value in sums.items() if _EXPERT in name}
    weights = held_weights(engine.spec.architecture, engine.layout, engine.spec.head)
    whole = {weight.megatron_name for weight in weights if AXES[weight.cut].cut is None}
    copies = [
        (groups.data_context, dense),
        (groups.expert_data, experts),
        (groups.tensor, {name: value for name, value in dense.items() if name in whole}),
    ]
    differ = torch.zeros((), dtype=torch.int64, device=next(iter(sums.values())).device)
    for group, held in copies:
        if held and dist.get_world_size(group) > 1:
            lowest = torch.stack(list(held.values()))
            highest = lowest.clone()
            dist.all_reduce(lowest, dist.ReduceOp.MIN, group=group)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            differ += (lowest != highest).sum()

    # Ranks that hold other parameters must stop, too.
    dist.all_reduce(differ)
    if not int(differ):
        return
    own: HeldSums = [
        (tuple(dist.get_process_group_ranks(group)), {name: int(value) for name, value in held.items()})
        for group, held in copies
    ]
    ranks = [(owner, own)] * dist.get_world_size()
    dist.all_gather_object(ranks, (owner, own))
    suspects, name = suspected([sums_of_rank for _, sums_of_rank in ranks])
    message = (
        f"{', '.join(ranks[rank][0] for rank in suspects)}: {name} is not bitwise equal to the copies on "
        f"other ranks"
        + ("" if len(suspects) == 1 else "; the copies differ from each other, and any of them may be wrong")
    )
    if dist.get_rank() in suspects:
        raise ReplicaMismatchError(message)
    # Reported as a consequence, so that the failure names the rank that caused it.
    raise ConnectionAbortedError(message)


def suspected(ranks: Sequence[HeldSums]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that differ from the majority of their copies, and the first parameter that differs.

    Without a majority, all ranks that hold the parameter are returned.
    """
    for rank, held in enumerate(ranks):
        for place, (members, sums) in enumerate(held):
            # Each set of copies is compared once, when its first rank is visited.
            if rank != members[0]:
                continue
            for name in sums:
                values = {member: ranks[member][place][1][name] for member in members}
                if len(set(values.values())) == 1:
                    continue
                (common, count), *_ = Counter(values.values()).most_common()
                if 2 * count <= len(members):
                    return tuple(members), name
                return tuple(member for member, value in values.items() if value != common), name
    raise AssertionError("all copies are equal")


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
            # The sum over ranks overflows int64 at the modulus.
            parts = [(part + MODULUS // 2) % MODULUS - MODULUS // 2 for part in _own_parts(engine)]

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
