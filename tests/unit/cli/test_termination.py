"""SIGTERM asks once, and ends at once the second time; whoever listened before listens again afterwards."""

from __future__ import annotations

import os
import signal

import pytest

from megarl.cli.termination import TERMINATED, Termination


def test_the_first_signal_is_a_request_and_the_second_an_end() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with Termination(said.append) as termination:
        assert not termination.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.requested
        assert said == ["SIGTERM: this step is finished and saved, then the run ends; a second one ends it at once"]
        with pytest.raises(SystemExit) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.code == TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) is before
