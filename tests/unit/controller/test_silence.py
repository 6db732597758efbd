"""Test how long processes count as silent, with processes that answer when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from megarl.controller.lost_process import ProcessSilence

LIMIT_S = 60.0


class Answerer:
    """Answers each question when `release` is called for it."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)

    def answer(self) -> str:
        self._allowed.acquire()
        return "here"

    def release(self) -> None:
        self._allowed.release()


@pytest.fixture
def process(ray_cluster: None) -> Iterator[Any]:
    actor = ray.remote(Answerer).options(num_cpus=0, max_concurrency=4).remote()
    yield actor
    ray.kill(actor)


def test_silence_is_measured_from_the_last_answer(process: Any) -> None:
    silence = ProcessSilence[int]()
    begin_s = time.monotonic()
    question = process.answer.remote()
    assert silence.wait({0: question}, limit_s=0.1) == {}
    assert silence.seconds(0) >= 0.1

    # It answers late, and not yet the second question.
    ray.get(process.release.remote())
    ray.get(question, timeout=LIMIT_S)
    answered_s = time.monotonic()
    assert silence.wait({0: process.answer.remote()}, limit_s=0.1) == {}
    silent_s = silence.seconds(0)
    assert silent_s <= time.monotonic() - answered_s < time.monotonic() - begin_s

    # Without an answer in between, it grows.
    assert silence.wait({0: process.answer.remote()}, limit_s=0.1) == {}
    assert silence.seconds(0) >= silent_s + 0.1

    for _ in range(3):
        ray.get(process.release.remote())
    assert silence.wait({0: process.answer.remote()}, LIMIT_S) == {0: "here"}
    assert silence.seconds(0) == silence.seconds(1) == 0.0


def test_an_error_of_ray_is_no_answer(process: Any) -> None:
    silence = ProcessSilence[int]()
    question = process.answer.remote()
    assert silence.wait({0: question}, limit_s=0.1) == {}
    ray.kill(process)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(question, timeout=LIMIT_S)
    answers = silence.wait({0: process.answer.remote()}, LIMIT_S)
    assert isinstance(answers[0], ray.exceptions.ActorDiedError)
    assert silence.seconds(0) >= 0.1
    silence.forget(0)
    assert silence.seconds(0) == 0.0


def test_processes_are_asked_until_they_answer_or_are_lost(process: Any) -> None:
    silence = ProcessSilence[int]()
    num_questions = 0

    def ask(key: int) -> ray.ObjectRef:
        nonlocal num_questions
        num_questions += 1
        return process.answer.remote()

    assert silence.ask([0], ask, limit_s=0.1, lost_s=LIMIT_S, waits=False) == ({}, set())
    for _ in range(2):
        process.release.remote()
    assert silence.ask([0], ask, limit_s=LIMIT_S, lost_s=LIMIT_S) == ({0: "here"}, set())
    assert num_questions == 2
    assert silence.ask([0], ask, limit_s=0.01, lost_s=0.5) == ({}, {0})
    assert num_questions > 3
    ray.kill(process)
    assert silence.ask([0], ask, limit_s=LIMIT_S, lost_s=LIMIT_S) == ({}, {0})


def test_a_process_that_always_answers_late_is_not_lost(process: Any) -> None:
    """Each answer comes while the process is asked again."""
    questions: list[ray.ObjectRef] = []

    def ask(key: int) -> ray.ObjectRef:
        if questions:
            assert len(questions) < 3, "an answer was not taken into account"
            ray.get(process.release.remote())
            ray.get(questions[-1], timeout=LIMIT_S)
        questions.append(process.answer.remote())
        return questions[-1]

    silence = ProcessSilence[int]()
    assert silence.ask([0], ask, limit_s=0.01, lost_s=LIMIT_S) == ({0: "here"}, set())
