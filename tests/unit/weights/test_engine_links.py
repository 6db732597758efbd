"""An engine rank gets its link as JSON, with nothing lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.config.schema import Transport
from megarl.weights.ipc import IPCAddress
from megarl.weights.p2p import P2PAddress
from megarl.weights.tensors import Part, PeerTransfers, TensorSlice, TransferSchedule
from megarl.weights.transports.interface import EngineLink

P2P = P2PAddress("replica-0", "10.0.0.1", 29500, 6, "gloo", 45.5)
IPC = IPCAddress("node:1", True, "/proc/7/fd/3", 4096, 4, "/proc/7/fd/4", "/proc/7/fd/5")
MATRIX = Part("matrix", TensorSlice((0, 2), (4, 5)))
VECTOR = Part("vector", TensorSlice((1,), (9,)))
SCHEDULES = {3: TransferSchedule([MATRIX, VECTOR], 4), 11: TransferSchedule([VECTOR], 3, [0, 1, 1, 8])}


@pytest.mark.parametrize(
    "place",
    [
        {"transport": Transport.group, "addresses": [P2P], "rank": 5, "size": 6},
        {"transport": Transport.group, "addresses": [P2P], "rank": 5, "size": 6, "sends_changes": True},
        {"transport": Transport.device, "addresses": [IPC, IPC], "rank": 1, "device": "node:1"},
        {"transport": Transport.folder, "rank": 2, "sends_changes": True},
    ],
    ids=["group", "changes", "device", "files"],
)
@pytest.mark.parametrize("schedules", [SCHEDULES, {}], ids=["two", "none"])
def test_a_link_survives_json(place: dict[str, Any], schedules: dict[int, TransferSchedule]) -> None:
    link = EngineLink(
        name="replica-0",
        dtype=torch.bfloat16,
        limit_s=45.5,
        peers=PeerTransfers(schedules),
        words={"vector": 2},
        **place,
    )
    found = EngineLink.decode(json.loads(json.dumps(link.encode())))
    assert [type(link.addresses[0])(*each) for each in found.addresses] == list(link.addresses)
    assert repr(replace(found, peers=link.peers, addresses=link.addresses)) == repr(link)
    assert {source: schedule.key for source, schedule in found.peers.schedules.items()} == {
        source: schedule.key for source, schedule in schedules.items()
    }
