import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch.data_proto import DataProto
from megarl.data.files import DataError
from megarl.data.loader import BatchLoader, one_pass, parts_of
from megarl.data.tables import RowIdentity


class Numbers:
    """A data set whose row i is the number i."""

    def __init__(self, size, rows="numbers", tokens=None, chat_time=None):
        self.size = size
        self.identity = RowIdentity(rows, tokens, chat_time)

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


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 12), before=st.integers(0, 30), ahead=st.integers(0, 30), shuffle=st.booleans())
def test_upcoming_rows_are_those_that_follow_and_are_not_served(size, before, ahead, shuffle):
    loader = BatchLoader(Numbers(size), 1, shuffle=shuffle, seed=2)
    loader.take(before)
    state = loader.state_dict()
    upcoming = loader.upcoming(ahead)
    assert loader.state_dict() == state
    assert upcoming == sorted(set(rows(loader.take(ahead))))


def test_further_rows_are_the_next_ones_and_count_as_served():
    loader, other = (BatchLoader(Numbers(10), 4, shuffle=True, seed=1) for _ in range(2))
    in_turn = rows(next(loader)) + rows(loader.take(3)) + rows(next(loader))
    assert in_turn == sum(take(other, 3), [])[:11]
    assert loader.state_dict()["num_served"] == [11]


def test_uids_are_unique_even_when_a_row_comes_twice_in_a_batch():
    batch = next(BatchLoader(Numbers(3), 8, shuffle=True, seed=0))
    assert Counter(rows(batch)).most_common(1)[0][1] > 1
    assert len(set(batch.non_tensor_batch["uid"])) == 8
    assert all(
        uid.split("-")[1] == str(row)
        for uid, row in zip(batch.non_tensor_batch["uid"], rows(batch), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 20), batch_size=st.integers(1, 25), before=st.integers(0, 9))
def test_a_resumed_walk_is_the_uninterrupted_one(size, batch_size, before):
    def loader():
        return BatchLoader(Numbers(size), batch_size, shuffle=True, seed=1)

    whole = loader()
    first = loader()
    second = loader()
    expected = take(whole, before + 5)
    take(first, before)
    second.load_state_dict(first.state_dict())
    assert take(second, 5) == expected[before:]


def test_resuming_with_another_batch_size_continues_with_the_next_row():
    straight = sum(take(BatchLoader(Numbers(7), 1, shuffle=True, seed=2), 12), [])
    first = BatchLoader(Numbers(7), 3, shuffle=True, seed=2)
    second = BatchLoader(Numbers(7), 2, shuffle=True, seed=2)
    begun = sum(take(first, 2), [])
    second.load_state_dict(first.state_dict())
    assert begun + sum(take(second, 3), []) == straight


@pytest.mark.parametrize(
    ("size", "seed", "shuffle", "name"),
    [(9, 0, True, "num_rows=8"), (8, 1, True, "seed=0"), (8, 0, False, "shuffle")],
)
def test_resuming_with_other_data_is_refused(size, seed, shuffle, name):
    state = BatchLoader(Numbers(8), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ValueError, match=f"cannot resume the data.*{name}"):
        BatchLoader(Numbers(size), 2, shuffle=shuffle, seed=seed).load_state_dict(state)


def test_resuming_with_as_many_other_rows_is_refused():
    state = BatchLoader(Numbers(8), 2, shuffle=True, seed=0).state_dict()
    with pytest.raises(ValueError, match="cannot resume the data.*rows=numbers, this run has letters"):
        BatchLoader(Numbers(8, "letters"), 2, shuffle=True, seed=0).load_state_dict(state)


def test_a_state_of_another_version_is_refused() -> None:
    loader = BatchLoader(Numbers(8), 2, shuffle=True, seed=0)
    state = loader.state_dict()
    del state["parts"]

    with pytest.raises(
        ValueError, match="the checkpoint does not contain parts; it is damaged or from another version"
    ):
        loader.load_state_dict(state)


def test_one_pass_serves_all_rows_in_order_with_a_smaller_last_batch():
    assert [rows(batch) for batch in one_pass(Numbers(5), 2)] == [[0, 1], [2, 3], [4]]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    weights=st.lists(st.sampled_from([0.1, 0.5, 1.0, 3.0]), min_size=4, max_size=4),
    before=st.integers(0, 9),
)
def test_a_mix_keeps_its_shares_and_is_resumed_exactly(sizes, weights, before):
    parts = [(size, weight) for size, weight in zip(sizes, weights, strict=False)]

    def loader(batch_size=5):
        return BatchLoader(Numbers(sum(sizes)), batch_size, shuffle=True, seed=1, parts=parts)

    whole = loader()
    first = loader()
    second = loader()
    expected = take(whole, before + 5)
    take(first, before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert take(second, 5) == expected[before:]
    served = sum(expected, [])
    start = 0
    total = sum(weight for _, weight in parts)

    for num_rows, weight in parts:
        own = [row for row in served if start <= row < start + num_rows]
        assert abs(len(own) - len(served) * weight / total) <= 1
        epochs = [own[at : at + num_rows] for at in range(0, len(own) - num_rows + 1, num_rows)]
        assert all(sorted(epoch) == list(range(start, start + num_rows)) for epoch in epochs)
        start += num_rows


def test_the_order_of_a_mix_by_hand_and_its_refusals():
    parts = parts_of(["a", "b"], [3, 1], ["a"] * 2 + ["b"] * 3)
    mix = BatchLoader(Numbers(5), 8, shuffle=False, seed=0, parts=parts)
    assert rows(next(mix)) == [0, 1, 2, 0, 1, 0, 3, 1]
    assert next(mix).non_tensor_batch["uid"].tolist()[:3] == ["3-0", "3-1", "0-4"]

    with pytest.raises(ValueError, match="cannot resume the data.*parts=.*data.train_weights"):
        BatchLoader(
            Numbers(5), 8, shuffle=False, seed=0, parts=parts_of(["a", "b"], [1, 1], ["a"] * 2 + ["b"] * 3)
        ).load_state_dict(mix.state_dict())

    with pytest.raises(DataError, match="b: none of its rows is left"):
        parts_of(["a", "b"], [1, 1], ["a"])


def test_the_same_rows_may_become_other_tokens(caplog):
    """A new version of a library may render a space differently, which must not prevent resuming."""
    state = json.loads(
        json.dumps(BatchLoader(Numbers(8, tokens="before"), 2, shuffle=True, seed=0).state_dict())
    )
    BatchLoader(Numbers(8, tokens="before"), 2, shuffle=True, seed=0).load_state_dict(state)
    BatchLoader(Numbers(8, tokens=None), 2, shuffle=True, seed=0).load_state_dict(state)
    assert caplog.text == ""
    BatchLoader(Numbers(8, tokens="now"), 2, shuffle=True, seed=0).load_state_dict(state)
    assert (
        "their tokens differ: the tokenizer, its chat template or transformers has changed since"
        in caplog.text
    )


def test_a_checkpoint_that_knows_rows_by_their_tokens_is_resumed(caplog):
    old = BatchLoader(Numbers(8, rows="tokens of before"), 2, shuffle=True, seed=0)
    expected = take(old, 3)[1:]
    state = {
        name: value for name, value in old.state_dict().items() if name not in ("tokens", "chat_time")
    } | {"num_served": [2]}
    same = BatchLoader(Numbers(8, tokens="tokens of before"), 2, shuffle=True, seed=0)
    same.load_state_dict(state)
    assert take(same, 2) == expected
    assert same.state_dict()["rows"] == "numbers"
    assert caplog.text == ""

    with pytest.raises(
        ValueError, match="rows=tokens of before, this run has numbers; use the same data files"
    ):
        BatchLoader(Numbers(8, tokens="others"), 2, shuffle=True, seed=0).load_state_dict(state)

    # A template that reads the clock has rendered other tokens for the same rows, so there is nothing to
    # compare.
    dated = BatchLoader(Numbers(8, tokens=None), 2, shuffle=True, seed=0)
    dated.load_state_dict(state)
    assert take(dated, 2) == expected
    assert "whether the data files are the same cannot be verified" in caplog.text
    with pytest.raises(ValueError, match="num_rows=8, this run has 9"):
        BatchLoader(Numbers(9, tokens=None), 2, shuffle=True, seed=0).load_state_dict(state)
