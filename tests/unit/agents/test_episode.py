"""The state machine of an episode: the order of requests, the authors of tokens, and events that are late,
duplicated, or missing."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megarl.agents.episode import (
    AnswerTurn,
    Episode,
    EpisodeLimits,
    TurnPosition,
    WriteTurn,
)
from megarl.agents.protocol import CallError, CallErrorKind, Reply
from megarl.agents.trajectory import EpisodeEnd, Sample, VersionSpan

PROMPT = [1, 2, 3]
LIMITS = EpisodeLimits(max_turns=3, max_tokens=20)
BUSY = CallError(CallErrorKind.raised, "busy")


def episode(seed: int = 5, limits: EpisodeLimits = LIMITS) -> Episode:
    return Episode(PROMPT, seed, limits)


def write(of: Episode, token_ids: list[int], finish_reason: str = "stop", version: int = 1) -> bool:
    step = of.next
    assert isinstance(step, WriteTurn)
    ids = np.array(token_ids, dtype=np.int32)
    spans = (VersionSpan(version, len(ids)),)
    return of.wrote(step.place, Sample(ids, -ids.astype(np.float32) / 10, finish_reason, spans))  # type: ignore[arg-type]


def answer(of: Episode, token_ids: list[int], **more: object) -> bool:
    step = of.next
    assert isinstance(step, AnswerTurn)
    return of.answered(step.place, token_ids, Reply(**more))  # type: ignore[arg-type]


def test_tokens_with_their_authors_log_probs_versions_and_rewards() -> None:
    played = episode()
    assert played.next == WriteTurn((0, 0), PROMPT, 20, 5)
    write(played, [10, 11])
    assert played.next == AnswerTurn((0, 0), [10, 11], is_last=False)
    answer(played, [20, 21, 22], reward=0.5, num_calls=2, errors=[BUSY], tool_s=0.25)
    second = played.next
    assert isinstance(second, WriteTurn)
    assert (second.token_ids, second.max_new_tokens) == ([*PROMPT, 10, 11, 20, 21, 22], 15)
    assert second.seed not in (5, episode(6).next.seed)  # type: ignore[union-attr]
    write(played, [12], version=2)
    answer(played, [], is_done=True, reward=1.0, tool_s=0.5)
    row = played.trajectory
    assert (played.next, row.end, row.num_turns, row.num_calls, row.tool_s) == (
        None,
        EpisodeEnd.done,
        2,
        2,
        0.75,
    )
    assert row.call_errors == {CallErrorKind.raised: 1}
    assert row.token_ids.tolist() == [10, 11, 20, 21, 22, 12]
    assert row.mask.tolist() == [True, True, False, False, False, True]
    assert row.log_probs.tolist() == pytest.approx([-1.0, -1.1, 0, 0, 0, -1.2])
    assert row.token_versions.tolist() == [1, 1, -1, -1, -1, 2]
    assert row.rewards.tolist() == [0, 0.5, 0, 0, 0, 1]


def test_a_turn_that_is_cut_ends_the_episode_without_asking_anybody() -> None:
    cut = episode()
    write(cut, [10], "length")
    assert (cut.next, cut.trajectory.end) == (None, EpisodeEnd.length)


def test_the_last_turn_is_answered_and_followed_by_nothing() -> None:
    played = episode(limits=EpisodeLimits(max_turns=1, max_tokens=20))
    write(played, [10])
    step = played.next
    assert isinstance(step, AnswerTurn)
    assert step.is_last
    answer(played, [], reward=0.25)
    assert (played.next, played.trajectory.end, played.trajectory.turn_rewards) == (
        None,
        EpisodeEnd.turns,
        [0.25],
    )


@pytest.mark.parametrize(("num_tokens", "end"), [(17, None), (18, EpisodeEnd.length)])
def test_an_answer_has_room_with_one_token_behind_it_or_is_left_out(
    num_tokens: int, end: EpisodeEnd | None
) -> None:
    played = episode()
    write(played, [10, 11])
    answer(played, [20] * num_tokens)
    assert played.trajectory.end is end
    assert played.trajectory.mask[-1] == (end is not None)
    if end is None:
        assert played.next.max_new_tokens == 1  # type: ignore[union-attr]


def test_a_turn_has_a_limit_of_its_own() -> None:
    played = episode(limits=EpisodeLimits(max_turns=3, max_tokens=20, max_turn_tokens=6))
    assert played.next.max_new_tokens == 6  # type: ignore[union-attr]
    write(played, [10] * 6)
    answer(played, [20] * 10)
    assert played.next.max_new_tokens == 4  # type: ignore[union-attr]


def test_an_answer_that_takes_too_long_ends_an_episode_with_what_the_model_wrote() -> None:
    played = episode()
    assert not played.timed_out((0, 0))  # nothing was requested yet
    write(played, [10])
    assert not played.timed_out((0, 1))
    assert played.timed_out((0, 0))
    assert (played.trajectory.token_ids.tolist(), played.trajectory.end) == ([10], EpisodeEnd.time)
    assert not played.timed_out((0, 0))


def test_another_attempt_has_the_same_seeds_and_recognizes_what_the_lost_environment_answered() -> None:
    lost = episode()
    seeds = [lost.next.seed]  # type: ignore[union-attr]
    write(lost, [10])
    late = lost.next
    assert late is not None
    answer(lost, [20])
    seeds.append(lost.next.seed)  # type: ignore[union-attr]

    played = Episode(PROMPT, 5, LIMITS, attempt=1)
    assert played.next == WriteTurn((1, 0), PROMPT, LIMITS.max_tokens, seeds[0])
    write(played, [10])
    assert not played.answered(late.place, [20], Reply())
    assert not played.timed_out(late.place)
    answer(played, [20])
    assert played.next == WriteTurn((1, 1), [*PROMPT, 10, 20], LIMITS.max_tokens - 2, seeds[1])


def test_in_every_order_of_events_an_episode_ends_and_its_row_is_whole() -> None:
    """Late and duplicate events change nothing.

    Later requests repeat earlier token ids, followed by what was sampled and the bridge.
    """
    ends = set()
    for seed in range(400):
        draw = random.Random(seed)
        limits = EpisodeLimits(max_turns=draw.randint(1, 4), max_tokens=30)
        played = episode(seed, limits)
        attempt = 0
        past: list[TurnPosition] = []
        sent: list[int] | None = None
        while (step := played.next) is not None:
            event = draw.choice(["go", "go", "go", "late", "time", "lost"])
            before = played.trajectory.token_ids.tolist()
            if event == "late" and past:
                place = draw.choice(past)
                assert not played.answered(place, [99], Reply())
                assert not played.wrote(place, Sample(np.zeros(0), np.zeros(0), "stop", ()))
                assert played.trajectory.token_ids.tolist() == before
            elif event == "time" and draw.random() < 0.2:
                played.timed_out(step.place)
            elif event == "lost" and draw.random() < 0.3:
                attempt += 1
                if attempt == 3:
                    break
                played = Episode(PROMPT, seed, limits, attempt)
                sent = None
            elif isinstance(step, WriteTurn):
                assert step.token_ids[: len(sent or [])] == (sent or [])
                ids = [draw.randrange(10, 20) for _ in range(draw.randint(1, min(6, step.max_new_tokens)))]
                write(played, ids, draw.choice(["stop"] * 6 + ["length"]))
                sent = step.token_ids + ids
                if played.next is None:
                    break
            else:
                past.append(step.place)
                assert step.token_ids == played.trajectory.segments[-1].token_ids.tolist()
                answer(played, [20] * draw.randint(1, 6), is_done=draw.random() < 0.1)
        row = played.trajectory
        ends.add(row.end)
        if row.end is not None:
            assert row.mask[-1]
            assert len(row.mask) <= 30
            assert row.num_turns == len(row.turn_rewards)
            assert np.all((row.token_ids < 20) == row.mask)
            assert np.all((row.token_versions == 1) == row.mask)

    assert ends == {*EpisodeEnd, None} - {EpisodeEnd.failed}  # of agent programs only
