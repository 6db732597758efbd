"""Received rounds are copied to their destination, and no view of the receive buffer is kept."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.weights.tensors import Part, PeerTransfers, TensorSlice, TransferSchedule
from megarl.weights.transports.interface import DestinationViews


def test_a_buffer_of_one_pass_does_not_outlive_it() -> None:
    matrix = TensorSlice((0, 2), (2, 5))
    vector = TensorSlice((1,), (4,))
    schedule = TransferSchedule([Part("matrix", matrix), Part("vector", vector)], num_rounds=3)
    tensors = {"matrix": torch.zeros(2, 5), "vector": torch.zeros(4)}
    asked: list[Part] = []

    def places(part: Part) -> list[torch.Tensor]:
        asked.append(part)
        return [tensors[part.name][part.tensor_slice.index]]

    destinations = DestinationViews(
        PeerTransfers({0: schedule}), {"matrix": [matrix], "vector": [vector]}, torch.float32, places
    )
    num_asked = 0

    for version in (0, 100):
        ipc = torch.empty(2, destinations.sources.largest)
        for number in range(3):
            buffer = ipc[number % 2]
            length = schedule.length(number)
            first = version + 1 + sum(map(schedule.length, range(number)))
            buffer[:length] = torch.arange(first, first + length)
            destinations.unpack(number, buffer)
        expected = version + torch.arange(1.0, 10.0)
        assert torch.equal(tensors["matrix"][:, 2:].reshape(-1), expected[:6])
        assert torch.equal(tensors["vector"][1:], expected[6:])
        memory = StorageWeakRef(ipc.untyped_storage())
        del ipc, buffer
        assert memory.expired()
        num_asked = num_asked or len(asked)
        assert len(asked) == num_asked  # once, not in each pass

    assert not tensors["matrix"][:, :2].any()
    assert not tensors["vector"][:1].any()
    assert destinations.received_bytes == 2 * 9 * 4
