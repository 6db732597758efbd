import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import plan_micro_batches, row_cost

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
LIMITS = st.one_of(st.fixed_dictionaries({"sequences": st.integers(1, 6)}), st.fixed_dictionaries({"max_tokens": st.integers(40, 130)}))


def real_rows(rank):
    return [row for micro_batch in rank.micro_batches if not micro_batch.is_filler for row in micro_batch.rows]


def rank_costs(plan, lengths):
    cost = row_cost(np.asarray(lengths))
    return [float(cost[real_rows(rank)].sum()) for rank in plan.ranks]


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, dp_size=st.integers(1, 6), limits=LIMITS, multiple_of=st.sampled_from([1, 1, 2, 4]))
def test_every_plan_is_valid(lengths, dp_size, limits, multiple_of):
    plan = plan_micro_batches(lengths, dp_size, **limits, multiple_of=multiple_of)
    assert len(plan.ranks) == dp_size
    assert {len(rank.micro_batches) for rank in plan.ranks} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple_of == 0
    assert sorted(row for rank in plan.ranks for row in real_rows(rank)) == list(range(len(lengths)))
    micro_batches = [micro_batch for rank in plan.ranks for micro_batch in rank.micro_batches]
    for micro_batch in micro_batches:
        assert micro_batch.rows
        assert len(micro_batch.rows) <= limits.get("sequences", len(lengths))
        assert sum(lengths[row] for row in micro_batch.rows) <= limits.get("max_tokens", sum(lengths))
    if any(micro_batch.is_filler for micro_batch in micro_batches):  # only where there are not enough rows to go round
        assert all(len(micro_batch.rows) == 1 for micro_batch in micro_batches)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, dp_size=st.integers(1, 6), limits=LIMITS)
def test_order_is_restored_exactly_and_plans_repeat(lengths, dp_size, limits):
    plan = plan_micro_batches(lengths, dp_size, **limits)
    outputs = np.array([row * 10 for rank in plan.ranks for row in rank.rows])
    assert outputs[plan.restore_order()].tolist() == [row * 10 for row in range(len(lengths))]
    assert plan == plan_micro_batches(lengths, dp_size, **limits)


def test_local_micro_batches_index_the_rows_of_the_rank():
    plan = plan_micro_batches([5, 4, 3, 2, 1, 6, 7], 2, sequences=2)
    for rank in plan.ranks:
        assert [tuple(rank.rows[i] for i in local) for local in rank.local_micro_batches] == [m.rows for m in rank.micro_batches]


def test_by_hand():
    """Longest first: 8 to rank 0, 6 to rank 1, 5 to rank 1, 3 to rank 0 (11 each); the largest micro-batch runs first."""
    plan = plan_micro_batches([3, 8, 5, 6], 2, sequences=1)
    assert [[m.rows for m in rank.micro_batches] for rank in plan.ranks] == [[(1,), (0,)], [(3,), (2,)]]
    assert plan.restore_order() == [1, 0, 3, 2]


def test_fewer_rows_than_ranks_are_filled_up_with_the_shortest_row():
    plan = plan_micro_batches([7, 3], 4, max_tokens=10)
    assert plan.num_micro_batches == 1
    fillers = [rank.micro_batches[0].rows for rank in plan.ranks if rank.micro_batches[0].is_filler]
    assert fillers == [(1,), (1,)]
    assert len(plan.restore_order()) == 2


def test_short_rows_are_moved_before_a_filler_is_used():
    """Rank 0 has its fill of work with one long row, but its second micro-batch gets a real row, not a repeated one."""
    plan = plan_micro_batches([8000] + [100] * 10, 2, sequences=5)
    assert plan.num_micro_batches == 2
    assert not any(m.is_filler for rank in plan.ranks for m in rank.micro_batches)


def test_long_rows_weigh_more_than_their_tokens():
    """One row of 40k tokens and eight of 5k: the same tokens, but the long row's attention costs more, so it stands alone."""
    lengths = [40_000] + [5_000] * 16
    plan = plan_micro_batches(lengths, 2, max_tokens=80_000)
    costs = rank_costs(plan, lengths)
    assert max(costs) / min(costs) < 1.1
    tokens = [sum(lengths[row] for row in real_rows(rank)) for rank in plan.ranks]
    assert max(tokens) / min(tokens) > 1.1


@pytest.mark.parametrize("limits", [{"max_tokens": 8192}, {"sequences": 8}])
def test_ten_thousand_rows_are_balanced_within_a_percent(limits):
    lengths = np.clip(np.random.default_rng(0).lognormal(6.9, 0.8, 10_000), 8, 4096).astype(int).tolist()
    plan = plan_micro_batches(lengths, 8, **limits)
    costs = rank_costs(plan, lengths)
    assert max(costs) < 1.01 * np.mean(costs)
    if "max_tokens" in limits:
        assert plan.num_micro_batches <= 1 + sum(lengths) / 8192 / 8


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([3, 11, 12], {"max_tokens": 10}, r"row 2 has 12 tokens, more than micro_batch.max_tokens=10 \(2 of 3 rows"),
        ([], {"max_tokens": 10}, "without rows"),
        ([3, 0], {"max_tokens": 10}, "row 1 has length 0"),
        ([3], {}, "exactly one of sequences and max_tokens"),
        ([3], {"sequences": 1, "max_tokens": 10}, "exactly one of sequences and max_tokens"),
        ([3], {"sequences": 0}, "sequences=0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(lengths, arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_micro_batches(lengths, 2, **arguments)
