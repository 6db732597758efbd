"""Describe calls of torch.distributed as torch's dispatcher sees them, over fake or real tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_iter

from megarl.rehearsal.ledger import place
from megarl.rehearsal.record import Collective

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "recv_": "recv",
}


def collective_of(operator: Any, arguments: Any, keywords: Any) -> tuple[Collective, Tensor] | None:
    """Describe a call of an operator in torch's namespace `c10d`.

    Returns:
        The call, and the first tensor of the larger of this rank's input and output, which determines dtype
        and size. Either may be a list of tensors. None for a call without tensors, such as a barrier.
    """
    ends = [tensors for each in (*arguments, *keywords.values()) if (tensors := tensors_of(each))]
    if not ends:
        return None
    name = operator._opname
    named = dict(zip((each.name for each in operator._schema.arguments), arguments, strict=False)) | keywords
    group = dist.ProcessGroup.unbox(named["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))

    # A message has two ends; the sender comes first in the record of both ranks, so that they match.
    if name in ("send", "recv_"):
        peer = ranks[named["dst" if name == "send" else "src"]]
        mine = dist.get_rank()
        ranks = (mine, peer) if name == "send" else (peer, mine)

    nbytes, largest = max(((sum(tensor.nbytes for tensor in end), end) for end in ends), key=itemgetter(0))
    dtype = str(largest[0].dtype).removeprefix("torch.")
    elements = sum(tensor.numel() for tensor in largest)
    call = Collective(kind_of(operator), group.group_desc, ranks, dtype, elements, nbytes, place())

    # Ranks send parts of different sizes, so the totals alone cannot be compared.
    if call.kind == "all_to_all":
        sent = _split(named["input"], named["input_split_sizes"], len(ranks))
        call = call._replace(
            sent=sent, received=_split(named["output"], named["output_split_sizes"], len(ranks))
        )

    return call, largest[0]


def _split(tensor: Tensor, rows: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the number of elements of each rank's part of a tensor.

    Args:
        rows: The number of rows of each part. Empty: the parts are equal.
    """
    if not len(rows):
        return (tensor.numel() // num_ranks,) * num_ranks
    return tuple(number * prod(tensor.shape[1:]) for number in rows)


def kind_of(operator: Any) -> str:
    return _KINDS.get(operator._opname, operator._opname)


def tensors_of(*values: Any) -> list[Tensor]:
    return [each for each in tree_iter(values) if isinstance(each, Tensor)]
