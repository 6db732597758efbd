"""Simulate what an actor rank packs and sends in a weight sync, with the engine's own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.rehearse.rehearsal.ledger import Ledger, place
from megarl.rehearse.rehearsal.record import Collective, RankPush, RehearsalError
from megarl.weights.p2p import Message, P2PGroup, PendingMessages
from megarl.weights.quantized_shards import QuantizedShards, maximum_over_ranks
from megarl.weights.schedule import Part, PeerTransfers
from megarl.weights.shards import merged_shards
from megarl.weights.tensors import WeightTransferError
from megarl.weights.transfer import Channel, PipelinedTransfer

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
    plain = merged_shards(
        engine.parameters(),
        spec.architecture,
        engine.layout,
        spec.head,
        keeps_adapters=spec.pushes_adapters,
    )
    ledger.look_again()  # the weights have just been restored
    shards = QuantizedShards(plain, maximum_over_ranks) if spec.pushes_fp8 else plain
    dtype = QuantizedShards.dtype if spec.pushes_fp8 else getattr(torch, spec.dtype.value)

    # Check each part against the plan as it enters the send buffer.
    def regions(part: Part) -> Iterator[Tensor]:
        sent = f"a weight sync sends {part.tensor_slice.volume:,} elements of {part.name} as {dtype}"
        held = 0
        try:
            for region in shards.regions(part):
                held += region.numel()
                if region.dtype != dtype:
                    raise RehearsalError(f"{sent}, but this rank holds them as {region.dtype}")
                yield region
        except WeightTransferError as error:
            raise RehearsalError(f"{sent}, but {error}") from error

        if held != part.tensor_slice.volume:
            raise RehearsalError(f"{sent}, but this rank holds {held:,} of them")

    # Run the transfer's own code with a group that records the sends.
    transfers = PeerTransfers(push.schedules)
    buffers = torch.empty(2, transfers.largest, dtype=dtype, device=shards.device)
    ipc_buffers = torch.empty(push.buffer_bytes, dtype=torch.uint8, device=shards.device)
    channel = Channel(_RecordedGroup(ledger, rank, spec.parallel.world_size), transfers)
    is_done = PipelinedTransfer([channel], buffers, regions, are_computed=shards.are_computed).run()
    assert is_done, "there are no peers to wait for"
    # Keep the buffers until here, as in a run, so that the peak of the phase includes them.
    del ipc_buffers
