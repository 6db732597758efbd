"""Simulate what an actor rank packs and sends in a weight sync, with the engine's own parameters."""

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
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transforms import merged_shards

if TYPE_CHECKING:
    from megarl.engine.engine import MegatronEngine


class _Sent(PendingMessages):
    def is_done(self, patience_s: float) -> bool:
        return True


class _RecordedGroup(P2PGroup):
    """Records what is sent. Engine ranks are numbered after those of the actor."""

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
    """Run the sends of a weight sync.

    Raises:
        RehearsalError: The rank does not hold what the plan requires, or in another dtype. The message names
            the tensor.
    """
    spec = engine.spec
    shards = merged_shards(
        engine.parameters(),
        spec.architecture,
        engine.layout,
        spec.head,
        keeps_adapters=spec.pushes_adapters,
    )
    dtype = getattr(torch, spec.dtype.value)

    # Check each part against the plan before it enters the send buffer.
    def regions(part: Part) -> list[Tensor]:
        try:
            found = list(shards.regions(part))
        except WeightTransferError as error:
            sent = f"a weight sync sends {part.tensor_slice.volume:,} elements of {part.name} as {dtype}"
            raise RehearsalError(f"{sent}, but {error}") from error

        held = sum(region.numel() for region in found)
        types = {region.dtype for region in found}

        if held != part.tensor_slice.volume or types != {dtype}:
            raise RehearsalError(
                f"a weight sync sends {part.tensor_slice.volume:,} elements of {part.name} as {dtype}, but "
                f"this rank holds {held:,} of them as {', '.join(map(str, types))}"
            )

        return found

    ledger.look_again()  # the weights have just been restored
    # Run the transfer's own code with a group that records the sends.
    transfers = PeerTransfers(push.schedules)
    buffers = torch.empty(2, transfers.largest, dtype=dtype, device=shards.device)
    ipc_buffers = torch.empty(push.buffer_bytes, dtype=torch.uint8, device=shards.device)
    channel = Channel(_RecordedGroup(ledger, rank, spec.parallel.world_size), transfers)
    is_done = PipelinedTransfer([channel], transfers.num_rounds, buffers, regions).run()
    assert is_done, "there are no peers to wait for"
    # Keep the buffers until here, as in a run, so that the peak of the phase includes them.
    del ipc_buffers
