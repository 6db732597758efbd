"""Where the suite's time goes: tests, wall seconds, CPU seconds and processes started, by package; printed
when the tests end.

A thread looks at /proc every INTERVAL_S. A process belongs to the run if its environment carries the run's
mark, which Ray's daemons inherit as well, or if its parent belongs to the run. What it uses is booked to the
test that runs then. What the kernel reports of children that a process waited for is booked too, less what
was booked while they lived: short ones cost what they cost. Each process that pytest itself starts is
counted; of what others start, one that ends within INTERVAL_S may not be. Where pytest-xdist divides the
tests, each of its workers looks for itself, and the sum is printed, with what this process and its server of
forked processes took themselves.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server

INTERVAL_S = 0.2
COLUMNS = ("tests", "wall s", "CPU s", "python processes", "other processes")
_BEFORE = "(before the first test)"
_MARK = "WHERE_TIME_GOES"
_SERVER = f"{fork_server.ROOM}=".encode()
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Costs = defaultdict[tuple[str, str], float]  # by the test's id and the column


@dataclass
class _Process:
    parent: int = 0
    own_s: float = 0.0
    children_s: float = 0.0  # of all that it waited for, and of theirs
    lived_s: float = 0.0  # its ended children: what was booked while they lived
    late_s: float = 0.0  # and after that


class Ledger:
    """What the tests of this process cost."""

    def __init__(self) -> None:
        self._costs: Costs = defaultdict(float)
        self._test = _BEFORE
        self._since_s = time.monotonic()
        self._own_id = os.getpid()
        os.environ[_MARK] = f"{self._own_id}.{time.time_ns()}"
        self._mark = f"{_MARK}={os.environ[_MARK]}".encode()
        self._known = {self._own_id: _Process()}
        self._foreign = set[int]()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        sys.addaudithook(self._audit)
        threading.Thread(target=self._look_often, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._turn_to(nodeid)
        self._costs[nodeid, "tests"] = 1

    def end(self) -> Costs:
        self._ended.set()
        self._turn_to("")
        return self._costs

    def _turn_to(self, test: str) -> None:
        if _file(test) != _file(self._test):
            self._look()
        now_s = time.monotonic()
        self._costs[self._test, "wall s"] += now_s - self._since_s
        self._test = test
        self._since_s = now_s

    def _look_often(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            ids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
            self._foreign &= ids
            seen: dict[int, _Process] = {}
            # Parents first: where a child ends meanwhile, its end is seen before what its parent reports of
            # it.
            for pid in [*self._known, *sorted(ids - self._known.keys() - self._foreign)]:
                if (process := _process(pid)) is None:
                    continue
                if pid in self._known:
                    seen[pid] = process
                elif process.parent in seen or self._mark in (environment := _read(pid, "environ")):
                    seen[pid] = process
                    # Of what pytest itself starts, the audit hook sees all but what multiprocessing spawns.
                    if process.parent != self._own_id or b"multiprocessing." in _read(pid, "cmdline"):
                        self._count(_executable(pid))
                elif (
                    _SERVER not in environment
                ):  # one that it has just forked has its client's environment in a moment
                    self._foreign.add(pid)
            self._book(seen)

    def _book(self, seen: dict[int, _Process]) -> None:
        for pid in self._known.keys() - seen.keys():
            ended = ancestor = self._known[pid]
            while ancestor.parent in self._known and ancestor.parent not in seen:
                ancestor = self._known[ancestor.parent]
            if ancestor.parent in self._known:
                self._known[ancestor.parent].lived_s += ended.own_s + ended.children_s

        for pid, process in seen.items():
            before = self._known.get(pid, _Process())
            process.lived_s, process.late_s = (
                before.lived_s,
                max(before.late_s, process.children_s - before.lived_s),
            )
            self._costs[self._test, "CPU s"] += process.own_s + process.late_s - before.own_s - before.late_s

        self._known = seen

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.fork") and os.getpid() == self._own_id:
            self._count(os.fsdecode(arguments[0]) if arguments else sys.executable)

    def _count(self, executable: str) -> None:
        self._costs[
            self._test,
            "python processes" if Path(executable).name.startswith("python") else "other processes",
        ] += 1


def _process(pid: int) -> _Process | None:
    # from the third on: the second, a name, may hold spaces
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    user, system, children_user, children_system = (int(field) / _TICKS_PER_S for field in fields[11:15])
    return _Process(int(fields[1]), user + system, children_user + children_system)


def _read(pid: int, file: str) -> bytes:
    """Empty where the process has ended, or is another user's."""
    with suppress(OSError), open(f"/proc/{pid}/{file}", "rb", buffering=0) as opened:
        return opened.read()
    return b""


def _shared_s() -> float:
    """Processor time of this process, and of the fork server that it may have."""
    servers = {
        int(name) for name in os.listdir("/proc") if name.isdigit() and _SERVER in _read(int(name), "environ")
    }
    processes = {pid: process for pid in servers | {os.getpid()} if (process := _process(pid)) is not None}
    own = [os.getpid()]
    for parent in own:  # which grows
        own += [pid for pid, process in processes.items() if process.parent == parent]

    return sum(processes[pid].own_s for pid in own)


def _executable(pid: int) -> str:
    """Empty where the process has ended, or is another user's."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return ""


def _file(test: str) -> str:
    return test.partition("::")[0]


def _package(test: str) -> str:
    return "/".join(_file(test).split("/")[: 3 if test.startswith("tests/unit/") else 2])


class Summary:
    """Prints what the tests of all processes cost."""

    def __init__(self, own: Ledger | None) -> None:
        """own: of this process, where it runs tests itself."""
        self._own = own
        self._costs: Costs = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(
            {
                (test, column): cost
                for test, column, cost in getattr(node, "workeroutput", {}).get("costs", [])
            }
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._add(self._own.end() if self._own is not None else {(_BEFORE, "CPU s"): _shared_s()})
        terminalreporter.section("where the time goes")

        for line in [
            *table(self._costs, _package),
            "",
            "The slowest files",
            *table(self._costs, _file, most=10),
        ]:
            terminalreporter.write_line(line)

    def _add(self, costs: Mapping[tuple[str, str], float]) -> None:
        for key, cost in costs.items():
            self._costs[key] += cost


class Reporter:
    """Gives what the tests of a worker of pytest-xdist cost to the process that prints it."""

    def __init__(self, config: Any, own: Ledger) -> None:
        self._config = config
        self._own = own

    def pytest_sessionfinish(self) -> None:
        self._config.workeroutput["costs"] = [[*key, cost] for key, cost in self._own.end().items()]


def table(costs: Costs, group_of: Callable[[str], str], most: int = 1000) -> Iterator[str]:
    """The groups of tests, that with the most wall time first; below them the sum of all, shown or not."""
    groups: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for (test, column), cost in costs.items():
        groups[group_of(test)][column] += cost
    total = {column: sum(group[column] for group in groups.values()) for column in COLUMNS}
    shown = sorted(groups.items(), key=lambda entry: -entry[1]["wall s"])[:most]
    width = max(len(name) for name, _ in shown)
    yield " " * width + "".join(f"{column:>18}" for column in COLUMNS)
    for name, group in [*shown, ("all", total)]:
        yield f"{name:{width}}" + "".join(f"{group[column]:18,.0f}" for column in COLUMNS)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.collectonly or not Path("/proc/self/stat").exists():
        return
    is_worker = hasattr(config, "workerinput")
    divides = getattr(config.option, "dist", "no") != "no"
    own = None if divides and not is_worker else Ledger()

    for plugin in (own, Reporter(config, own) if is_worker and own is not None else Summary(own)):
        if plugin is not None:
            config.pluginmanager.register(plugin)
