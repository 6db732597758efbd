"""Reduction of metrics over micro-batches, replicas and updates, compared with worked examples."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from megarl.batch.metrics import Metric, merge_metrics, over_updates, values_of

NAN = math.nan

# One number per token: a step of two updates, on two replicas, with two micro-batches each. The second replica
# has no token in its first micro-batch of the first update, and none at all in the second update.
TOKENS = [
    [[[1.0, 2.0, 3.0], [6.0]], [[], [-2.0, 8.0]]],
    [[[4.0], [0.5, 1.5]], [[], []]],
]
COUNTS = [6, 3]  # per update, known before the split
GRAD_NORMS = [0.25, 0.75]


def micro_batch_metrics(tokens: list[float], count: int) -> dict[str, Metric]:
    """Return the metrics of a row with four slots, with garbage where there is no token."""
    mask = torch.arange(4) < len(tokens)
    values = torch.tensor([*tokens, *[NAN] * (4 - len(tokens))])
    metrics = {
        "sum": Metric.sum(values[mask].sum() / count),
        "mean": Metric.mean(values, mask),
        "max": Metric.max(values, mask),
        "min": Metric.min(values, mask),
    }

    return metrics | ({"mean_of_negative": Metric.mean(values, mask & (values < 0))} if tokens else {})


def updates() -> list[dict[str, Metric]]:
    merged = []
    for replicas, count, grad_norm in zip(TOKENS, COUNTS, GRAD_NORMS, strict=True):
        of_replicas = []
        for micro_batches in replicas:
            metrics = merge_metrics([micro_batch_metrics(tokens, count) for tokens in micro_batches])
            arrived = pickle.loads(pickle.dumps(metrics))  # as received from a worker
            of_replicas.append(arrived | {"same": Metric.same(grad_norm)})
        merged.append(merge_metrics(of_replicas))

    return merged


def test_micro_batches_replicas_and_updates_by_hand() -> None:
    first, second = updates()

    # 1 + 2 + 3 + 6 - 2 + 8 = 18 of six tokens; 4 + 0.5 + 1.5 = 6 of three
    of_first = {"sum": 3.0, "mean": 3.0, "max": 8.0, "min": -2.0, "same": 0.25, "mean_of_negative": -2.0}
    of_second = {"sum": 2.0, "mean": 2.0, "max": 4.0, "min": 0.5, "same": 0.75}  # no token is negative
    assert values_of(first) == pytest.approx(of_first)
    assert values_of(second) == pytest.approx(of_second)
    assert over_updates([first, second]) == pytest.approx(
        {"sum": 2.5, "mean": 2.5, "max": 8.0, "min": -2.0, "same": 0.5, "mean_of_negative": -2.0}
    )


def test_a_mean_weighs_parts_by_their_counts_and_updates_alike() -> None:
    ones = Metric.mean(torch.ones(3), torch.ones(3).bool())
    twelve = Metric.mean(torch.tensor([12.0]), torch.tensor([True]))
    update = merge_metrics([{"x": ones}, {"x": twelve}])
    assert values_of(update) == {"x": 15 / 4}
    assert over_updates([update, merge_metrics([{"x": ones}])]) == {"x": (15 / 4 + 1) / 2}


def test_metrics_without_tokens_are_left_out() -> None:
    nothing = merge_metrics([micro_batch_metrics([], 1), micro_batch_metrics([], 1)])
    assert values_of(nothing) == over_updates([nothing, nothing]) == {"sum": 0.0}  # the sum of nothing is 0
    assert over_updates([nothing, merge_metrics([{"sum": Metric.sum(4.0)}])]) == {"sum": 2.0}
    assert merge_metrics([]) == merge_metrics([{}]) == values_of({}) == over_updates([{}]) == {}


def parts_of(kind: str, numbers: list[float]) -> list[dict[str, Metric]]:
    one = torch.tensor([True])
    made = {
        "sum": Metric.sum,
        "mean": lambda number: Metric.mean(torch.tensor([number]), one),
        "max": lambda number: Metric.max(torch.tensor([number]), one),
        "min": lambda number: Metric.min(torch.tensor([number]), one),
        "same": Metric.same,
    }
    return [{"x": made[kind](number)} for number in numbers]


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_nan_is_not_lost(kind: str, place: int) -> None:
    """Comparisons with NaN are all false, so a naive result would depend on the order."""
    numbers = [1.0, 2.0, 3.0]
    numbers[place] = NAN
    assert math.isnan(values_of(merge_metrics(parts_of(kind, numbers)))["x"])
    by_update = [merge_metrics([part]) for part in parts_of(kind, numbers)]
    assert math.isnan(over_updates(by_update)["x"])


def test_infinite_metrics_are_kept() -> None:
    assert values_of(merge_metrics(parts_of("max", [1.0, math.inf]))) == {"x": math.inf}
    assert values_of(merge_metrics(parts_of("sum", [1.0, math.inf]))) == {"x": math.inf}


def test_a_metric_that_must_be_equal_in_all_parts_is_checked() -> None:
    assert values_of(merge_metrics(parts_of("same", [0.1, 0.1 * (1 + 1e-9)]))) == {"x": 0.1}
    assert math.isnan(values_of(merge_metrics(parts_of("same", [NAN, NAN])))["x"])
    for numbers in ([0.1, 0.2], [0.1, NAN], [0.0, 1e-3]):
        with pytest.raises(ValueError, match="metric 'x' must be equal in all parts, but they are "):
            merge_metrics(parts_of("same", numbers))


def test_a_value_that_does_not_say_how_it_comes_together_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"metric 'actor/mine_max' is a Tensor, which does not define .* return Metric\.sum, \.mean",
    ):
        merge_metrics([{"actor/mine_max": torch.tensor(1.0)}])  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="metric 'x' is a float"):
        merge_metrics([*parts_of("sum", [1.0]), {"x": 2.0}])  # type: ignore[dict-item]


def test_parts_that_disagree_on_how_they_come_together_are_refused() -> None:
    with pytest.raises(ValueError, match="metric 'x' has the reductions max and sum: all its parts"):
        merge_metrics([*parts_of("sum", [1.0]), *parts_of("max", [1.0])])


def test_metrics_take_no_gradient_and_travel_without_tensors() -> None:
    values = torch.tensor([1.0, 2.0], requires_grad=True)
    mask = torch.tensor([True, True])
    made = {
        "a": Metric.sum(values.sum()),
        "b": Metric.mean(values, mask),
        "c": Metric.max(values, mask),
        "d": Metric.same(values[0]),
    }
    assert not any(
        metric.value.requires_grad for metric in made.values() if isinstance(metric.value, torch.Tensor)
    )
    merged = merge_metrics([made])
    assert all(
        isinstance(number, (int, float))
        for metric in merged.values()
        for number in (metric.value, metric.count)
    )
    assert len(pickle.dumps(merged)) < 1024
