import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.masked import aggregate, denominator
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
