import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.masked import aggregate, denominator
from megarl.batch.branches import BRANCH, EPISODE_TOKENS, episode_tokens
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import Aggregation
from tests.unit.algorithms import reference
from tests.unit.algorithms.strategies import masks, normal, poison

KINDS = list(Aggregation)
NORM_TOKENS = 4  # used by sequence_mean_token_sum_norm only


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Aggregation.token_mean, 18 / 4),
        (Aggregation.sequence_mean_token_sum, (9 + 9) / 2),
        (Aggregation.sequence_mean_token_mean, (3 + 9) / 2),
        (Aggregation.sequence_mean_token_sum_norm, (9 / 4 + 9 / 4) / 2),
    ],
)
def test_by_hand(kind, expected):
    per_token = torch.tensor([[1.0, 3.0, 5.0], [9.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    assert float(aggregate(per_token, mask, kind, denominator(mask, kind), NORM_TOKENS)) == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(mask=masks(), seed=st.integers(0, 1000))
def test_matches_the_reference_whatever_stands_in_masked_slots(kind, mask, seed):
    x = normal(mask, seed)
    got = float(aggregate(poison(x, mask), mask, kind, denominator(mask, kind), NORM_TOKENS))
    assert got == pytest.approx(
        reference.aggregate(x.tolist(), mask.tolist(), kind.value, NORM_TOKENS) if mask.any() else 0.0,
        abs=1e-12,
    )


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(mask=masks(min_rows=2, max_rows=7), seed=st.integers(0, 1000), cut=st.integers(1, 6))
def test_any_split_adds_up_in_value_and_gradient(kind, mask, seed, cut):
    x = normal(mask, seed).requires_grad_()
    whole_denominator = denominator(mask, kind)
    aggregate(x, mask, kind, whole_denominator, NORM_TOKENS).backward()
    whole = x.grad
    x.grad = None
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    parts = order.split(min(cut, len(mask)))
    sum(aggregate(x[rows], mask[rows], kind, whole_denominator, NORM_TOKENS) for rows in parts).backward()
    torch.testing.assert_close(x.grad, whole)
    assert sum(denominator(mask[rows], kind) for rows in parts) == whole_denominator


@pytest.mark.parametrize("kind", KINDS)
def test_filler_rows_change_nothing(kind):
    mask = torch.tensor([[True, True], [True, False]])
    x = normal(mask, 0)
    padded_mask = torch.cat([mask, torch.zeros(1, 2).bool()])
    padded = torch.cat([x, torch.full((1, 2), 7.0)])
    assert denominator(padded_mask, kind) == denominator(mask, kind)
    whole = aggregate(x, mask, kind, denominator(mask, kind), NORM_TOKENS)
    assert aggregate(padded, padded_mask, kind, denominator(padded_mask, kind), NORM_TOKENS) == whole


def test_a_missing_constant_is_refused():
    with pytest.raises(ValueError, match="norm_tokens is null.*set it to data.max_response_length"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1).bool(), Aggregation.sequence_mean_token_sum_norm, 1.0)


EPISODES = np.array([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (Aggregation.token_mean, [6 / 8, 2 / 8]),
        (Aggregation.sequence_mean_token_sum, [6 / 2, 2 / 2]),
        (Aggregation.sequence_mean_token_mean, [1 / 2, 1 / 2]),
        (Aggregation.sequence_mean_token_sum_norm, [6 / 4 / 2, 2 / 4 / 2]),
    ],
)
def test_an_episode_of_three_rows_is_one_response(kind: Aggregation, weights: list[float]) -> None:
    """Four rows of two tokens. The weight of an episode is the sum of the gradients of its tokens."""
    mask = torch.ones(4, 2, dtype=torch.bool)
    x = torch.zeros(4, 2, requires_grad=True)
    tokens = torch.tensor([6.0, 6.0, 6.0, 2.0])[:, None].expand(4, 2)
    count = denominator(mask, kind, EPISODES)
    assert count == (8 if kind == Aggregation.token_mean else 2)
    aggregate(x, mask, kind, count, NORM_TOKENS, tokens).backward()
    assert x.grad is not None
    assert x.grad.sum(1).split([3, 1])[0].sum().item() == pytest.approx(weights[0])
    assert x.grad[3].sum().item() == pytest.approx(weights[1])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(
    mask=masks(min_rows=2, max_rows=7),
    seed=st.integers(0, 1000),
    cut=st.integers(1, 6),
    ends=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_rows_of_an_episode_have_the_loss_of_one_long_row(kind, mask, seed, cut, ends):
    """Whatever micro-batches the rows are in. The slow version concatenates the rows of each episode."""
    x = normal(mask, seed)
    episodes = np.cumsum([0, *ends[: len(mask) - 1]])
    merged = [
        (list(itertools.chain(*(x[row].tolist() for row in rows))), [*itertools.chain(*mask[rows].tolist())])
        for rows in (np.flatnonzero(episodes == number) for number in range(episodes[-1] + 1))
    ]
    width = max(len(values) for values, _ in merged)
    padding = [width - len(values) for values, _ in merged]
    expected = 0.0
    if mask.any():
        expected = reference.aggregate(
            [values + [0.0] * left for (values, _), left in zip(merged, padding, strict=True)],
            [valid + [False] * left for (_, valid), left in zip(merged, padding, strict=True)],
            kind.value,
            NORM_TOKENS,
        )

    batch = DataProto.from_dict(
        {}, {BRANCH: [row - int(np.argmax(episodes == n)) for row, n in enumerate(episodes)]}
    )
    counted = episode_tokens(batch, RaggedTensor.of_slots(mask)).get(EPISODE_TOKENS)
    tokens = None if counted is None else torch.where(mask, counted[torch.arange(len(mask))], torch.nan)
    count = denominator(mask, kind, episodes)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    got = sum(
        aggregate(
            poison(x[rows], mask[rows]),
            mask[rows],
            kind,
            count,
            NORM_TOKENS,
            None if tokens is None else tokens[rows],
        )
        for rows in order.split(min(cut, len(mask)))
    )
    assert float(got) == pytest.approx(expected, abs=1e-6)
