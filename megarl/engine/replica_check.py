"""Compare parameters that several ranks hold, which must be bitwise equal, to find silent corruption.

Each rank sums the bits of each parameter. Ranks that hold the same parameters reduce the sums to their
minimum and maximum, so that few bytes are sent. Only after a mismatch are all sums gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.engine.engine import MegatronEngine
from megarl.machine.errors import ReplicaMismatchError
from megarl.weights.shard_layout import AXES, held_weights

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
    sums = {name: _sum_of_bits(parameter) for name, parameter in engine.parameters().items()}
    dense = {name: value for name, value in sums.items() if _EXPERT not in name}
    experts = {name: value for name, value in sums.items() if _EXPERT in name}
    weights = held_weights(engine.spec.architecture, engine.layout, engine.spec.head)
    whole = {weight.megatron_name for weight in weights if AXES[weight.cut].cut is None}
    copies = [
        (groups.data_context, dense),
        (groups.expert_data, experts),
        (groups.tensor, {name: value for name, value in dense.items() if name in whole}),
    ]
    device = next(iter(sums.values())).device
    differ = torch.zeros((), dtype=torch.int64, device=device)
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


def _sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum of the elements' bits, read as integers: one changed bit always changes it."""
    return parameter.detach().view(_INTEGERS[parameter.element_size()]).sum(dtype=torch.int64)
