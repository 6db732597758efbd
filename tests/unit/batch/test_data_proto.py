"""DataProto: rows, columns, meta information. Expected values are written out by hand."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from megarl.batch.arrays import same
from megarl.batch.data_proto import DataProto, DataProtoFuture


def make_batch(num_rows: int = 4, **meta_info: object) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(num_rows * 2).reshape(num_rows, 2), "score": torch.arange(num_rows) / 2},
        {"uid": [f"u{row}" for row in range(num_rows)], "turns": [[row] * row for row in range(num_rows)]},
        {"temperature": 0.5, **meta_info},
    )


def rows_of(batch: DataProto) -> list[str]:
    """Return the uids, after checking that all other columns are in the same order."""
    numbers = [int(uid[1:]) for uid in batch.non_tensor_batch["uid"]]
    assert batch.batch["ids"].tolist() == [[2 * n, 2 * n + 1] for n in numbers]
    assert batch.batch["score"].tolist() == [n / 2 for n in numbers]
    assert batch.non_tensor_batch["turns"].tolist() == [[n] * n for n in numbers]
    return numbers


def test_construction_keeps_rows_that_are_lists_as_rows() -> None:
    batch = DataProto.from_single_dict(
        {"a": torch.zeros(2, 3), "names": ["x", "y"], "pairs": np.array([[1, 2], [3, 4]])}
    )
    assert len(batch) == 2
    assert batch.non_tensor_batch["pairs"].shape == (2,)
    assert batch.non_tensor_batch["pairs"][1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("tensors", "arrays", "message"),
    [
        ({"a": torch.zeros(4, 2), "b": torch.zeros(3)}, {}, r"'b' has 3 rows but 'a' has 4"),
        ({"a": torch.zeros(4)}, {"uid": ["x"]}, r"'uid' has 1 row but 'a' has 4"),
        ({"a": torch.tensor(1.0)}, {}, r"'a' is a scalar"),
        ({"a": torch.zeros(1)}, {"a": ["x"]}, r"\['a'\] are given both as tensors and as arrays"),
    ],
)
def test_inconsistent_rows_are_refused_by_name(tensors: dict, arrays: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataProto.from_dict(tensors, arrays)


def test_the_constructor_checks_too() -> None:
    with pytest.raises(ValueError, match="'uid' has 3 rows but 'a' has 2"):
        DataProto(
            TensorDict({"a": torch.zeros(2)}, batch_size=[2]),
            {"uid": np.array(["x", "y", "z"], dtype=object)},
        )
    with pytest.raises(ValueError, match="one-dimensional object array"):
        DataProto(None, {"uid": np.zeros((2, 2))})


def test_a_batch_of_meta_information_only_is_empty() -> None:
    assert len(DataProto(meta_info={"step": 1})) == 0
    assert len(DataProto.from_dict(non_tensors={"uid": ["x", "y"]})) == 2


def test_a_batch_without_columns_keeps_its_rows() -> None:
    emptied = make_batch().select([], [])
    popped = make_batch(step=1)
    popped.pop(["ids", "score"])
    assert (len(popped), popped.batch) == (4, None)  # the arrays determine the number of rows
    popped.pop([], ["uid", "turns"])

    for batch in (
        emptied,
        popped,
        pickle.loads(pickle.dumps(emptied)),
        DataProto.from_bytes(emptied.to_bytes()),
    ):
        assert (len(batch), batch.tensors, batch.non_tensor_batch) == (4, {}, {})

    assert (len(emptied[1:3]), len(emptied.repeat(2)), [len(part) for part in emptied.chunk(2)]) == (
        2,
        8,
        [2, 2],
    )
    assert (
        len(DataProto.concat([emptied, emptied])),
        len(emptied.union(popped)),
        len(emptied.union(make_batch())),
    ) == (8, 4, 4)
    with pytest.raises(ValueError, match=re.escape("the batches have [4, 3] rows")):
        emptied.union(make_batch(3))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(None, None, 2), [0, 2]),
        ([3, 0, 3], [3, 0, 3]),
        ([-1], [3]),
        (np.array([True, False, False, True]), [0, 3]),
        (torch.tensor([False, True, False, False]), [1]),
        (torch.tensor([2, 1]), [2, 1]),
        ([], []),
    ],
)
def test_rows_are_picked_in_every_column(index: object, expected: list[int]) -> None:
    picked = make_batch()[index]
    assert rows_of(picked) == expected
    assert picked.meta_info == {"temperature": 0.5}


def test_an_int_gives_one_row() -> None:
    item = make_batch()[-2]
    assert item.batch["ids"].tolist() == [4, 5]
    assert item.non_tensor_batch == {"uid": "u2", "turns": [2, 2]}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([4], "row 4 does not exist"),
        ([True], "mask of 1 values"),
        ([0.5], "not by float64"),
        (torch.zeros(1, 1), "one-dimensional"),
    ],
)
def test_rows_that_do_not_exist_are_refused(index: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch().select_idxs(index)


def test_select_pop_and_rename() -> None:
    batch = make_batch()
    chosen = batch.select(["ids"], ["uid"], [])
    assert (set(chosen.tensors), set(chosen.non_tensor_batch), chosen.meta_info) == ({"ids"}, {"uid"}, {})
    assert set(batch.select(deepcopy=True).tensors) == {"ids", "score"}
    popped = batch.pop(["ids"], ["turns"], ["temperature"])
    assert (set(popped.tensors), set(popped.non_tensor_batch), popped.meta_info) == (
        {"ids"},
        {"turns"},
        {"temperature": 0.5},
    )
    assert (set(batch.tensors), set(batch.non_tensor_batch), batch.meta_info) == ({"score"}, {"uid"}, {})
    assert batch.rename("score", "reward").tensors["reward"].tolist() == [0, 0.5, 1, 1.5]
    assert popped.rename("ids", "score") is popped
    assert len(popped.pop(["score"], ["turns"])) == 4
    assert (len(popped), popped.tensors) == (4, {})


def test_missing_and_taken_names_are_refused_and_change_nothing() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"no tensor \['idz'\]; it has \['ids', 'score'\]"):
        batch.pop(["ids", "idz"])
    with pytest.raises(ValueError, match=r"no array \['nope'\]"):
        batch.select(non_tensor_batch_keys=["nope"])
    with pytest.raises(ValueError, match="'ids' cannot become 'score'"):
        batch.rename("ids", "score")
    with pytest.raises(ValueError, match="'ids' cannot become 'uid'"):
        batch.rename(["ids"], ["uid"])
    with pytest.raises(ValueError, match="1 old names and 2 new"):
        batch.rename(["ids"], ["a", "b"])
    assert rows_of(batch) == [0, 1, 2, 3]
    assert batch.rename(["ids", "score"], ["score", "ids"]).tensors["ids"].tolist() == [0, 0.5, 1, 1.5]


def test_union_joins_columns_and_refuses_two_values() -> None:
    batch = make_batch(epoch=1)
    nan = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    other = DataProto.from_dict(
        {"ids": batch.batch["ids"].clone(), "values": nan}, meta_info={"epoch": 1, "step": 2}
    )
    joined = batch.union(
        other, DataProto.from_dict({"values": nan.clone()}), DataProto(meta_info={"seed": 3})
    )
    assert set(joined.tensors) == {"ids", "score", "values"}
    assert joined.meta_info == {"temperature": 0.5, "epoch": 1, "step": 2, "seed": 3}
    assert "values" not in batch.tensors
    with pytest.raises(ValueError, match="tensor 'ids' has two different values"):
        batch.union(DataProto.from_dict({"ids": batch.batch["ids"] + 1}))
    with pytest.raises(ValueError, match="meta_info 'temperature' has two different values: 0.5 and 1.0"):
        batch.union(DataProto(meta_info={"temperature": 1.0}))
    with pytest.raises(ValueError, match=r"\[4, 3\] rows"):
        batch.union(make_batch(3))


class ReadyFuture(DataProtoFuture):
    gathered = 0

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch

    def get(self, timeout: float | None = None) -> DataProto:
        return self.batch

    @classmethod
    def gather(cls, futures: list, timeout: float | None = None) -> list[DataProto]:
        cls.gathered += 1
        return [future.get() for future in futures]


def test_union_waits_for_its_futures_together() -> None:
    first, second = (
        ReadyFuture(DataProto.from_dict({key: torch.ones(4)})) for key in ("values", "ref_log_prob")
    )
    joined = make_batch().union(first, DataProto(meta_info={"step": 1}), second)
    assert {"values", "ref_log_prob"} <= set(joined.tensors)
    assert ReadyFuture.gathered == 1


def test_concat_is_the_inverse_of_chunk_and_split() -> None:
    batch = make_batch()
    assert [rows_of(part) for part in batch.chunk(2)] == [[0, 1], [2, 3]]
    assert [rows_of(part) for part in batch.split(3)] == [[0, 1, 2], [3]]
    assert rows_of(DataProto.concat(batch.split(3))) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="4 rows cannot be split into 3 equal parts"):
        batch.chunk(3)


def test_concat_refuses_what_does_not_match() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"part 0 and part 1 do not both have \['turns'\]"):
        DataProto.concat([batch, batch.select(non_tensor_batch_keys=["uid"])])
    wide = batch.select(["score"]).union(DataProto.from_dict({"ids": torch.zeros(4, 3, dtype=torch.int64)}))

    with pytest.raises(
        ValueError, match=r"'ids' has rows of \(2,\) torch.int64 in part 0 and rows of \(3,\)"
    ):
        DataProto.concat([batch, wide])

    with pytest.raises(ValueError, match="'temperature' has two different values"):
        DataProto.concat([batch, DataProto(batch.batch, batch.non_tensor_batch, {"temperature": 0.7})])
    merged = DataProto.concat([make_batch(a=1), make_batch(b=[1.0, float("nan")])])
    assert merged.meta_info["a"] == 1
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProto.concat([])


def test_reorder_and_repeat() -> None:
    batch = make_batch()
    assert rows_of(batch.reorder(torch.tensor([2, 0, 3, 1]))) == [2, 0, 3, 1]
    assert rows_of(batch) == [2, 0, 3, 1]
    with pytest.raises(ValueError, match="not a permutation"):
        batch.reorder([0, 0, 1, 2])
    assert rows_of(make_batch(2).repeat(2)) == [0, 0, 1, 1]
    assert rows_of(make_batch(2).repeat(2, interleave=False)) == [0, 1, 0, 1]


def test_iterator_order_depends_on_the_seed_alone() -> None:
    batch = make_batch(6)
    assert [rows_of(part) for part in batch.make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [4, 5]] * 2
    first, second = ([rows_of(part) for part in batch.make_iterator(3, epochs=2, seed=1)] for _ in range(2))
    assert first == second
    assert first != [rows_of(part) for part in batch.make_iterator(3, epochs=2, seed=2)]
    assert sorted(first[0] + first[1]) == sorted(first[2] + first[3]) == list(range(6))
    assert first[:2] != first[2:]
    with pytest.raises(ValueError, match="the batch has 6 rows, not a multiple of mini_batch_size=4"):
        batch.make_iterator(4)


def test_to_moves_in_place() -> None:
    batch = make_batch()
    assert batch.to("meta") is batch
    assert batch.batch["ids"].device.type == "meta"


def test_same_tells_apart_what_looks_alike() -> None:
    assert same({"a": [1, (2.0, float("nan"))]}, {"a": [1, (2.0, float("nan"))]})
    assert same(np.array([1.0, np.nan]), np.array([1.0, np.nan]))
    assert not same([1], (1,))
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not same(torch.ones(2), [1.0, 1.0])
    assert not same(np.ones(2), np.ones(3))


def test_a_deep_copy_shares_nothing() -> None:
    batch = make_batch()
    copied = copy.deepcopy(batch)
    copied.batch["ids"][0] = 99
    assert rows_of(batch) == [0, 1, 2, 3]
