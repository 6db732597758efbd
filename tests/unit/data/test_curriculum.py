"""Test curricula: weights by hand, the documented lower bound, resuming, and users' samplers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.schema import CurriculumConfig
from megarl.data.curriculum import CurriculumLoader, LearnabilitySampler, load_sampler
from megarl.data.loader import BatchLoader
from megarl.machine.user_functions import UserFunctionError
from tests.unit.data.test_loader import Numbers, rows

SUCCESS = (0, 1, 2, 4)  # of four samples of a prompt in row i: SUCCESS[i % 4]


def learnability(num_rows: int, **keys: float) -> LearnabilitySampler:
    return LearnabilitySampler(num_rows, CurriculumConfig(**keys), shuffle=True, seed=0)


def scores_of(row: int) -> list[float]:
    num_right = SUCCESS[row % 4]
    return [1.0] * num_right + [0.0] * (4 - num_right)


def test_weights_are_those_by_hand() -> None:
    sampler = learnability(4)
    assert sampler.probabilities.tolist() == [0.25] * 4
    assert sampler.metrics() == {"seen": 0.0, "effective_share": 1.0}

    sampler.update([0, 1, 2], [[1, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1]])
    # Variances 3/16, 0 and 0; row 3 has their mean, 1/16. A quarter of the rows is taken evenly.
    assert sampler.probabilities.tolist() == [1 / 16 + 9 / 16, 1 / 16, 1 / 16, 1 / 16 + 3 / 16]
    metrics = sampler.metrics()
    assert metrics == {
        "seen": 0.75,
        "low_weight": pytest.approx(2 / 3),
        "score_mean": pytest.approx((0.25 + 1 + 0.1) / 3),
        "effective_share": pytest.approx(16**2 / (10**2 + 1 + 1 + 4**2) / 4),
    }

    # Half of the estimate is new: p is 5/8, and the variance of such scores p (1 - p).
    sampler.update([0], [[1, 1, 1, 1]])
    weight, new = 15 / 64, 15 / 64 / 3
    assert sampler.probabilities[0] == pytest.approx(1 / 16 + 0.75 * weight / (weight + new))


def test_rows_come_as_often_as_their_probabilities_say() -> None:
    sampler = learnability(8, epoch_share=0.5)
    sampler.update(range(8), [scores_of(row) for row in range(8)])
    counts = Counter(row for _ in range(6000) for row in sampler.sample(1))
    shares = [counts[row] / 6000 for row in range(8)]
    np.testing.assert_allclose(shares, sampler.probabilities, atol=0.015)
    assert sampler.probabilities.tolist() == pytest.approx(
        [1 / 16 + weight / 2 for weight in [0, 3 / 14, 4 / 14, 0] * 2]
    )


def test_a_row_is_not_repeated_within_a_draw() -> None:
    sampler = learnability(16)
    sampler.update(range(16), [[1.0, 0.0]] * 16)
    # As long as no epoch ends within a draw: the sixteenth row of the first one is in the eighth draw.
    assert all(len(set(sampler.sample(9))) == 9 for _ in range(7))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 12),
    share=st.sampled_from([0.01, 0.1, 0.29, 0.7, 1.0]),
    counts=st.lists(st.integers(1, 14), max_size=40),
    seed=st.integers(0, 3),
)
def test_every_row_is_served_as_often_as_documented(
    num_rows: int, share: float, counts: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    sampler = learnability(num_rows, epoch_share=share)
    served: Counter[int] = Counter()

    for count in counts:
        drawn = sampler.sample(count)
        assert len(drawn) == count
        served.update(drawn)
        least = int(round(served.total() * share * 100) / 100 / num_rows)
        assert min(served[row] for row in range(num_rows)) >= least
        # Rows never or always solved have no weight.
        known = [row for row in drawn if chance.random() < 0.8]
        sampler.update(known, [[float(row % 3 == 0), 0.0] for row in known])


def served_from(state: dict[str, Any], num_draws: int, count: int) -> list[list[int]]:
    resumed = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    return trained(resumed, num_draws, count)


def trained(loader: CurriculumLoader, num_draws: int, count: int) -> list[list[int]]:
    """Return the rows of some draws, each of which is followed by the update with its scores."""
    drawn = []
    for _ in range(num_draws):
        batch = loader.take(count)
        drawn.append(rows(batch))
        update(loader, batch.non_tensor_batch["uid"].tolist())
    return drawn


def update(loader: CurriculumLoader, uids: Sequence[str]) -> None:
    loader.update({uid: scores_of(int(uid.partition("-")[2])) for uid in uids})


def test_a_resumed_loader_serves_the_same_rows() -> None:
    loader = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    before = trained(loader, 6, 5)
    state = loader.state_dict()
    assert (loader.num_served, state["served"]) == (30, [])
    after = trained(loader, 6, 5)
    assert served_from(state, 6, 5) == after
    assert before[0] != after[0]


def test_rows_whose_step_was_not_taken_are_served_again_in_spite_of_updates() -> None:
    """An asynchronous run draws two steps ahead of the updates."""
    loader = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    draws, positions = [], []
    for _ in range(6):
        positions.append(loader.position)
        draws.append(loader.take(5))
        if len(draws) > 2:
            update(loader, draws[-3].non_tensor_batch["uid"].tolist())

    state = loader.state_at(positions[4], 2)  # step 5 is open from its third prompt on
    assert state["num_served"] == 22
    resumed = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.state_dict() == state

    expected = [uid for draw in draws for uid in draw.non_tensor_batch["uid"].tolist()][22:]
    assert [uid for count in (3, 5) for uid in resumed.take(count).non_tensor_batch["uid"]] == expected
    assert rows(resumed.take(5)) == rows(loader.take(5))


def test_an_order_is_not_continued_by_another() -> None:
    epochs = BatchLoader(Numbers(20), 5, shuffle=True, seed=0)
    curriculum = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    with pytest.raises(ValueError, match="the curriculum epochs, this run has learnability; use the same"):
        curriculum.load_state_dict(epochs.state_dict())
    with pytest.raises(ValueError, match="the curriculum learnability, this run has epochs"):
        epochs.load_state_dict(curriculum.state_dict())


def test_another_seed_does_not_continue_an_order() -> None:
    def of_seed(seed: int) -> CurriculumLoader:
        return CurriculumLoader(Numbers(20), 5, learnability(20), "learnability", {"seed": seed})

    with pytest.raises(ValueError, match=r"written with seed=0, this run has 1; use the same .* data.seed"):
        of_seed(1).load_state_dict(of_seed(0).state_dict())


@pytest.mark.parametrize("uid", ["", "3", "0-20", "5-0", "a-0", "0--1", "0-0-a"])
def test_a_uid_of_no_prompt_is_refused(uid: str) -> None:
    loader = CurriculumLoader(Numbers(20), 5, learnability(20), "learnability")
    loader.check_uids(next(loader).non_tensor_batch["uid"])
    with pytest.raises(ValueError, match=f"the uid '{uid}', which is not .* keep the `uid` of the prompts"):
        loader.check_uids([uid])


class InOrder:
    """A user's sampler, with what goes wrong."""

    def __init__(self, sampled: Any = None, state: Any = None) -> None:
        self._sampled = sampled
        self._state = {"next": 0} if state is None else state

    def sample(self, count: int) -> Any:
        return self._sampled

    def update(self, rows: Sequence[int], scores: Sequence[Sequence[float]]) -> None: ...

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("sampled", "said"),
    [
        ([0, 1], r"mine.py:InOrder: sample\(3\) returned 2 rows; return as many as it is asked for"),
        ([0, 1, 20], r"sample\(3\) returned row 20, but the rows are 0 to 19"),
        ([-1, 1, 2], "returned row -1"),
        ([0.5, 1, 2], "must return the numbers of 3 rows, but 'float' object"),
        (None, "must return the numbers of 3 rows, but 'NoneType' object is not iterable"),
    ],
)
def test_wrong_rows_are_refused(sampled: Any, said: str) -> None:
    loader = CurriculumLoader(Numbers(20), 3, InOrder(sampled), "mine.py:InOrder")
    with pytest.raises(UserFunctionError, match=said):
        next(loader)
    assert rows(next(CurriculumLoader(Numbers(20), 3, InOrder(np.arange(3)), "mine.py:InOrder"))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("metrics", "said"),
    [(None, "but 'NoneType' object has no attribute 'items'"), ({"solved": "no"}, "but could not convert")],
)
def test_wrong_metrics_are_refused(metrics: Any, said: str) -> None:
    sampler = InOrder()
    sampler.metrics = lambda: metrics  # pyrefly: ignore[missing-attribute]
    with pytest.raises(UserFunctionError, match=f"mine.py:InOrder: metrics.. must return a dict .* {said}"):
        CurriculumLoader(Numbers(20), 3, sampler, "mine.py:InOrder").metrics()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"order": np.arange(3)}, "must return JSON values, but Object of type ndarray"),
        ({"mean": float("nan")}, "must return JSON values, but Out of range float"),
        ({3: "row"}, "a dict that JSON does not change: use lists instead of tuples, and strings as keys"),
        ({"order": (0, 1)}, "a dict that JSON does not change"),
        ([0, 1], "must return a dict"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(state: Any, said: str) -> None:
    with pytest.raises(UserFunctionError, match=said):
        CurriculumLoader(Numbers(20), 3, InOrder(state=state), "mine.py:InOrder")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine: sample = update = print", "is not a class with `state_dict`, `load_state_dict`"),
        ("def Mine(prompts, seed): ...", "is not a class with `sample`, `update`, `state_dict`"),
        (
            "class Mine:\n    def __init__(self, prompts): ...\n"
            "    sample = update = state_dict = load_state_dict = print",
            r"cannot be created with the prompts and a seed \(too many positional arguments\); write `def",
        ),
        ("class Other: ...", "'Mine' is not in"),
    ],
)
def test_a_class_that_is_no_sampler_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserFunctionError, match=said):
        load_sampler(f"{tmp_path}/mine.py:Mine")
