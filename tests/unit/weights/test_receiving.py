"""What comes in rounds is copied to where it belongs, and nothing of the memory it came in is kept."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megarl.weights.execution import Side
from megarl.weights.plan import Part, Stream
from megarl.weights.tensors import Rectangle
from megarl.weights.transports.interface import Landing


def test_a_slot_of_one_pass_does_not_outlive_it() -> None:
    matrix, vector = Rectangle((0, 2), (2, 5)), Rectangle((1,), (4,))
    stream = Stream([Part("matrix", matrix), Part("vector", vector)], num_rounds=3)
    tensors = {"matrix": torch.zeros(2, 5), "vector": torch.zeros(4)}
    asked: list[Part] = []

    def places(part: Part) -> list[torch.Tensor]:
        asked.append(part)
        return [tensors[part.name][part.box.slices]]

    landing = Landing(Side({0: stream}), {"matrix": [matrix], "vector": [vector]}, torch.float32, places)
    num_asked = 0
    for version in (0, 100):
        slots = torch.empty(2, landing.sources.largest)
        for number in range(3):
            slot = slots[number % 2]
            length = stream.length(number)
            first = version + 1 + sum(map(stream.length, range(number)))
            slot[:length] = torch.arange(first, first + length)
            landing.unpack(number, slot)
        expected = version + torch.arange(1.0, 10.0)
        assert torch.equal(tensors["matrix"][:, 2:].reshape(-1), expected[:6])
        assert torch.equal(tensors["vector"][1:], expected[6:])
        memory = StorageWeakRef(slots.untyped_storage())
        del slots, slot
        assert memory.expired()
        num_asked = num_asked or len(asked)
        assert len(asked) == num_asked  # once, not in each pass
    assert not tensors["matrix"][:, :2].any()
    assert not tensors["vector"][:1].any()
    assert landing.received_bytes == 2 * 9 * 4
