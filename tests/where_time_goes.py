"""Report where the suite's time goes: tests, wall seconds, CPU seconds and processes started, by package;
printed when the tests end.

A thread reads /proc every INTERVAL_S. A process belongs to the run if its environment contains the run's
mark, which Ray's daemons inherit as well, or if its parent belongs to the run. Its usage is attributed to the
test that is running. The kernel's totals for children that a process waited for are attributed too, minus
what was attributed while they lived, so that short processes count. Each process that pytest itself starts is
counted; of those that others start, one that ends within INTERVAL_S may be missed. If pytest-xdist
distributes the tests, each of its workers measures itself, and the sum is printed, including this process and
its fork server.
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

INTERVAL_S = 1.0
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
    children_s: float = 0.0  # of all children that it waited for, and their descendants
    lived_s: float = 0.0  # its ended children: usage attributed while they lived
    late_s: float = 0.0  # and after that


class Ledger:
    """Costs of the tests of this process."""

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
            # Parents first: if a child ends in the meantime, its end is seen before its parent's totals.
            for pid in [*self._known, *sorted(ids - self._known.keys() - self._foreign)]:
                if (process := _process(pid)) is None:
                    continue
                if pid in self._known:
                    seen[pid] = process
                elif process.parent in seen or self._mark in (environment := _read(pid, "environ")):
                    seen[pid] = process
                    # The audit hook sees all processes that pytest itself starts, except those of
                    # multiprocessing's spawn.
                    if process.parent != self._own_id or b"multiprocessing." in _read(pid, "cmdline"):
                        self._count(_executable(pid))
                elif (
                    _SERVER not in environment
                ):  # a process that was just forked briefly has its client's environment
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
    # from the third field on: the second, a name, may contain spaces
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if not fields:
        return None
    user, system, children_user, children_system = (int(field) / _TICKS_PER_S for field in fields[11:15])
    return _Process(int(fields[1]), user + system, children_user + children_system)


def _read(pid: int, file: str) -> bytes:
    """Return a file of a process; empty if it has ended or belongs to another user."""
    with suppress(OSError), open(f"/proc/{pid}/{file}", "rb", buffering=0) as opened:
        return opened.read()
    return b""


def _shared_s() -> float:
    """Return the CPU time of this process, and of its fork server, if any."""
    servers = {
        int(name) for name in os.listdir("/proc") if name.isdigit() and _SERVER in _read(int(name), "environ")
    }
    processes = {pid: process for pid in servers | {os.getpid()} if (process := _process(pid)) is not None}
    own = [os.getpid()]
    for parent in own:  # grows during the loop
        own += [pid for pid, process in processes.items() if process.parent == parent]

    return sum(processes[pid].own_s for pid in own)


def _executable(pid: int) -> str:
    """Return the executable of a process; empty if it has ended or belongs to another user."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return ""


def _file(test: str) -> str:
    return test.partition("::")[0]


def _package(test: str) -> str:
    return "/".join(_file(test).split("/")[: 3 if test.startswith("tests/unit/") else 2])


class Summary:
    """Print the costs of the tests of all processes."""

    def __init__(self, own: Ledger | None) -> None:
        """Create the summary.

        Args:
            own: Ledger of this process, if it runs tests itself.
        """
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
            *table(self._costs, _file, most=25),
        ]:
            terminalreporter.write_line(line)
        # A part of the tests would look like a loss of the others.
        if terminalreporter.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
            ended = {
                name: len(terminalreporter.stats.get(name, ()))
                for name in ("passed", "failed", "error", "skipped")
            }
            processor_s = sum(cost for (_, column), cost in self._costs.items() if column == "CPU s")
            # Trees that a test makes have no benchmarks.
            from benchmarks.history.rows import record

            record("make test", **ended, processor_s=round(processor_s))

    def _add(self, costs: Mapping[tuple[str, str], float]) -> None:
        for key, cost in costs.items():
            self._costs[key] += cost


class Reporter:
    """Send the costs of a pytest-xdist worker's tests to the process that prints them."""

    def __init__(self, config: Any, own: Ledger) -> None:
        self._config = config
        self._own = own

    def pytest_sessionfinish(self) -> None:
        self._config.workeroutput["costs"] = [[*key, cost] for key, cost in self._own.end().items()]


def table(costs: Costs, group_of: Callable[[str], str], most: int = 1000) -> Iterator[str]:
    """Yield the groups of tests, sorted by wall time, and the sum of all groups, including those not
    shown."""
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
