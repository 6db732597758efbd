"""Ragged rows compared with the padded tensors that they represent, with NaN wherever values must not be
read."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.batch import ragged
from megarl.batch.arrays import same
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import KeptMemory, RaggedTensor, new_values
from megarl.batch.token_rows import with_prompt_rows

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=7)
NAN = float("nan")


def padded_rows(lengths: list[int], width: int = 6, beyond: float = 0.0, on_left: bool = False) -> Tensor:
    """Return (B, width): row b has the values 10 b + 1, 10 b + 2, ..."""
    rows = torch.full((len(lengths), width), beyond)
    for row, length in enumerate(lengths):
        rows[row, width - length if on_left else 0 :][:length] = 10.0 * row + torch.arange(1.0, length + 1)
    return rows


def ragged_rows(lengths: list[int], on_left: bool = False) -> RaggedTensor:
    return RaggedTensor.from_padded(
        padded_rows(lengths, beyond=NAN, on_left=on_left), torch.tensor(lengths), on_left=on_left
    )


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, on_left=st.booleans(), seed=st.integers(0, 99))
def test_every_operation_is_that_of_padded_tensors(lengths: list[int], on_left: bool, seed: int) -> None:
    expected = padded_rows(lengths, on_left=on_left)
    found = ragged_rows(lengths, on_left)
    assert found.shape == (len(lengths), max(lengths))
    assert torch.equal(found.padded(6), expected)
    generator = torch.Generator().manual_seed(seed)
    picked = torch.randint(0, len(lengths), (5,), generator=generator)
    part = slice(seed % len(lengths), None)

    for rows in (picked, part):
        view = found.select(rows)
        assert torch.equal(view.padded(6), expected[rows])
        assert torch.equal(view.packed().padded(6), expected[rows])
        assert len(view.packed().values) == sum(
            {row: lengths[row] for row in torch.arange(len(lengths))[rows].tolist()}.values()
        )
        assert view.flat().tolist() == [value for row in view.each() for value in row.tolist()]

    parts = [found.select(picked), found.select(part)]
    joined = RaggedTensor.concat(parts)
    assert torch.equal(joined.padded(6), torch.cat([expected[picked], expected[part]]))
    assert joined.select(torch.arange(5)) == found.select(picked)
    order = torch.randperm(len(joined), generator=generator)
    gathered = RaggedTensor.gather(parts, order.tolist())
    assert gathered == joined.select(order)
    assert gathered.is_packed


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS)
def test_blocks_are_all_rows_in_order_and_can_be_written(lengths: list[int]) -> None:
    rows = ragged_rows(lengths)
    written = RaggedTensor.empty(rows, torch.float64)
    for block in rows.blocks():
        written[block] = rows[block].double() * 2
    assert torch.equal(written.padded(6), padded_rows(lengths).double() * 2)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS)
def test_blocks_of_like_length_are_all_rows(lengths: list[int]) -> None:
    rows = ragged_rows(lengths)
    written = RaggedTensor.empty(rows, torch.float64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "_CACHED_ELEMENTS", 8)
        blocks = list(rows.blocks_of_like_length())

    for block in blocks:
        written[block] = rows[block].double() * 2
        assert len(block) == 1 or rows[block].numel() <= 8

    assert torch.equal(written.padded(6), padded_rows(lengths).double() * 2)


def test_slots_are_rows_that_share_their_memory() -> None:
    slots = torch.arange(6.0).view(2, 3)
    rows = RaggedTensor.of_slots(slots)
    rows[torch.tensor([1])] = torch.tensor([[7.0, 8.0, 9.0]])
    assert slots.tolist() == [[0.0, 1.0, 2.0], [7.0, 8.0, 9.0]]


def test_blocks_fit_the_cache() -> None:
    column = RaggedTensor.constant(1.0, torch.tensor([100_000, 100_000, 10, 10, 200_000, 5]), torch.float32)
    assert [(rows.start, rows.stop) for rows in column.blocks()] == [(0, 1), (1, 4), (4, 5), (5, 6)]


def test_what_rows_share_is_sent_once() -> None:
    """Samples of a prompt share its tokens, and a constant column stores its values once."""
    prompts = RaggedTensor.of_rows([[1, 2, 3], [4, 5]], torch.int32, padding=9, on_left=True)
    batch = DataProto.from_dict(
        {"prompts": prompts, "ones": RaggedTensor.constant(1, torch.tensor([2, 4]), torch.int32)},
        {"uid": ["a", "b"]},
    ).repeat(3)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(batch[1:], protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(stream, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert same(arrived.columns, batch[1:].columns)
    assert [len(arrived.ragged[key].values) for key in ("prompts", "ones")] == [5, 4]
    assert arrived.tensors["prompts"].tolist() == [[1, 2, 3]] * 2 + [[9, 4, 5]] * 3
    assert arrived.non_tensor_batch["uid"].tolist() == list("aabbb")


def tokens() -> DataProto:
    return DataProto.from_dict(
        {
            "prompts": RaggedTensor.of_rows([[7], [8, 9]], torch.int32, padding=3, on_left=True),
            "responses": RaggedTensor.of_rows([[5, 6], [4]], torch.int32, padding=3),
            "values": RaggedTensor.from_padded(torch.tensor([[0.5, 1.5], [2.5, NAN]]), torch.tensor([2, 1])),
            "score": torch.tensor([1.0, 2.0]),
        },
        {"uid": ["a", "b"]},
        {"step": 1},
    )


def test_a_batch_works_on_rows_of_tokens_as_on_others(tmp_path) -> None:
    batch = tokens()
    assert same(DataProto.from_bytes(batch.to_bytes()).columns, batch.columns)
    assert same(DataProto.concat(batch.chunk(2)).columns, batch.columns)
    batch.repeat(2).save_to_disk(tmp_path / "batch")
    assert same(DataProto.load_from_disk(tmp_path / "batch").columns, batch.repeat(2).columns)
    assert batch[1].batch["responses"].tolist() == [4]
    assert batch.select(["values"], []).union(batch.select(["score"])).columns.keys() == {"values", "score"}
    assert len(batch.select(["values"], [])) == 2
    assert same(batch.union(tokens()).columns, batch.columns)

    with pytest.raises(ValueError, match="tensor 'responses' has two different values"):
        batch.union(
            DataProto.from_dict({"responses": batch.ragged["responses"].select(torch.tensor([1, 0]))})
        )

    with pytest.raises(ValueError, match="'values' has 2 rows but 'a' has 3"):
        DataProto.from_dict({"a": torch.zeros(3), "values": batch.ragged["values"]})
    with pytest.raises(
        ValueError, match=r"'values' has rows of tokens torch.float32, .* in part 0 and rows of \(2,\)"
    ):
        DataProto.concat(
            [
                batch.select(["values"]),
                DataProto.from_dict({"values": torch.zeros(2, 2)}, batch.non_tensor_batch),
            ]
        )

    assert batch.reorder([1, 0]).tensors["values"].tolist() == [[2.5, 0.0], [0.5, 1.5]]
    assert batch.rename("values", "returns").pop(["returns", "score"]).columns.keys() == {"returns", "score"}
    assert batch.columns.keys() == {"prompts", "responses"}


def test_padded_views_have_the_documented_shapes_and_dtypes() -> None:
    tensors = tokens().tensors
    expected = {
        "prompts": [[3, 7], [8, 9]],
        "responses": [[5, 6], [4, 3]],
        "prompt_attention_mask": [[0, 1], [1, 1]],
        "input_ids": [[3, 7, 5, 6], [8, 9, 4, 3]],
        "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]],
        "position_ids": [[0, 0, 1, 2], [0, 1, 2, 2]],
    }
    assert {key: tensors[key].tolist() for key in expected} == expected
    assert {tensors[key].dtype for key in expected} == {torch.int64}
    assert tensors["values"].tolist() == [[0.5, 1.5], [2.5, 0.0]]
    assert tensors.keys() == {"prompts", "responses", "values", "score"}
    with pytest.raises(KeyError):
        tensors["log_probs"]


def test_writing_to_a_padded_copy_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        tokens().tensors["values"][0, 0] = 1.0
    tokens().tensors["score"][0] = 1.0  # stored as a tensor, so it can be written


@pytest.mark.parametrize(("shape", "lengths"), [((2, 3), [1, 4]), ((2, 3), [1]), ((2, 3, 1), [1, 1])])
def test_a_tensor_that_cannot_hold_the_rows_is_refused(shape: tuple[int, ...], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3.*\) does not contain"):
        RaggedTensor.from_padded(torch.zeros(shape), torch.tensor(lengths))


def test_rows_come_from_lists_and_arrays() -> None:
    made = RaggedTensor.of_rows([[1, 2], np.array([3], dtype=np.int64), []], torch.int32)
    assert (made.padded().tolist(), made.dtype) == ([[1, 2], [3, 0], [0, 0]], torch.int32)
    assert RaggedTensor.of_rows([], torch.int32).padded().shape == (0, 0)


def listed(batch: DataProto) -> dict[str, list[list[float]]]:
    return {key: [row.tolist() for row in column.each()] for key, column in batch.ragged.items()}


ROWS = {
    "prompts": [[7], [8, 9]],
    "responses": [[5, 6], [4]],
    "response_mask": [[True, False], [True]],
    "advantages": [[1.0, 2.0], [3.0]],
    "values": [[0.5, 1.5], [2.5]],
}
PADDED = {
    "input_ids": torch.tensor([[1, 7, 5, 6], [8, 9, 4, 1]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
    "response_mask": torch.tensor([[True, False], [True, False]]),
    "advantages": torch.tensor([[1.0, 2.0], [3.0, NAN]]),
    "values": torch.tensor([[0.5, 1.5, NAN], [2.5, NAN, NAN]]),  # any width that fits the responses
    "score": torch.tensor([1.0, 2.0]),
}


def test_columns_that_a_user_has_padded_become_rows_of_tokens() -> None:
    """A user mask and user advantages, together with ragged rows, are converted in whatever order the batch
    gets them. The mask has a gap, and is shorter than the response."""
    own = {key: PADDED[key] for key in ("response_mask", "advantages")}
    for batch in (
        tokens().union(DataProto.from_dict(own)),
        DataProto.from_dict(own).union(tokens()),
        DataProto.from_dict({**own, **tokens().columns}),
        DataProto(ragged=tokens().ragged, batch=DataProto.from_dict(own).batch),
    ):
        assert listed(batch) == ROWS
        assert batch.ragged["response_mask"].dtype == torch.bool
        assert batch.tensors["advantages"].tolist() == [[1.0, 2.0], [3.0, 0.0]]

    made = tokens().union(DataProto.from_dict(own))
    assert made.columns["score"] is not None
    assert made.tensors["score"].tolist() == [1.0, 2.0]
    renamed = tokens().union(DataProto.from_dict({"mine": PADDED["advantages"]})).rename("mine", "advantages")
    assert listed(renamed)["advantages"] == ROWS["advantages"]

    with pytest.raises(
        ValueError,
        match=r"'advantages' does not match the batch's responses: a tensor of shape \(2, 1\) does not contain",
    ):
        tokens().union(DataProto.from_dict({"advantages": torch.zeros(2, 1)}))


def test_a_batch_that_a_user_has_padded_becomes_rows_of_tokens() -> None:
    """Columns that follow from the tokens are dropped, and provided by the padded view."""
    following = {"position_ids": torch.full((2, 4), 5), "responses": torch.full((2, 2), 5)}
    batch = DataProto.from_dict({**PADDED, **following})
    assert listed(batch) == ROWS
    assert batch.columns.keys() == ROWS.keys() | {"score"}
    assert batch.tensors["input_ids"].tolist() == [[0, 7, 5, 6], [8, 9, 4, 0]]
    assert torch.equal(batch.tensors["attention_mask"], PADDED["attention_mask"])
    assert batch.tensors["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 2]]
    assert listed(DataProto.from_bytes(batch.to_bytes())) == ROWS
    assert listed(pickle.loads(pickle.dumps(batch))) == ROWS

    with pytest.raises(
        ValueError,
        match="row 1 of the batch: attention_mask has 1 prompt and 1 response token, not contiguous",
    ):
        DataProto.from_dict({**PADDED, "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]])})


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([0, 0, 0, 1, 1, 0], "0 prompt and 2 response"),
        ([1, 1, 0, 1, 1, 0], "2 prompt and 2 response"),  # padded on the right
        ([0, 1, 1, 0, 1, 1], "2 prompt and 2 response"),  # a gap after the prompt
        ([1, 0, 1, 1, 0, 0], "2 prompt and 1 response"),
    ],
)
def test_wrong_padding_names_the_row(mask: list[int], says: str) -> None:
    padded = {
        "input_ids": torch.ones(2, 6, dtype=torch.int64),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0], mask]),
        "response_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=f"row 1 of the batch: attention_mask has {says}"):
        DataProto.from_dict(padded)


def test_padded_responses_may_be_empty() -> None:
    padded = {
        "input_ids": torch.tensor([[3, 4, 0], [0, 5, 6]]),
        "attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]]),
        "response_mask": torch.tensor([[False], [True]]),
        "advantages": torch.tensor([[NAN], [2.0]]),
    }
    batch = DataProto.from_dict(padded)
    assert listed(batch)["responses"] == [[], [6]]
    assert listed(batch)["advantages"] == [[], [2.0]]
    assert listed(batch[:1])["response_mask"] == [[]]
    assert batch[:1].tensors["advantages"].shape == (1, 0)


def test_tensors_without_tokens_beside_them_stay_as_they_are() -> None:
    """The lengths of the responses are still unknown."""
    batch = DataProto.from_dict({"advantages": PADDED["advantages"], "values": torch.zeros(2)})
    assert not batch.ragged
    assert batch.columns.keys() == {"advantages", "values"}


def test_prompts_that_a_user_has_padded_are_taken_in() -> None:
    rows = RaggedTensor.of_rows([[7], [8, 9]], torch.int32, on_left=True)
    padded = {
        "prompts": rows.padded().long(),
        "prompt_attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "score": torch.zeros(2),
    }
    assert with_prompt_rows({"prompts": rows})["prompts"] is rows
    made = with_prompt_rows(padded)
    assert made.keys() == {"prompts", "score"}
    assert made["prompts"] == rows

    with pytest.raises(
        ValueError, match=r"needs `prompts` as rows of tokens .*; it has \['prompts', 'score'\]"
    ):
        with_prompt_rows({key: padded[key] for key in ("prompts", "score")})

    for mask in ([[1, 0], [1, 1]], [[0, 0], [1, 1]]):
        with pytest.raises(
            ValueError,
            match=r"row 0 of the prompts: prompt_attention_mask has [01] tokens?, not contiguous",
        ):
            with_prompt_rows({**padded, "prompt_attention_mask": torch.tensor(mask)})


# ---- memory of large buffers: which blocks are reused, and when

BLOCK_BYTES = 1000


def test_memory_is_lent_again_only_when_nobody_holds_it() -> None:
    memory = KeptMemory()
    lent = memory.lend(BLOCK_BYTES)
    lent[:] = 1
    row = torch.from_numpy(lent).view(torch.float32)[3:5]  # a row of the column outlives it
    place = lent.ctypes.data
    del lent
    other = memory.lend(BLOCK_BYTES)
    other[:] = 2
    assert row.view(torch.uint8).tolist() == [1] * 8
    del row
    assert memory.num_kept >= BLOCK_BYTES
    again = memory.lend(BLOCK_BYTES - 9)  # columns differ slightly between steps
    assert (again.ctypes.data, len(again), memory.num_kept) == (place, BLOCK_BYTES - 9, 0)


def test_no_more_is_kept_than_was_in_use_at_a_time() -> None:
    memory = KeptMemory()
    columns = [memory.lend(BLOCK_BYTES) for _ in range(4)]
    del columns[:]
    assert memory.num_kept >= 4 * BLOCK_BYTES
    larger = memory.lend(3 * BLOCK_BYTES)  # no kept block is large enough
    assert len(larger) == 3 * BLOCK_BYTES
    assert memory.num_kept <= BLOCK_BYTES * 9 // 8
    smaller = memory.lend(BLOCK_BYTES // 2)  # a kept block would be too large
    assert len(smaller) == BLOCK_BYTES // 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.bfloat16, torch.float64])
def test_large_memory_is_of_every_kind_that_torch_has(dtype: torch.dtype) -> None:
    made = new_values((1 << 22) + 3, dtype, torch.device("cpu"))
    assert (made.dtype, made.shape) == (dtype, ((1 << 22) + 3,))
    assert made.fill_(1)[-1] == 1
