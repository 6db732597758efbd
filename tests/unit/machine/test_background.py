"""Test work in the background: its result, its error, and that it keeps no process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from megarl.machine.background import LoopThread, in_background


def test_the_result_comes_from_a_named_daemon_thread() -> None:
    def work() -> tuple[str, bool]:
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert in_background(work, "copy of step 3").result() == ("copy of step 3", True)


def test_it_is_not_done_before_the_work_has_ended() -> None:
    may_end = threading.Event()
    outcome = in_background(may_end.wait, "waits")
    assert outcome.running()
    assert not outcome.done()
    may_end.set()
    assert outcome.result()


def test_the_error_is_raised_where_the_result_is_awaited() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "file")

    outcome = in_background(fail, "fails")
    assert isinstance(outcome.exception(), OSError)
    for _ in range(2):  # each time
        with pytest.raises(OSError, match="No space left on device"):
            outcome.result()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_no_error_leaves_its_waiters_behind(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind("the end")

    assert isinstance(in_background(leave, "leaves").exception(timeout=60), kind)


def test_a_process_ends_although_the_work_goes_on() -> None:
    code = (
        "import threading\n"
        "from megarl.machine.background import in_background\n"
        "in_background(threading.Event().wait, 'forever')\n"
        "print('end')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "end\n"


def test_a_loop_runs_coroutines_and_cancels_those_that_are_left() -> None:
    prepared: list[int] = []
    loop = LoopThread("loop", lambda: prepared.append(threading.get_ident()))

    async def thread() -> int:
        return threading.get_ident()

    assert loop.submit(thread()).result(60) == prepared[0] != threading.get_ident()
    left = loop.submit(asyncio.sleep(3600))
    loop.stop()
    assert left.cancelled()


def test_an_error_before_the_loop_runs_is_raised() -> None:
    def prepare() -> None:
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        LoopThread("loop", prepare)
