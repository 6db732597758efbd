"""An engine rank gets its link as JSON, with nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megarl.weights.ipc import IPCAddress
from megarl.weights.p2p import P2PAddress
from megarl.weights.receiver import EngineLink
from megarl.weights.schedule import Part, TransferSchedule
from megarl.weights.tensors import TensorSlice
from megarl.weights.transports.interface import Endpoint

P2P = P2PAddress("replica-0", "10.0.0.1", 29500, 6, "gloo", 45.5)
IPC = IPCAddress("node:1", True, "/proc/7/fd/3", 4096, 4, "/proc/7/fd/4", "/proc/7/fd/5")
MATRIX = Part("matrix", TensorSlice((0, 2), (4, 5)))
VECTOR = Part("vector", TensorSlice((1,), (9,)))
SCHEDULES = {3: TransferSchedule([MATRIX, VECTOR], 4), 11: TransferSchedule([VECTOR], 3, [0, 1, 1, 8])}


@pytest.mark.parametrize(
    "place",
    [
        Endpoint("group", P2P, 5),
        Endpoint("delta", P2P, 5),
        Endpoint("device", IPC, device="node:1"),
        Endpoint("patch_folder", rank=2),
    ],
    ids=["group", "changes", "device", "files"],
)
@pytest.mark.parametrize("schedules", [SCHEDULES, {}], ids=["two", "none"])
def test_a_link_survives_json(place: Any, schedules: dict[int, TransferSchedule]) -> None:
    link = EngineLink(place, schedules, torch.bfloat16, {"vector": 2})
    found = EngineLink.decode(json.loads(json.dumps(link.encode())))
    assert repr(found.place) == repr(place)  # the type of the address, too
    assert (found.dtype, found.words) == (torch.bfloat16, {"vector": 2})
    assert {source: schedule.key for source, schedule in found.schedules.items()} == {
        source: schedule.key for source, schedule in schedules.items()
    }
