"""The p2p group of the trainers uses the default process group, whose communicator NCCL creates on first use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.weights.p2p import P2PGroup
from tests.mortal_ranks import Place, mortal_ranks
from tests.nccl_communicator import num_live_communicators
from tests.nccl_semantics import BACKEND, register

CPU = torch.device("cpu")
LIMIT_S = 60.0

pytestmark = pytest.mark.usefixtures("forked_processes")


def exchange(place: Place) -> None:
    """Exchange numbers between ranks 0 and 1; rank 2 has nothing to send.

    Each rank returns the number of communicators, and what arrived.
    """
    register()
    dist.init_process_group(
        BACKEND, store=dist.FileStore(place.store_path, place.size), rank=place.rank, world_size=place.size
    )
    dist.new_group([0, 1])
    before = num_live_communicators()
    p2p = P2PGroup.of_default_group(CPU)
    again = P2PGroup.of_default_group(CPU)  # for another role in the same process
    after = num_live_communicators()

    received = torch.full((2,), -1.0)

    if place.rank < 2:
        peer = 1 - place.rank
        sent = torch.full((2,), float(place.rank))
        assert p2p.start([(peer, sent)], [(peer, received)], tag=0)(LIMIT_S)

    assert again is not p2p
    place.say((before, after, received.tolist()))
    place.listen()


def test_messages_do_not_wait_for_ranks_that_have_none(tmp_path: Path) -> None:
    with mortal_ranks(tmp_path, [exchange] * 3) as ranks:
        assert [rank.hear() for rank in ranks] == [
            (0, 1, [1.0, 1.0]),
            (0, 1, [0.0, 0.0]),
            (0, 1, [-1.0, -1.0]),
        ]
