"""What a rank of the actor packs and sends when it gives its weights away: the plan of a push, on the
engine's own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.rehearsal.ledger import Ledger, place
from megarl.rehearsal.record import Collective, RankPush, RehearsalError
from megarl.weights.execution import Channel, PeerTransfers, PipelinedTransfer
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.schedule import Part
from megarl.weights.shards import Shards

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine


class _Sent(PendingMessages):
    def is_done(self, patience_s: float) -> bool:
        return True


class _RecordedGroup(P2PGroup):
    """Notes what is sent. Engine ranks are numbered behind those of the actor."""

    def __init__(self, ledger: Ledger, rank: int, num_ranks: int) -> None:
        self._ledger = ledger
        self._rank = rank
        self._num_ranks = num_ranks

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> PendingMessages:
        for target, tensor in sends:
            ranks = (self._rank, self._num_ranks + target)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._ledger.communicates(
                Collective("send", "weights", ranks, dtype, tensor.numel(), tensor.nbytes, place())
            )
        return _Sent()


def push_weights(engine: MegatronEngine, push: RankPush, ledger: Ledger, rank: int) -> None:
    """Raises RehearsalError, with the tensor's name, where the rank does not hold what the plan says, or in
    another type."""
    spec = engine.spec
    shards = Shards(
        parameters=engine.parameters(), architecture=spec.architecture, layout=engine.layout, head=spec.head
    )
    dtype = getattr(torch, spec.dtype.value)

    # Check each part against the plan before it enters the send buffer.
    def regions(part: Part) -> list[Tensor]:
        found = list(shards.regions(part))
        held = sum(region.numel() for region in found)
        types = {region.dtype for region in found}

        if held != part.tensor_slice.volume or types != {dtype}:
            raise RehearsalError(
                f"a push sends {part.tensor_slice.volume:,} elements of {part.name} as {dtype}, of which "
                f"this rank holds {held:,}, as "
                f"{', '.join(map(str, types))}"
            )

        return found

    ledger.look_again()  # the weights have just come back
    # Run the transfer's own code, with a group that records the sends.
    transfers = PeerTransfers(push.schedules)
    buffers = torch.empty(2, transfers.largest, dtype=dtype, device=shards.device)
    ipc_buffers = torch.empty(push.buffer_bytes, dtype=torch.uint8, device=shards.device)
    channel = Channel(_RecordedGroup(ledger, rank, spec.parallel.world_size), transfers)
    is_done = PipelinedTransfer([channel], transfers.num_rounds, buffers, regions).run()
    assert is_done, "nobody is waited for"
    # Held until here, as in a run, so that the peak of the phase includes them.
    del ipc_buffers
