from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch.data_proto import DataProto
from megarl.data.loader import BatchLoader, one_pass


class Numbers:
    """A data set whose row i is the number i."""

    def __init__(self, size, fingerprint="numbers"):
        self.size = size
        self.fingerprint = fingerprint

    def __len__(self):
        return self.size

    def batch(self, indices, uids):
        return DataProto.from_dict(non_tensors={"row": list(indices), "uid": list(uids)})


def rows(batch):
    return batch.non_tensor_batch["row"].tolist()


def take(loader, num_batches):
    return [rows(next(loader)) for _ in range(num_batches)]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 20), batch_size=st.integers(1, 25), shuffle=st.booleans(), seed=st.integers(0, 5))
def test_every_epoch_serves_every_row_once_and_all_batches_are_full(size, batch_size, shuffle, seed):
    loader = BatchLoader(Numbers(size), batch_size, shuffle=shuffle, seed=seed)
    batches = take(loader, size)  # size * batch_size rows: batch_size whole epochs
    assert {len(batch) for batch in batches} == {batch_size}
    served = np.concatenate(batches).reshape(batch_size, size)
    assert all(sorted(epoch) == list(range(size)) for epoch in served.tolist())
    assert loader.epoch == batch_size


def test_order_is_a_function_of_seed_and_epoch():
    def epochs(seed):
        return take(BatchLoader(Numbers(50), 50, shuffle=True, seed=seed), 2)

    assert epochs(3) == epochs(3)
    assert epochs(3)[0] != epochs(3)[1]
    assert epochs(3) != epochs(4)


def test_further_rows_are_the_next_ones_and_count_as_served():
    loader, other = (BatchLoader(Numbers(10), 4, shuffle=True, seed=1) for _ in range(2))
    in_turn = rows(next(loader)) + rows(loader.take(3)) + rows(next(loader))
    assert in_turn == sum(take(other, 3), [])[:11]
    assert loader.state_dict()["num_served"] == 11


def test_uids_are_unique_even_when_a_row_comes_twice_in_a_batch():
    batch = next(BatchLoader(Numbers(3), 8, shuffle=True, seed=0))
    assert Counter(rows(batch)).most_common(1)[0][1] > 1
    assert len(set(batch.non_tensor_batch["uid"])) == 8
    assert all(uid.split("-")[1] == str(row) for uid, row in zip(batch.non_tensor_batch["uid"], rows(batch), strict=True))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 20), batch_size=st.integers(1, 25), before=st.integers(0, 9))
def test_a_resumed_walk_is_the_uninterrupted_one(size, batch_size, before):
    def loader():
        return BatchLoader(Numbers(size), batch_size, shuffle=True, seed=1)

    whole, first, second = loader(), loader(), loader()
    expected = take(whole, before + 5)
    take(first, before)
    second.load_state_dict(first.state_dict())
    assert take(second, 5) == expected[before:]


def test_resuming_with_another_batch_size_continues_with_the_next_row():
    straight = sum(take(BatchLoader(Numbers(7), 1, shuffle=True, seed=2), 12), [])
    first, second = BatchLoader(Numbers(7), 3, shuffle=True, seed=2), BatchLoader(Numbers(7), 2, shuffle=True, seed=2)
    begun = sum(take(first, 2), [])
    second.load_state_dict(first.state_dict())
    assert begun + sum(take(second, 3), []) == straight


@pytest.mark.parametrize(
    ("size", "seed", "shuffle", "name"), [(9, 0, True, "num_rows=8"), (8, 1, True, "seed=0"), (8, 0, False, "shuffle")]
)
def test_resuming_with_other_data_is_refused(size, seed, shuffle, name):
    state = BatchLoader(Numbers(8), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ValueError, match=f"cannot resume the data.*{name}"):
        BatchLoader(Numbers(size), 2, shuffle=shuffle, seed=seed).load_state_dict(state)


def test_resuming_with_as_many_other_rows_is_refused():
    state = BatchLoader(Numbers(8), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ValueError, match="cannot resume the data.*rows=numbers, this run has letters"):
        BatchLoader(Numbers(8, "letters"), 2, shuffle=True, seed=0).load_state_dict(state)


def test_one_pass_serves_all_rows_in_order_with_a_smaller_last_batch():
    assert [rows(batch) for batch in one_pass(Numbers(5), 2)] == [[0, 1], [2, 3], [4]]
