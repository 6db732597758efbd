"""Test the programs of episodes: commands and functions, their rewards, and each kind of failure. The engine is a
stub that answers every request with the same tokens."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.sandboxes import local
from megarl.agents.trajectory import EpisodeEnd, Sample, VersionSpan
from megarl.config.schema import (
    AgentConfig,
    HarnessConfig,
    SandboxConfig,
    SandboxProvider,
)
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.external import ExternalHarness
from megarl.endpoint.harness import load_harness
from megarl.endpoint.session import (
    DroppedRequest,
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
    SessionReport,
)
from megarl.endpoint.session_server import SessionServer
from megarl.machine.reaper import descendants, name_of
from megarl.machine.user_functions import UserFunctionError
from megarl.rollout.driver.sample_rows import FinishedGroup, from_bytes, sample_rows, to_bytes
from megarl.rollout.tool_calls import call_format
from tests.unit.data.chats import TEMPLATE, character_tokenizer

TOKENIZER = character_tokenizer(TEMPLATE)
PROMPT = [5, 6]
TASK = Task(messages=[{"role": "user", "content": "ab?"}], reward_model={"ground_truth": "42"}, seed=1)

# A client without dependencies. `ask` sends a conversation of one message.
CLIENT = """
import json, os, sys, time, urllib.request
def post(url, body, timeout=None):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=timeout))
def ask(text="hi", timeout=None):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    return post(url, body, timeout)["choices"][0]["message"]["content"]
"""


class Engine:
    """Stub for the driver and its engines.

    Attributes:
        is_silent: Requests are not answered.
        dropped: Requests whose client has gone.
    """

    def __init__(self, *, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self.server: SessionServer
        self.requests: list[SampleRequest] = []
        self.dropped: list[int] = []
        self.ended: list[SessionEnd] = []

    def report(self, report: SessionReport) -> None:
        if isinstance(report, SessionEnd):
            self.ended.append(report)
        elif isinstance(report, DroppedRequest):
            self.dropped.append(report.request)
        else:
            self.requests.append(report)
            if not self.is_silent:
                asyncio.ensure_future(self._answer(report))  # noqa: RUF006

    async def _answer(self, asked: SampleRequest) -> None:
        ids = np.array([TOKENIZER.convert_tokens_to_ids("4"), TOKENIZER.eos_token_id], dtype=np.int32)
        sample = Sample(ids, np.full(2, -0.5, np.float32), "stop", (VersionSpan(9, 2),))
        await self.server.accept(SampleOrder(asked.episode, asked.request, sample))


def played(
    config: HarnessConfig, max_turns: int = 4, task: Task = TASK, **how: Any
) -> tuple[SessionEnd, Engine]:
    """Run one episode."""
    engine = Engine(**how)

    async def play() -> None:
        engine.server = SessionServer(
            load_harness(config, 2),
            ChatTokens(TOKENIZER, partial(call_format, AgentConfig())),
            EpisodeLimits(max_turns=max_turns, max_tokens=500),
            config,
            2,
            engine.report,
        )
        await engine.server.start()
        await engine.server.accept(SessionOrder(0, task, PROMPT))

    asyncio.run(play())
    (ended,) = engine.ended
    return ended, engine


def command(program: str, *arguments: str, time_limit_s: float = 30.0) -> HarnessConfig:
    # -S -E: without the packages of the environment, the interpreter starts faster.
    parts = [sys.executable, "-S", "-E", "-c", CLIENT + program, *arguments]
    return HarnessConfig(command=parts, time_limit_s=time_limit_s)


def test_a_command_gets_its_task_and_prints_its_reward() -> None:
    program = """
task = json.loads(sys.stdin.readline())
assert ask(sys.argv[1]) == "4"
print("working\\n" * 100_000)
print(json.dumps({"reward": 0.5 * (task["ground_truth"] == "42") + len(task["messages"])}))
"""
    ended, engine = played(command(program, "{prompt}"))
    assert (ended.trajectory.failure, ended.trajectory.end) == (None, EpisodeEnd.done)
    (row,) = ended.trajectory.branches
    assert row.rewards.tolist() == [0, 1.5]
    assert row.log_probs.tolist() == [-0.5, -0.5]
    assert "ab?" in TOKENIZER.decode(row.prompt)
    assert ended.trajectory.weight_versions == (9,)
    assert len(engine.requests) == 1


def test_a_command_posts_its_reward_and_does_not_read_its_task() -> None:
    ended, _ = played(
        command('ask(); ask("other"); post(os.environ["MEGARL_SESSION_URL"] + "/reward", {"reward": 2})')
    )
    assert ended.trajectory.failure is None
    assert ended.trajectory.turn_rewards == [0.0, 2.0]
    assert len(ended.trajectory.branches) == 2


FAILURES = {
    "exit_code": ('ask(); print("lost the shop"); sys.exit(3)', "exit code 3: lost the shop"),
    "no_turn": ('print(json.dumps({"reward": 1}))', "without a turn"),
    "bad_reward": ('ask(); print(json.dumps({"reward": "x"}))', "finite number"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_command_that_fails_has_no_reward(kind: str) -> None:
    program, why = FAILURES[kind]
    ended, _ = played(command(program))
    assert ended.trajectory.failure == kind
    assert why in ended.why
    assert (ended.trajectory.branches, ended.trajectory.mask.tolist()) == ((), [False])


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path: Path) -> None:
    program = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
    file = tmp_path / "child"
    ended, _ = played(command(program, str(file), time_limit_s=10.0))
    assert (ended.trajectory.failure, "time_limit_s=10" in ended.why) == ("timed_out", True)
    pid = int(file.read_text())
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_client_that_abandons_its_request_counts_as_disconnected() -> None:
    program = """
try:
    ask(timeout=0.3)
except OSError:
    time.sleep(60)
"""
    ended, engine = played(command(program, time_limit_s=10.0), is_silent=True)
    assert ended.trajectory.failure == "disconnected"
    assert engine.dropped == [0]


def test_an_error_after_a_limit_of_the_run_is_no_failure() -> None:
    ended, _ = played(command('ask(); ask("again")'), max_turns=1)
    assert (ended.trajectory.failure, ended.trajectory.end) == (None, EpisodeEnd.turns)
    assert ended.trajectory.turn_rewards == [0.0]


FUNCTIONS = """
import asyncio, os
import httpx
def ask(endpoint):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-api-key": endpoint.api_key}
    return httpx.post(endpoint.base_url + "/chat/completions", json=body, headers=headers).json()
def plain(task, endpoint):
    ask(endpoint)
    return {"reward": float(task.ground_truth == "42")}
async def raising(task, endpoint):
    raise LookupError("no such shop")
async def hanging(task, endpoint):
    await asyncio.sleep(60)
def exiting(task, endpoint):
    raise SystemExit(2)
def one(task): ...
"""


@pytest.mark.parametrize(
    ("name", "failure", "why"),
    [
        ("plain", None, ""),
        ("raising", "raised", "LookupError: no such shop (agent.py:12)"),
        ("exiting", "raised", "SystemExit: 2"),
        ("hanging", "timed_out", "time_limit_s=0.5"),
    ],
)
def test_functions(tmp_path: Path, name: str, failure: str | None, why: str) -> None:
    (tmp_path / "agent.py").write_text(FUNCTIONS)
    function = f"{tmp_path / 'agent.py'}:{name}"
    limit_s = 0.5 if name == "hanging" else 30.0
    ended, _ = played(HarnessConfig(function=function, time_limit_s=limit_s))
    assert ended.trajectory.failure == failure
    assert why in ended.why
    if failure is None:
        assert ended.trajectory.turn_rewards == [1.0]


@pytest.fixture
def needs_bubblewrap() -> None:
    if why := local.why_not():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def sandboxed(program: str, *arguments: str, time_limit_s: float = 30.0, **of_sandbox: Any) -> HarnessConfig:
    parts = ["python", "-S", "-E", "-c", CLIENT + program, *arguments]
    return HarnessConfig(
        command=parts,
        time_limit_s=time_limit_s,
        sandbox=SandboxConfig(provider=SandboxProvider.local, **of_sandbox),
    )


@pytest.mark.usefixtures("needs_bubblewrap")
def test_a_command_in_a_sandbox_reaches_the_model_and_nothing_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "shop.txt").write_text("open")
    program = """
import socket
task = json.loads(sys.stdin.readline())
reached = []
for attempt in (lambda: open(sys.argv[2]), lambda: socket.create_connection(("127.0.0.1", int(sys.argv[3])), 5)):
    try:
        reached.append(attempt())
    except OSError:
        pass
assert not reached, reached
assert open("shop.txt").read() == "open" and ask(sys.argv[1]) == "4"
print(json.dumps({"reward": len(task["messages"]) + 0.5 * (task["ground_truth"] == "42")}))
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = ("{prompt}", f"{tmp_path}/secret", str(server.getsockname()[1]))
        ended, engine = played(sandboxed(program, *arguments, files=[f"{tmp_path}/shop.txt"]))
    assert ended.why == ""
    assert (ended.trajectory.failure, ended.trajectory.turn_rewards) == (None, [1.5])
    assert len(engine.requests) == 1


@pytest.mark.usefixtures("needs_bubblewrap")
@pytest.mark.parametrize(
    ("program", "of_sandbox", "failure", "why"),
    [
        ('ask(); print("lost"); sys.exit(3)', {}, "exit_code", "exit code 3: lost"),
        ("ask(); x = b'x' * (200 << 20); time.sleep(60)", {"memory_mb": 100}, "sandbox_ended", "memory_mb is 100"),
        ("ask()", {"image": "/no/such/folder"}, "no_sandbox", "is no folder of this machine"),
        ("ask()", {"start_limit_s": 1e-4}, "no_sandbox", "start_limit_s=0.0001 is over"),
        ("time.sleep(60)", {"time_limit_s": 2.0}, "timed_out", "time_limit_s=2 is over"),
    ],
    ids=["exit code", "memory", "image", "start", "time"],
)  # fmt: skip
def test_a_sandbox_that_fails_is_no_reward(
    program: str, of_sandbox: dict[str, Any], failure: str, why: str
) -> None:
    ended, _ = played(sandboxed(program, **of_sandbox))
    assert ended.trajectory.failure == failure
    assert why in ended.why
    assert "bwrap" not in {name_of(pid) for pid in descendants(os.getpid())}


IN_SANDBOX = """
async def run(task, endpoint):
    program = "import os; print(os.listdir())"
    async with endpoint.sandbox() as sandbox:
        await sandbox.upload(b"", "mine")
        ended = await sandbox.exec(["python", "-S", "-E", "-c", program])
    import httpx
    async with httpx.AsyncClient(headers={"x-api-key": endpoint.api_key}) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": ended.output}]}
        await client.post(endpoint.base_url + "/chat/completions", json=body)
    return float(ended.output == "['mine']\\n")
async def with_image_of_row(task, endpoint):
    async with endpoint.sandbox():
        pass
"""


@pytest.mark.usefixtures("needs_bubblewrap")
def test_a_function_starts_sandboxes(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(IN_SANDBOX)
    sandbox = SandboxConfig(provider=SandboxProvider.local)
    path = str(tmp_path / "agent.py")
    ended, _ = played(HarnessConfig(function=f"{path}:run", sandbox=sandbox))
    assert (ended.trajectory.failure, ended.trajectory.turn_rewards) == (None, [1.0])

    function = f"{path}:with_image_of_row"
    task = replace(TASK, extra_info={"sandbox_image": "/image/of/the/row"})
    ended, _ = played(HarnessConfig(function=function, sandbox=sandbox), task=task)
    assert (ended.trajectory.failure, "'/image/of/the/row' is no" in ended.why) == ("no_sandbox", True)
    with pytest.raises(ValueError, match="which does not exist"):
        load_harness(HarnessConfig(command=["a"], sandbox=replace(sandbox, files=["/no/such/file"])), 1)


def test_a_program_that_cannot_be_started_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(FUNCTIONS)
    function = f"{tmp_path / 'agent.py'}:one"
    with pytest.raises(UserFunctionError, match="cannot be called with a task and an endpoint"):
        load_harness(HarnessConfig(function=function), 1)
    with pytest.raises(ValueError, match="'no-such-program', which is neither"):
        load_harness(HarnessConfig(command=["no-such-program"]), 1)


def test_an_episode_that_is_not_needed_any_more_is_ended() -> None:
    engine = Engine(is_silent=True)
    config = command("ask()")

    async def play() -> None:
        engine.server = SessionServer(
            load_harness(config, 1),
            ChatTokens(TOKENIZER, partial(call_format, AgentConfig())),
            EpisodeLimits(max_turns=4, max_tokens=500),
            config,
            1,
            engine.report,
        )
        await engine.server.start()
        running = asyncio.ensure_future(engine.server.accept(SessionOrder(0, TASK, PROMPT)))
        await until(lambda: bool(engine.requests))
        await engine.server.close(0)
        await asyncio.wait_for(running, 20)
        await until(lambda: engine.dropped == [0])

    asyncio.run(play())
    assert engine.ended == []


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.01)


def claim(url: str, key: str) -> httpx.Response:
    return httpx.post(f"{url}/sessions", headers={"Authorization": f"Bearer {key}"}, timeout=30)


def play_claimed(url: str, answers: list[Any]) -> None:
    """Claim and play three episodes, as a client elsewhere does."""
    answers.append(claim(url, "not the key of the run").status_code)
    for result in ({"reward": 3}, {"error": "no shop"}, {}):
        claimed = claim(url, "the-key-of-the-run").json()
        given = claimed["environment"]
        headers = {"Authorization": f"Bearer {given['OPENAI_API_KEY']}"}
        body = {"model": "m", "messages": claimed["task"]["messages"]}
        httpx.post(f"{given['OPENAI_BASE_URL']}/chat/completions", json=body, headers=headers)
        if not result:
            httpx.post(f"{given['MEGARL_SESSION_URL']}/reward", json={"reward": 2}, headers=headers)
        end = f"{given['MEGARL_SESSION_URL']}/end"
        answers += [httpx.post(end, json=result, headers=headers).status_code for _ in range(2)]


def test_external_agents_claim_and_end_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="MEGARL_ENDPOINT_KEY"):
        ExternalHarness()
    monkeypatch.setenv("MEGARL_ENDPOINT_KEY", "the-key-of-the-run")
    engine = Engine()
    answers: list[Any] = []
    config = HarnessConfig(external=True, time_limit_s=30)

    async def play() -> None:
        engine.server = SessionServer(
            ExternalHarness(),
            ChatTokens(TOKENIZER, partial(call_format, AgentConfig())),
            EpisodeLimits(max_turns=4, max_tokens=500),
            config,
            3,
            engine.report,
        )
        await engine.server.start()
        client = asyncio.to_thread(play_claimed, engine.server.url, answers)
        orders = [engine.server.accept(SessionOrder(number, TASK, PROMPT)) for number in range(3)]
        await asyncio.gather(client, *orders)

    asyncio.run(play())
    assert answers == [401, 200, 401, 200, 401, 200, 401]
    first, failed, posted = (ended.trajectory for ended in engine.ended)
    assert (first.failure, first.turn_rewards) == (None, [3.0])
    assert (failed.failure, engine.ended[1].why) == ("reported", "no shop")
    assert (posted.failure, posted.turn_rewards) == (None, [2.0])


def test_episodes_in_a_checkpoint() -> None:
    two, _ = played(command('ask(); ask("other"); print(json.dumps({"reward": 2}))'))
    failed, _ = played(command("sys.exit(1)"))
    group = FinishedGroup("a", 9, sample_rows([two.trajectory, failed.trajectory]))
    (read,) = from_bytes(to_bytes([group])).values()
    assert (read.uid, read.version) == ("a", 9)
    assert len(read.rows) == len(group.rows) == len(two.trajectory.rows) + 1
    assert read.rows.ragged == group.rows.ragged
    assert read.rows.non_tensor_batch.keys() == group.rows.non_tensor_batch.keys()
    for name, column in group.rows.non_tensor_batch.items():
        assert read.rows.non_tensor_batch[name].tolist() == column.tolist(), name
