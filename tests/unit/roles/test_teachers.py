"""Teachers score the rows of their data sources, and the results are in the order of the batch."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.controller.futures import DerivedFuture
from megarl.roles.models import Scorer, Teachers

ROWS = [[1], [2, 3], [4, 5, 6], [7], [8, 9]]


class FakeTeacher:
    """Returns each token times a factor, and each token twice as its most likely tokens."""

    def __init__(self, factor: int) -> None:
        self._factor = factor
        self.num_rows: list[int] = []

    def log_probs(self, batch: DataProto) -> DerivedFuture:
        self.num_rows.append(len(batch))
        rows = [row.tolist() for row in batch.ragged["responses"].each()]

        def column(values: list[list[int]]) -> RaggedTensor:
            return RaggedTensor.of_rows(values, torch.int32)

        scores = {
            "teacher_log_prob": column([[self._factor * token for token in row] for row in rows]),
            "teacher_top_ids": column([[token for token in row for _ in range(2)] for row in rows]),
        }
        return DerivedFuture([], lambda parts: DataProto.from_dict(scores))


def batch_of(*sources: str) -> DataProto:
    rows = ROWS[: len(sources)]
    columns = {"responses": RaggedTensor.of_rows(rows, torch.int32)}
    return DataProto.from_dict(columns, {"data_source": list(sources)})


def teachers(other: Any = None) -> tuple[Teachers, FakeTeacher, FakeTeacher]:
    math, code = FakeTeacher(10), FakeTeacher(100)
    by_source = {"gsm8k": math, "aime": math, "apps": code}
    made = Teachers(by_source=cast("dict[str, Scorer]", by_source), other=other)
    return made, math, code


def test_rows_are_routed_and_returned_in_order() -> None:
    made, math, code = teachers()
    found = made.log_probs(batch_of("apps", "gsm8k", "apps", "aime", "gsm8k")).get()
    rows = [row.tolist() for row in found.ragged["teacher_log_prob"].each()]
    assert rows == [[100], [20, 30], [400, 500, 600], [70], [80, 90]]
    tokens = [row.tolist() for row in found.ragged["teacher_top_ids"].each()]
    assert tokens == [[token for token in row for _ in range(2)] for row in ROWS]
    assert (math.num_rows, code.num_rows) == ([3], [2])


def test_a_teacher_without_rows_is_not_called() -> None:
    made, math, code = teachers()
    made.log_probs(batch_of("aime", "gsm8k"))
    assert (math.num_rows, code.num_rows) == ([2], [])


def test_other_data_sources() -> None:
    rest = FakeTeacher(1)
    found = teachers(rest)[0].log_probs(batch_of("essays", "apps")).get()
    assert [row.tolist() for row in found.ragged["teacher_log_prob"].each()] == [[1], [200, 300]]

    with pytest.raises(ValueError, match=r"row 1 of the batch has data_source 'essays', which no teacher"):
        teachers()[0].log_probs(batch_of("apps", "essays"))
    without = DataProto.from_dict({"responses": RaggedTensor.of_rows(ROWS, torch.int32)})
    with pytest.raises(ValueError, match="the batch has no data_source"):
        teachers()[0].log_probs(without)
