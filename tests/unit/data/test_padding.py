import torch

from megarl.data.padding import join, pad_left, pad_right, position_ids


def test_padding_by_hand():
    left, right = pad_left([[1, 2], [3]], 3, 9), pad_right([[4], [5, 6]], 2, 9)
    assert left.ids.tolist() == [[9, 1, 2], [9, 9, 3]]
    assert left.mask.tolist() == [[0, 1, 1], [0, 0, 1]]
    assert right.ids.tolist() == [[4, 9], [5, 6]]
    joined = join(left, right)
    assert joined["input_ids"].tolist() == [[9, 1, 2, 4, 9], [9, 9, 3, 5, 6]]
    assert joined["attention_mask"].tolist() == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert joined["position_ids"].tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 1, 2]]
    assert {tensor.dtype for tensor in joined.values()} == {torch.int64}


def test_masks_come_from_lengths_not_from_the_pad_token():
    """The end token may serve as padding: a real one at the end of a response stays valid."""
    padded = pad_right([[7, 0], [0]], 3, 0)
    assert padded.mask.tolist() == [[1, 1, 0], [1, 0, 0]]


def test_no_rows():
    assert pad_left([], 4, 0).ids.shape == (0, 4)
    assert position_ids(torch.zeros(0, 4, dtype=torch.int64)).shape == (0, 4)
