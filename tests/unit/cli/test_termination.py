"""Signals that end a run.

The first SIGTERM requests an end, and the second one ends at once. For Ctrl-C, the third one does. The
previous handlers are restored afterwards.
"""

from __future__ import annotations

import os
import signal

import pytest

from megarl.cli.run.termination import INTERRUPTED, TERMINATED, Interruption, Termination


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

    with Interruption(said.append):
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        (line,) = said
        assert line.startswith("Ctrl-C again: the run is shutting down")
        assert statuses == []
        os.kill(os.getpid(), signal.SIGINT)
        assert statuses == [INTERRUPTED] == [130]

    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption(pytest.fail):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
