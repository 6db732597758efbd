"""Runs the player of a hub's environment as a process: its episodes are sessions, and its data are rows.

not started -> opens the environment -> plays episodes, or sends rows -> closed
                      ^                          |
                      +--- the process has died -+
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config.kinds import Hub
from megarl.config.schema import EnvironmentConfig
from megarl.endpoint.harness import (
    HarnessError,
    HarnessFailure,
    environment_of,
    record_returned,
    task_fields,
)
from megarl.endpoint.session import AgentSession

_PLAYER = Path(__file__).with_name("player.py")
_LONGEST_LINE = 2**28  # bytes; a row may contain files
_CLOSE_S = 10.0


class HubError(ValueError):
    """The environment of a hub cannot be opened or read."""


class HubPlayer:
    """A harness whose episodes are played by a hub's environment, all by one process.

    Example::

        player = HubPlayer(config.agent.environment)
        version = await player.start()
        async for row in player.rows(size=1000, seed=0): ...
        await player(session, url)  # for each episode
        await player.close()

    Raises:
        HubError: There is no such Python program.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        assert config.hub is not None, "checked by the rules of the section"
        self._hub: Hub = config.hub
        self._config = config
        self._python = config.python or sys.executable
        if shutil.which(self._python) is None:
            raise HubError(
                f"agent.environment.python is {self._python!r}, which is no program; give the Python program "
                f"of the virtual environment that has {self._hub.needs.package}, or null for that of the run"
            )
        self._process: Process | None = None
        self._opening: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> str:
        """Open the environment in a new process, and return the version of the hub's package.

        Raises:
            HubError: The package is not installed, or the environment cannot be opened.
        """
        needs = self._hub.needs
        self._process = await asyncio.create_subprocess_exec(
            self._python,
            "-P",
            str(_PLAYER),
            self._hub.value,
            needs.package.partition("==")[0],
            needs.module,
            stdin=PIPE,
            stdout=PIPE,
            limit=_LONGEST_LINE,
            start_new_session=True,  # an interrupt at the terminal is for this process, which then closes it
        )
        self._send(name=self._config.name, arguments=self._config.arguments)
        answer = await self._receive()
        if "version" in answer:
            return answer["version"]

        await self.close()
        if "is_missing" in answer:
            raise HubError(
                f"agent.environment.hub is {self._hub.value}, but its package is not installed for "
                f"{self._python}: {self._python} -m pip install {needs.package!r}. If its requirements "
                "contradict those of megarl, install it in a virtual environment of its own, and name that "
                "one's Python program in agent.environment.python"
            )
        reason = answer.get("error", "its process has ended, see its output above")
        raise HubError(f"agent.environment: {self._hub.value}/{self._config.name} cannot be opened: {reason}")

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Yield rows of the environment's data, of a started player that plays no episodes.

        Raises:
            HubError: The environment fails.
        """
        self._send(size=size, seed=seed)
        while "row" in (answer := await self._receive()):
            yield answer["row"]
        if "num_rows" not in answer:
            reason = answer.get("error", "its process has ended, see its output above")
            raise HubError(f"{self._hub.value}/{self._config.name}: {reason}")

    async def __call__(self, session: AgentSession, url: str) -> None:
        await self._ensure_started()
        number = next(self._numbers)
        self._waiting[number] = ending = asyncio.get_running_loop().create_future()
        endpoint = {"base_url": environment_of(url, session)["OPENAI_BASE_URL"], "api_key": session.key}
        self._send(episode=number, task=task_fields(session.task), endpoint=endpoint)
        try:
            ended = await ending
        except asyncio.CancelledError:
            self._send(episode=number, is_over=True)
            raise
        finally:
            del self._waiting[number]

        if "error" in ended:
            raise HarnessError(HarnessFailure.raised, ended["error"])
        session.metrics.update(ended["metrics"])
        record_returned(session, ended["reward"])

    async def close(self) -> None:
        """End the process, which closes the environment."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await process.wait()
        except TimeoutError:
            # It leads a process group of its own, so this also ends most processes of the hub.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _ensure_started(self) -> None:
        """Open the environment, once for all episodes. The time limit of one episode does not end this."""
        while self._reading is None or self._reading.done():
            if self._opening is None or self._opening.done():
                self._opening = asyncio.ensure_future(self._open())
            try:
                await asyncio.shield(self._opening)
            except HubError as error:
                raise HarnessError(HarnessFailure.raised, str(error)) from error

    async def _open(self) -> None:
        # The episode of `megarl check` is played by a process that was started before.
        if self._process is None or self._process.returncode is not None:
            await self.start()
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        """Deliver reports until the process ends, which fails the episodes that it plays."""
        while report := await self._receive():
            ending = self._waiting.get(report["episode"])
            if ending is not None and not ending.done():
                ending.set_result(report)
        assert self._process is not None
        status = await self._process.wait()
        why = f"the process of {self._hub.value} ended with exit code {status}, see its output above"
        for ending in self._waiting.values():
            if not ending.done():
                ending.set_exception(HarnessError(HarnessFailure.exit_code, why))

    def _send(self, **order: Any) -> None:
        """Send an order, without waiting until it is read: a hub that hangs must not stop the run.

        Orders to a process that has ended are lost, which the end of its output reports.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _receive(self) -> dict[str, Any]:
        """Return the next report, or nothing if the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        # The process may have been killed while it wrote.
        return json.loads(line) if line.endswith(b"\n") else {}
