"""Count what fake tensors would do to a device, phase by phase.

Counts memory, collectives, host-device synchronizations and floating-point operations. Calls of
torch.distributed are described as torch's dispatcher sees them, over fake or real tensors.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_iter

from megarl.engine import fake_cuda
from megarl.machine.errors import sized
from megarl.rehearse.dry_run.record import Await, Collective, HostSync, PhaseRecord, RehearsalError

_ROOT = str(Path(__file__).parents[3]) + "/"
UNSEEN = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    fake_cuda.__file__,
    contextlib.__file__,
)
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


def place() -> str:
    """Return the innermost line outside torch and this package: `megarl/engine/layers.py:57 forward`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(UNSEEN):
        frame = frame.f_back
    return _line(frame.f_code, frame.f_lineno)


def place_of(error: Exception) -> str:
    """Return the innermost such line in the traceback of an error."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return _line(
        *next((each for each in reversed(frames) if not each[0].co_filename.startswith(UNSEEN)), frames[-1])
    )


def _line(code: CodeType, line: int) -> str:
    path = code.co_filename
    if "site-packages/" in path:
        path = path.rpartition("site-packages/")[2]
    elif path.startswith(_ROOT):
        path = path.removeprefix(_ROOT)
    return f"{path}:{line} {code.co_name}"


class Ledger:
    """The counts of one rank. `limit` is the memory of the device in bytes, None if not known."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._storages: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
        self._held = self._peak = self._flops = 0
        self._collectives: list[Collective] = []
        self._awaits: list[Await] = []
        self._num_calls = 0
        self._host_syncs: Counter[tuple[str, str]] = Counter()

    def sees(self, tensors: Iterable[Tensor]) -> None:
        """Count new memory until it is freed.

        Raises:
            RehearsalError: It exceeds the memory of the device.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # Views share a storage, which counts once.
            if key in self._storages:
                continue
            size = storage.nbytes()
            self._storages[key] = weakref.ref(storage, partial(self._freed, key)), size
            self._held += size
            if self._held > self._peak:
                self._peak = self._held
                self._check(size)

    def _freed(self, key: int, reference: weakref.ref[UntypedStorage]) -> None:
        self._held -= self._storages.pop(key)[1]

    def _check(self, size: int) -> None:
        if self._limit is not None and self._held > self._limit:
            raise RehearsalError(
                f"{sized(self._held, 2)} would be allocated on a device that has {sized(self._limit, 2)}, "
                f"including {sized(size, 2)} more, at {place()}"
            )

    def look_again(self) -> None:
        """Count storages again that were resized in place.

        Offloading and restoring state resizes storages without an operation that this package could see.
        """
        for key, (reference, size) in list(self._storages.items()):
            storage = reference()
            if storage is not None and storage.nbytes() != size:
                self._storages[key] = reference, storage.nbytes()
                self._held += storage.nbytes() - size

        self._peak = max(self._peak, self._held)
        self._check(0)

    def communicates(self, collective: Collective) -> int:
        """Record a call. Returns its number, for `awaits`."""
        self._collectives.append(collective)
        self._num_calls += 1
        return self._num_calls - 1

    def awaits(self, call: int) -> None:
        self._awaits.append(Await(call, self._num_calls))

    def synchronizes(self, kind: str) -> None:
        self._host_syncs[kind, place()] += 1

    def computes(self, flops: int) -> None:
        self._flops += flops

    def end_phase(self, name: str) -> PhaseRecord:
        """Return what happened since the end of the previous phase."""
        self.look_again()
        record = PhaseRecord(
            name=name,
            held=self._held,
            peak=self._peak,
            flops=self._flops,
            collectives=tuple(self._collectives),
            host_syncs=tuple(HostSync(*key, count) for key, count in self._host_syncs.items()),
            awaits=tuple(self._awaits),
        )
        # The next phase starts with the memory that this one leaves allocated.
        self._peak = self._held
        self._flops = 0
        self._collectives = []
        self._awaits = []
        self._host_syncs.clear()

        return record


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
