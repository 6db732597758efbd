"""WeightReceipt: a load is complete, or an error that names the tensor."""

import pytest
import torch

from megarl.weights.receipt import ChunkMeta, TensorMeta, WeightReceipt, WeightTransferError

MANIFEST = {"a": TensorMeta((2, 3), torch.float32), "b": TensorMeta((4,), torch.bfloat16)}
Arrival = tuple[ChunkMeta, torch.dtype]
A_HEAD, A_TAIL = (ChunkMeta("a", 0, 4), torch.float32), (ChunkMeta("a", 4, 2), torch.float32)
B_WHOLE = (ChunkMeta("b", 0, 4), torch.bfloat16)


def close_after(*chunks: Arrival) -> None:
    receipt = WeightReceipt(MANIFEST)
    for chunk, dtype in chunks:
        receipt.record(chunk, dtype)
    receipt.close()


def test_a_complete_load_in_any_order_passes() -> None:
    close_after(A_TAIL, B_WHOLE, A_HEAD)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([A_HEAD, B_WHOLE], r"a \(missing from element 4 of 6\)"),
        ([A_TAIL, B_WHOLE], r"a \(missing at element 0\)"),
        ([A_HEAD, A_TAIL], r"b \(missing from element 0 of 4\)"),
        ([A_HEAD, A_HEAD, A_TAIL, B_WHOLE], r"a \(twice at element 0\)"),
        ([(ChunkMeta("c", 0, 1), torch.float32)], "'c' is not in the model's manifest"),
        ([(ChunkMeta("b", 0, 4), torch.float32)], "'b' arrived as torch.float32, the manifest says torch.bfloat16"),
        ([(ChunkMeta("a", 5, 2), torch.float32)], r"'a': elements 5..7 lie outside shape \(2, 3\)"),
    ],
)
def test_what_is_wrong_is_named(chunks: list[Arrival], message: str) -> None:
    with pytest.raises(WeightTransferError, match=message):
        close_after(*chunks)
