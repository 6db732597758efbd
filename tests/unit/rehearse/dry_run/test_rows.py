"""Routes in a dry run: each token goes to the router's number of distinct experts, evenly or to one twice as often."""

from __future__ import annotations

import pytest
from torch import Tensor

from megarl.rehearse.dry_run.rows import even_routes, uneven_routes


def counts(routes: Tensor, number: int) -> list[int]:
    """Return the number of tokens of each expert."""
    assert all(len(set(row)) == len(row) for row in routes.tolist())  # a token goes to an expert once
    return [int((routes == expert).sum()) for expert in range(number)]


@pytest.mark.parametrize(
    ("tokens", "number", "chosen"), [(12, 6, 2), (128, 128, 8), (5, 4, 4), (7, 3, 2), (1, 8, 2)]
)
def test_routes(tokens: int, number: int, chosen: int) -> None:
    share = tokens * chosen / number
    even = counts(even_routes(tokens, number, chosen), number)
    assert sum(even) == tokens * chosen
    assert max(even) - min(even) <= 1
    uneven = counts(uneven_routes(tokens, number, chosen), number)
    assert sum(uneven) == tokens * chosen
    assert uneven[0] == min(tokens, int(2 * share))
    assert max(uneven[1:]) - min(uneven[1:]) <= 1
