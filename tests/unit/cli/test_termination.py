"""Signals that end a run.

The first one requests an end, and the second one ends at once; further Ctrl-C do not interrupt the shutdown.
The previous handlers are restored afterwards.
"""

from __future__ import annotations

import os
import signal

import pytest

from megarl.cli.run.context import (
    CTRL_C,
    INTERRUPTED,
    TERMINATED,
    RunContext,
    Termination,
    ends_by_signal,
    interruption,
)
from megarl.config.schema import ModelConfig, SFTConfig
from megarl.trainers.monitor import Position


def test_the_first_signal_is_a_request_and_the_second_an_end() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)

    with Termination(said.append) as termination:
        assert not termination.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.requested
        (line,) = said
        assert line.startswith("SIGTERM: the run ends after this step and its checkpoint")
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == TERMINATED == 143

    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_interrupts_once_and_does_not_break_into_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(signal, "default_int_handler", before := signal.getsignal(signal.SIGINT))

    with interruption(said.append):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        (line,) = said
        assert line.startswith("Ctrl-C again: the run is shutting down; one more")
        assert statuses == []
        os.kill(os.getpid(), signal.SIGINT)
        assert statuses == [INTERRUPTED] == [130]

    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruption(pytest.fail):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_a_step_waits_for_it_and_the_next_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step there is nothing to save, and between two steps there is."""
    said: list[str] = []
    monkeypatch.setattr(os, "_exit", lambda status: None)
    context = RunContext(SFTConfig(model=ModelConfig(path="model")))
    with interruption(said.append, context.end_after_step), Termination(said.append) as termination:
        context.termination = termination
        context.position = Position()
        context.position.phases = ["testing"]
        assert not context.end_after_step()

        context.position = Position(spent_s={"step": 1.0})
        os.kill(os.getpid(), signal.SIGINT)
        assert (termination.requested, termination.status) == (True, INTERRUPTED)
        assert said == [
            "Ctrl-C: the run ends after this step and its checkpoint; a second Ctrl-C ends it immediately"
        ]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_after_ctrl_c_ends_at_once() -> None:
    with Termination(lambda text: None) as termination:
        termination.request(CTRL_C)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)


def test_ctrl_c_does_not_interrupt_the_end_of_the_child_processes() -> None:
    before = signal.getsignal(signal.SIGINT)
    ended: list[bool] = []

    def end_children() -> None:
        signal.raise_signal(signal.SIGINT)
        ended.append(True)

    with pytest.raises(SystemExit) as caught, ends_by_signal(end_children), interruption(pytest.fail):
        signal.raise_signal(signal.SIGTERM)

    assert (caught.value.code, ended) == (TERMINATED, [True])
    assert signal.getsignal(signal.SIGINT) is before
