"""WeightReceipt: a load is complete, or an error that names the tensor."""

import pytest
import torch

from megarl.weights.receipt import TensorChunk, TensorMeta, WeightReceipt, WeightTransferError

MANIFEST = {"a": TensorMeta((2, 3), torch.float32), "b": TensorMeta((4,), torch.bfloat16)}
A_HEAD, A_TAIL = TensorChunk("a", 0, torch.zeros(4)), TensorChunk("a", 4, torch.zeros(2))
B_WHOLE = TensorChunk("b", 0, torch.zeros(4, dtype=torch.bfloat16))


def close_after(*chunks: TensorChunk) -> None:
    receipt = WeightReceipt(MANIFEST)
    for chunk in chunks:
        receipt.record(chunk.meta, chunk.data.dtype)
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
        ([TensorChunk("c", 0, torch.zeros(1))], "'c' is not in the model's manifest"),
        ([TensorChunk("b", 0, torch.zeros(4))], "'b' arrived as torch.float32, the manifest says torch.bfloat16"),
        ([TensorChunk("a", 5, torch.zeros(2))], r"'a': elements 5..7 lie outside shape \(2, 3\)"),
    ],
)
def test_what_is_wrong_is_named(chunks: list[TensorChunk], message: str) -> None:
    with pytest.raises(WeightTransferError, match=message):
        close_after(*chunks)
