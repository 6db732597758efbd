"""Programs that try to escape from the sandbox, at every level.

A test writes the table of results, which docs/rewards.md links to.

MEGARL_WRITE_PAGES=1 python -m pytest tests/unit/machine/test_sandbox.py
"""

import csv
import ctypes
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pebble
import pytest

import megarl
from megarl.machine import sandbox, sandbox_program, system_calls
from megarl.machine.reaper import OWNER, processes_of
from megarl.machine.sandbox import Finished, run_program, strongest, why_not
from megarl.machine.sandbox_levels import Level, SandboxError, SandboxLimits
from megarl.machine.sandbox_session import SandboxSession
from tests.unit.machine.attacks import ATTACKS, BY_LIMITS, END, HEAD, OF_KERNEL, OF_ROOT

TABLE = Path(__file__).parents[3] / "docs" / "static" / "sandbox_attacks.csv"
STRONG = [level for level in Level if level is not Level.process]
KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_DGRAM)
# The kernel grants one more second of CPU time.
LIMITS = SandboxLimits(memory_mb=256, cpu_s=0, wall_s=4.0, output_kb=16)
UNHURRIED = replace(LIMITS, wall_s=120.0)  # for programs that end by themselves, on a busy machine too


def needs(level: Level) -> None:
    """Skip a test if the level is unavailable.

    In CI, where this decides what is merged, every level must be available.
    """
    if level is not Level.process and (reason := why_not(level)):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture(scope="module")
def owner() -> str:
    """Return a mark for sandboxes whose processes are looked for, because other tests run sandboxes too."""
    return f"{secrets.token_hex(8)}/"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Create the targets of the attacks."""
    run = tmp_path_factory.mktemp("run")
    (run / "secret.txt").write_text("hunter2")
    os.environ["MEGARL_TEST_SECRET"] = "hunter2"
    kept = ctypes.create_string_buffer(b"hunter2")
    machine = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    calls = {
        "userfaultfd": (323, 282),
        "perf_event_open": (298, 241),
        "bpf": (321, 280),
        "add_key": (248, 217),
    }

    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix, dgram, abstract = (stack.enter_context(socket.socket(socket.AF_UNIX, kind)) for kind in KINDS)
        unix.bind(str(run / "socket"))
        unix.listen()
        dgram.bind(str(run / "dgram"))
        abstract.bind(f"\0megarl-test-{os.getpid()}")
        victim = stack.enter_context(subprocess.Popen(["sleep", "600"]))
        stack.callback(victim.kill)
        yield {
            "run": run,
            "pid": os.getpid(),
            "tcp": tcp.getsockname()[1],
            "unix": run / "socket",
            "dgram": run / "dgram",
            "abstract": f"megarl-test-{os.getpid()}",
            "victim": victim.pid,
            "address": ctypes.addressof(kept),
            "package": pebble.__file__,
            "packages": Path(pebble.__file__).parents[1],
            "code": sandbox_program.__file__,
            **{name: numbers[machine] for name, numbers in calls.items()},
            **stack.enter_context(system_v_objects()),
        }
        assert victim.poll() is None, "an attack has killed another process"

    del os.environ["MEGARL_TEST_SECRET"]


@contextmanager
def system_v_objects() -> Iterator[dict[str, int]]:
    """Create shared memory, a message queue and a semaphore of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    made = {
        "shm": libc.shmget(0, 4096, 0o1600),
        "queue": libc.msgget(0, 0o1600),
        "semaphore": libc.semget(0, 1, 0o1600),
    }
    assert min(made.values()) >= 0

    try:
        yield made
    finally:
        libc.shmctl(made["shm"], 0, None)
        libc.msgctl(made["queue"], 0, None)
        libc.semctl(made["semaphore"], 0, 0)


@pytest.fixture(scope="module")
def outcomes(target: dict[str, object], owner: str) -> dict[Level, dict[str, Finished]]:
    def attempt(attack: str, level: Level) -> Finished:
        Path(str(target["run"]), "spare.txt").write_bytes(b"")
        program = HEAD + ATTACKS[attack].format(**target) + END
        return run_program(program, level, LIMITS if attack in BY_LIMITS else UNHURRIED)

    levels = [level for level in Level if level is Level.process or not why_not(level)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setenv(OWNER, owner)
        futures = {
            level: {attack: pool.submit(attempt, attack, level) for attack in ATTACKS} for level in levels
        }
        finished = {
            level: {attack: future.result() for attack, future in of.items()} for level, of in futures.items()
        }

    for path in Path("/tmp").glob(f"*-{os.getpid()}"):
        path.unlink()
    return finished


def got_out(finished: Finished) -> bool:
    return "OUT" in finished.output


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("level", STRONG)
def test_no_attack_gets_out(level: Level, attack: str, outcomes: dict[Level, dict[str, Finished]]) -> None:
    needs(level)
    finished = outcomes[level][attack]
    assert not got_out(finished), finished
    assert finished.status != 0

    # The kernel kills it, which bubblewrap and unshare report in different ways.
    if attack == "compute forever":
        assert finished.ended in ("time", "itself"), finished
    elif attack in BY_LIMITS:
        assert finished.ended == ("output" if attack == "print endlessly" else "time"), finished
    else:
        assert finished.ended == "itself", finished
        assert re.search(r"Error\b", finished.errors), finished  # refused, and no further


def test_the_attacks_are_none_where_nothing_is_in_their_way(
    outcomes: dict[Level, dict[str, Finished]],
) -> None:
    """Otherwise they would prove nothing.

    Root may do more than other users, and a memory limit works without a sandbox.
    """
    stopped = {attack for attack, finished in outcomes[Level.process].items() if not got_out(finished)}
    always = {
        "read an inherited variable",
        "allocate 4 GB of memory",
        "start threads endlessly",
        "fill the disk",
        "make a file of 1 TB with holes",
        "write to the file that is its standard input",
        *BY_LIMITS,
    }
    by_chance = {  # depends on descriptors, the kernel, and the memory limit
        "write to a descriptor of the parent",
        "read it by its handle",
        "raise its own limits",
        "start 2,000 threads with small stacks",
    }
    assert always <= stopped <= always | by_chance | OF_KERNEL | (OF_ROOT if os.geteuid() else set())


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= 60


def test_nothing_is_left(
    target: dict[str, object], outcomes: dict[Level, dict[str, Finished]], owner: str
) -> None:
    run = Path(str(target["run"]))
    assert {path.name for path in run.iterdir()} - {"new.txt", "spare.txt"} == {
        "secret.txt",
        "socket",
        "dgram",
    }
    deadline = time.monotonic() + 10  # processes that outlive a call without a sandbox end by themselves

    while (left := processes_of(owner)) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert not left


@pytest.mark.parametrize("level", STRONG)
def test_a_program_that_does_all_to_stay_is_gone_when_the_call_returns(
    level: Level, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program ignores refusals, closes all descriptors and exceeds its time."""
    needs(level)
    program = """
import ctypes, os, time
libc = ctypes.CDLL(None)
for attempt in (os.setsid, os.setpgrp, lambda: libc.prctl(1, 0), lambda: libc.prctl(36, 1), os.fork, lambda: libc.daemon(0, 0)):
    try: attempt()
    except OSError: pass
print(os.readlink("/proc/self") if os.path.exists("/proc/self") else os.getpid(), flush=True)
os.closerange(0, 64)
time.sleep(600)
"""
    monkeypatch.setenv(OWNER, f"{owner}stays/")
    session = SandboxSession(level, SandboxLimits(wall_s=1.0))
    assert session.run("print(1)")[1]
    assert processes_of(f"{owner}stays/")

    assert run_program(program, level, SandboxLimits(wall_s=1.0)).ended == "time"
    assert session.run(program)[0].ended == "time"
    session.close()
    assert processes_of(f"{owner}stays/") == []


def test_the_table_has_what_happened(outcomes: dict[Level, dict[str, Finished]]) -> None:
    for level in STRONG:
        needs(level)
    if os.geteuid():
        pytest.skip("the table has what root's programs could do without a sandbox")
    lines = [["what a program tries", *(level.value for level in Level)]]

    for attack in ATTACKS:
        cells = ("done" if got_out(outcomes[level][attack]) else "stopped" for level in Level)
        lines.append([attack, *cells])

    if os.environ.get("MEGARL_WRITE_PAGES"):
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)

    with TABLE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == lines, (
            f"{TABLE}: if the new one is right, this test writes it with MEGARL_WRITE_PAGES=1"
        )


def test_the_page_counts_the_attacks() -> None:
    page = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert f"{len(ATTACKS)} attack programs" in page


@pytest.mark.parametrize("level", Level)
def test_a_program_works(level: Level) -> None:
    """This covers the standard library, threads, an event loop, standard input, an error with its line, and
    an exit status."""
    needs(level)
    program = """
import asyncio, fractions, json, random, sys, threading, zoneinfo
thread = threading.Thread(target=print, args=(fractions.Fraction(1, 3),))
thread.start(); thread.join()
asyncio.run(asyncio.sleep(0))
print(json.loads(sys.stdin.read())["é"], __name__, sys.argv)
raise ValueError("meant")
"""
    finished = run_program(program, level, SandboxLimits(), stdin='{"é": 7}')
    assert finished.output.splitlines()[:1] == ["1/3"]
    assert finished.output.splitlines()[1].startswith("7 __main__ [")
    assert finished.errors.splitlines()[0] == "Traceback (most recent call last):"
    assert (
        '  File "<program>", line 7, in <module>\n    raise ValueError("meant")\nValueError: meant'
        in finished.errors
    )
    assert sandbox_program.__name__ not in finished.errors
    assert str(sandbox_program.__file__) not in finished.errors
    assert (finished.status, finished.ended) == (1, "itself")
    assert run_program("import sys; sys.exit(125)", level, SandboxLimits()).status == 125
    assert "SyntaxError" in run_program("def f(:", level, SandboxLimits()).errors


@pytest.mark.parametrize("level", Level)
def test_a_session_keeps_what_programs_leave_until_one_is_ended(
    level: Level, target: dict[str, object]
) -> None:
    needs(level)
    session = SandboxSession(level, SandboxLimits(memory_mb=256, wall_s=4.0, output_kb=4))

    def run(program: str) -> tuple[str, str, bool]:
        finished, is_alive = session.run(program)
        return finished.output, finished.errors.strip().rpartition("\n")[2], is_alive

    try:
        assert run("def double(x): return 2 * x\nkept = 4; print('set')") == ("set\n", "", True)
        assert run("import sys; print(double(kept), end=''); print('so', file=sys.stderr)") == (
            "8",
            "so",
            True,
        )
        assert run("kept += 1; double(1 / 0)") == ("", "ZeroDivisionError: division by zero", True)
        assert run("print(kept); raise SystemExit(3)") == ("5\n", "SystemExit: 3", True)
        assert run("def f(:")[1:] == ("SyntaxError: invalid syntax", True)
        # Orders arrive on another descriptor.
        assert run("print(len(input()))")[1:] == ("EOFError: EOF when reading a line", True)
        assert run(f"print(len('{'a' * 200_000}'))") == ("200000\n", "", True)  # longer than a pipe's buffer
        if level is not Level.process:
            refused = run(f"print(open('{target['run']}/secret.txt').read())")
            assert refused[:1] + refused[2:] == ("", True)
            assert "Error" in refused[1]
            assert "Error" in run("import os; os.fork()")[1]
        finished, is_alive = session.run("kept = 'b' * 5000; print(kept)")
        assert (finished.output, finished.ended, is_alive) == ("b" * 4096, "output", False)
        assert run("print(kept)")[1:] == ("NameError: name 'kept' is not defined", True)
        start_s = time.monotonic()
        assert session.run("import time; time.sleep(60)")[0].ended == "time"
        assert time.monotonic() - start_s < 30
        assert session.run("import os; os._exit(4)") == (Finished("", "", 4, "itself"), False)
        assert run("print(1)")[0] == "1\n"
        with ThreadPoolExecutor(1) as pool:  # closed in the meantime, and in a thread that ends
            hanging = pool.submit(session.run, "while True: pass")
            while not session.is_running:
                time.sleep(0.01)
            session.close()
            assert not hanging.result()[1]
        with pytest.raises(RuntimeError, match="the session is closed"):
            session.run("print(1)")
    finally:
        session.close()


def test_bubblewrap_gives_a_folder_to_write_to() -> None:
    needs(Level.bubblewrap)
    program = (
        "import os; print(os.getcwd(), os.path.exists('kept')); open('kept', 'w').write('x'); "
        "print(open('kept').read())"
    )
    for _ in range(2):  # the second run does not see files of the first
        assert run_program(program, Level.bubblewrap, SandboxLimits()).output == "/tmp False\nx\n"


def test_output_is_cut_where_it_is_too_long() -> None:
    finished = run_program("print('a' * 2000)", Level.process, SandboxLimits(output_kb=1))
    assert (finished.output, finished.ended) == ("a" * 1024, "output")


def test_a_level_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r"^the sandbox bubblewrap needs 'setpriv', which is not installed$"
    ):
        run_program("", Level.bubblewrap, SandboxLimits())

    for name, content in (
        ("setpriv", 'shift 2; exec "$@"'),
        ("bwrap", "echo bwrap: no permission to make a new namespace >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{content}\n")
        (tmp_path / name).chmod(0o755)

    with pytest.raises(
        SandboxError,
        match=r"^the sandbox bubblewrap does not work here: bwrap: no permission to make a new namespace$",
    ):
        run_program("", Level.bubblewrap, SandboxLimits())


def test_the_strongest_that_holds_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A level that lets a program escape does not count, as with limits only."""
    reason = why_not(Level.process)
    assert reason.startswith("the sandbox process is not effective here: a program could read a file")
    reasons = {Level.bubblewrap: "no bwrap", Level.namespaces: "forbidden", Level.landlock: ""}
    monkeypatch.setattr(sandbox, "why_not", lambda level: reasons[level])
    assert strongest() is Level.landlock
    reasons[Level.landlock] = "no Landlock"

    with pytest.raises(
        SandboxError,
        match=r"no sandbox works on this machine: no bwrap; forbidden; no Landlock\. Install bubblewrap",
    ):
        strongest()


def test_the_numbers_of_allowed_calls_are_those_of_the_kernel() -> None:
    """The tables of both processors are compared with the headers of this machine."""
    header = Path("/usr/include/asm-generic/unistd.h")
    own = next(Path("/usr/include").glob("*/asm/unistd_64.h"), None)
    if own is None or not header.exists():
        pytest.skip("no headers of the kernel are installed")
    tables = [*system_calls.ALLOWED_CALLS.values(), system_calls.CHECKED_CALLS]

    for column, file in enumerate((own, header)):
        numbers = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", file.read_text()))
        for calls in tables:
            for name, number in system_calls.numbers_of(calls, column).items():
                assert numbers.get(name, str(number)) == str(number), name


def test_every_level_holds_for_another_user_than_root() -> None:
    """Filters and mounts need more preparation without root's privileges."""
    interpreter = shutil.which("python3", path="/usr/bin:/bin")  # an interpreter that every user can run
    if (
        os.geteuid()
        or interpreter is None
        or subprocess.run([interpreter, "-c", "import sys; assert sys.version_info >= (3, 11)"]).returncode
    ):
        pytest.skip("needs root, to become another user, and the system's own Python 3.11 or later")

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        shutil.copytree(
            Path(megarl.__file__).parent,
            Path(folder) / "megarl",
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        has_namespaces = (
            subprocess.run([*user, "unshare", "--user", "true"], capture_output=True).returncode == 0
        )
        levels = STRONG if has_namespaces else [Level.landlock]
        names = [level.value for level in levels if not why_not(level)]
        program = (
            f"import sys; sys.path.insert(0, {folder!r})\nfrom megarl.machine.sandbox import Level, why_not\n"
        )
        program += f"print([why_not(Level(name)) for name in {names!r}])"
        ended = subprocess.run(
            [*user, interpreter, "-B", "-c", program],
            env={"PATH": os.environ["PATH"]},
            cwd="/",
            capture_output=True,
            text=True,
        )

    assert (ended.stdout.strip(), ended.stderr) == (str([""] * len(names)), "")
