import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.batch_arithmetic import padded_length
from megarl.data.packing import plan_micro_batches, row_cost

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
LIMITS = st.one_of(
    st.fixed_dictionaries({"sequences": st.integers(1, 6)}),
    st.fixed_dictionaries({"max_tokens": st.integers(40, 130)}),
)


def real_rows(rank):
    return [row for row, is_filler in zip(rank.rows, rank.is_filler, strict=True) if not is_filler]


def real_micro_batches(rank):
    return rank.micro_batches[: len(rank.micro_batches) - rank.num_fillers]


def prompts_of(lengths, num_samples):
    """Return prompts, each shared by a number of consecutive rows, as long as the shortest of them."""
    if num_samples is None:
        return None
    groups = [lengths[row // num_samples * num_samples :][:num_samples] for row in range(len(lengths))]
    return [(row // num_samples, min(group)) for row, group in enumerate(groups)]


def computed(rows, lengths, prompts, measure=int):
    """Return the sum of `measure` over the rows of one micro-batch, counting a shared prompt once."""
    own = [measure(lengths[row]) - (measure(prompts[row][1]) if prompts else 0) for row in rows]
    return sum(own) + sum(map(measure, dict(prompts[row] for row in rows).values()) if prompts else ())


def rank_costs(plan, lengths, prompts=None):
    def cost(tokens):
        return float(row_cost(np.asarray(tokens)))

    micro_batches = [real_micro_batches(rank) for rank in plan.ranks]
    return [sum(computed(rows, lengths, prompts, cost) for rows in rank) for rank in micro_batches]


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    dp_size=st.integers(1, 6),
    limits=LIMITS,
    multiple_of=st.sampled_from([1, 1, 2, 4]),
    num_samples=st.sampled_from([None, 2, 7]),
    context=st.sampled_from([1, 1, 2, 3]),
)
def test_every_plan_is_valid(lengths, dp_size, limits, multiple_of, num_samples, context):
    prompts = prompts_of(lengths, num_samples)
    plan = plan_micro_batches(
        lengths, dp_size, **limits, multiple_of=multiple_of, prompts=prompts, context_parallel_size=context
    )
    assert len(plan.ranks) == dp_size
    assert {len(rank.micro_batches) for rank in plan.ranks} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple_of == 0
    assert sorted(row for rank in plan.ranks for row in real_rows(rank)) == list(range(len(lengths)))
    micro_batches = [micro_batch for rank in plan.ranks for micro_batch in rank.micro_batches]

    for micro_batch in micro_batches:
        assert micro_batch
        assert len(micro_batch) <= limits.get("sequences", len(lengths))
        if "max_tokens" in limits:  # per rank that shares it, including the padding of its parts
            parts = [lengths[row] - (prompts[row][1] if prompts else 0) for row in micro_batch]
            parts += dict(prompts[row] for row in micro_batch).values() if prompts else ()
            assert sum(padded_length(part, context) for part in parts) <= limits["max_tokens"] * context

    # Fillers are used only if there are not enough rows.
    if any(rank.num_fillers for rank in plan.ranks):
        assert all(len(micro_batch) == 1 for micro_batch in micro_batches)


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
        assert [tuple(rank.rows[i] for i in local) for local in rank.local_micro_batches] == [
            *rank.micro_batches
        ]


def test_ranks_that_share_rows_take_a_row_as_long_as_all_their_budgets():
    """Given 4 ranks and 10 tokens each, a micro-batch can have 4 x 8 tokens of the row with 30, but not 4 x 16
    of both."""
    plan = plan_micro_batches([30, 30], 1, max_tokens=10, context_parallel_size=4)
    assert [*plan.ranks[0].micro_batches] == [(0,), (1,)]

    with pytest.raises(
        ValueError, match="row 1 has 41 tokens, more than micro_batch.max_tokens=10 x context_parallel_size=4"
    ):
        plan_micro_batches([30, 41], 1, max_tokens=10, context_parallel_size=4)


def test_by_hand():
    """Longest first: 8 to rank 0, 6 to rank 1, 5 to rank 1, 3 to rank 0 (11 each).

    The largest micro-batch runs first.
    """
    plan = plan_micro_batches([3, 8, 5, 6], 2, sequences=1)
    assert [[*rank.micro_batches] for rank in plan.ranks] == [[(1,), (0,)], [(3,), (2,)]]
    assert plan.restore_order() == [1, 0, 3, 2]


def test_samples_of_a_prompt_stay_together():
    """There are 8 rows of two prompts, and 2 single rows.

    By their own tokens, they would be distributed in turns.
    """
    lengths = [12] * 4 + [11] * 4 + [30, 30]
    prompts = [(0, 8)] * 4 + [(4, 8)] * 4 + [(8, 5), (9, 5)]
    plan = plan_micro_batches(lengths, 2, max_tokens=60, prompts=prompts)
    assert sorted(m for rank in plan.ranks for m in rank.micro_batches) == [
        (0, 1, 2, 3, 8),
        (4, 5, 6, 7, 9),
    ]
    apart = plan_micro_batches(lengths, 2, max_tokens=60)
    assert apart.num_micro_batches == 2  # 152 tokens, compared with 104 with shared prompts


def test_a_prompt_is_split_where_work_or_room_wants_it():
    """One prompt of 10 tokens has 8 responses of 30.

    Each rank gets half of them, and two of a rank's responses do not fit into 60 tokens with the prompt.
    """
    lengths = [40] * 8
    prompts = [(0, 10)] * 8
    plan = plan_micro_batches(lengths, 2, max_tokens=130, prompts=prompts)
    assert [[len(m) for m in rank.micro_batches] for rank in plan.ranks] == [[4], [4]]
    plan = plan_micro_batches(lengths, 2, max_tokens=60, prompts=prompts)
    assert [[len(m) for m in rank.micro_batches] for rank in plan.ranks] == [[1] * 4, [1] * 4]


@pytest.mark.parametrize("num_prompts", [256, 32])
def test_replicas_have_equal_work_although_prompts_are_shared(num_prompts):
    """Lengths are log-normal, with 8 samples per prompt and 8 ranks. Few prompts are computed twice."""
    rng = np.random.default_rng(0)
    prompt_lengths = np.clip(rng.lognormal(6.2, 0.6, num_prompts), 16, 4096).astype(int).repeat(8)
    lengths = (
        prompt_lengths + np.clip(rng.lognormal(7.6, 0.8, num_prompts * 8), 16, 16384).astype(int)
    ).tolist()
    prompts = [(row // 8, length) for row, length in enumerate(prompt_lengths.tolist())]
    plan = plan_micro_batches(lengths, 8, max_tokens=32768, prompts=prompts)
    costs = rank_costs(plan, lengths, prompts)
    assert max(costs) < 1.01 * np.mean(costs)
    done = sum(computed(m, lengths, prompts) for rank in plan.ranks for m in rank.micro_batches)
    assert done < 1.02 * computed(range(len(lengths)), lengths, prompts)


def test_one_prompt_with_thousands_of_samples_is_planned_at_once():
    """Examining each of its rows again for every micro-batch took 0.7 s of CPU time, compared with 0.03 s
    now."""
    lengths = (64 + np.clip(np.random.default_rng(0).lognormal(5.5, 0.8, 4096), 1, 1984).astype(int)).tolist()
    begin = time.process_time()
    plan = plan_micro_batches(lengths, 1, max_tokens=2048, prompts=[(0, 64)] * len(lengths))
    assert time.process_time() - begin < 0.25
    assert sorted(real_rows(plan.ranks[0])) == list(range(len(lengths)))


def test_fewer_rows_than_ranks_are_filled_up_with_the_shortest_row():
    plan = plan_micro_batches([7, 3], 4, max_tokens=10)
    assert plan.num_micro_batches == 1
    fillers = [rank.micro_batches[0] for rank in plan.ranks if rank.num_fillers]
    assert fillers == [(1,), (1,)]
    assert len(plan.restore_order()) == 2


def test_short_rows_are_moved_before_a_filler_is_used():
    """Rank 0 is filled by one long row, but its second micro-batch gets a real row instead of a filler."""
    plan = plan_micro_batches([8000] + [100] * 10, 2, sequences=5)
    assert plan.num_micro_batches == 2
    assert not any(rank.num_fillers for rank in plan.ranks)


def test_long_rows_weigh_more_than_their_tokens():
    """One row of 40k tokens and eight of 5k have the same number of tokens, but the attention of the long row
    costs more, so it is alone."""
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
        (
            [3, 11, 12],
            {"max_tokens": 10},
            r"row 2 has 12 tokens, more than micro_batch.max_tokens=10 \(2 of 3 rows",
        ),
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


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=15),
    dp_size=st.integers(1, 5),
    limits=st.one_of(
        st.fixed_dictionaries({"sequences": st.integers(2, 7)}),
        st.fixed_dictionaries({"max_tokens": st.integers(88, 200)}),
    ),
    multiple_of=st.sampled_from([1, 1, 2]),
    shares=st.booleans(),
    context=st.sampled_from([1, 1, 2]),
)
def test_pairs_of_rows_stay_together(lengths, dp_size, limits, multiple_of, shares, context):
    """A pair is never split, whatever the layout and the limit, and a pair whose rows share a prompt takes its
    tokens once."""
    rows = [length for pair in lengths for length in pair]
    prompts = [(row // 2 * 2, min(lengths[row // 2]) // 2) for row in range(len(rows))]
    plan = plan_micro_batches(
        rows,
        dp_size,
        **limits,
        multiple_of=multiple_of,
        context_parallel_size=context,
        prompts=prompts if shares else None,
        rows_together=2,
    )
    assert plan.num_rows == len(rows)
    assert plan.num_micro_batches % multiple_of == 0
    assert {len(rank.micro_batches) for rank in plan.ranks} == {plan.num_micro_batches}
    assert sorted(row for rank in plan.ranks for row in real_rows(rank)) == list(range(len(rows)))

    for micro_batch in (each for rank in plan.ranks for each in rank.micro_batches):
        chosen, rejected = micro_batch[0::2], micro_batch[1::2]
        assert [row + 1 for row in chosen] == list(rejected)
        assert all(row % 2 == 0 for row in chosen)
        assert len(micro_batch) <= limits.get("sequences", len(rows))
        if "max_tokens" in limits:
            parts = [rows[row] - shares * prompts[row][1] for row in micro_batch]
            parts += dict(prompts[row] for row in micro_batch).values() if shares else ()
            assert sum(padded_length(part, context) for part in parts) <= limits["max_tokens"] * context

    outputs = np.array([row for rank in plan.ranks for row in rank.rows])
    assert outputs[plan.restore_order()].tolist() == list(range(len(rows)))


def test_pairs_by_hand():
    """The pairs have 9, 5 and 4 tokens: one on rank 0, two on rank 1, which is one micro-batch of 10 tokens."""
    plan = plan_micro_batches([4, 5, 3, 2, 2, 2], 2, max_tokens=10, rows_together=2)
    assert [rank.micro_batches for rank in plan.ranks] == [((0, 1),), ((2, 3, 4, 5),)]
    one_each = plan_micro_batches([4, 5, 3, 2, 2, 2], 2, sequences=3, rows_together=2)
    assert [(rank.micro_batches, rank.num_fillers) for rank in one_each.ranks] == [
        (((0, 1), (4, 5)), 1),
        (((2, 3), (4, 5)), 0),
    ]


@pytest.mark.parametrize(
    ("lengths", "limits", "match"),
    [
        ([3, 4, 5], {"sequences": 2}, "3 rows cannot be divided into units of rows_together=2"),
        ([3, 4], {"sequences": 1}, "micro_batch.sequences=1 has no room for 2 rows that stay together"),
        ([1, 1, 6, 5], {"max_tokens": 10}, "unit 1 has 11 tokens, more than micro_batch.max_tokens=10"),
    ],
)
def test_pairs_without_room_are_refused(lengths, limits, match):
    with pytest.raises(ValueError, match=match):
        plan_micro_batches(lengths, 1, **limits, rows_together=2)
