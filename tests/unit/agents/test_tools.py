"""Tools: functions with their schemas, the six ways in which a call fails, and the built-in tools."""

from __future__ import annotations

import asyncio
import copy
import pickle
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from megarl.agents.episode import AnswerTurn
from megarl.agents.function_tool import FunctionTool, function_schema
from megarl.agents.protocol import (
    BrokenToolError,
    CallErrorKind,
    Environment,
    Reply,
    SessionTool,
    Task,
    Tool,
    ToolCall,
    ToolResult,
    Turn,
)
from megarl.agents.responder import Responder
from megarl.agents.strict_calls import parse_calls
from megarl.agents.tool_environment import Toolbox, ToolEnvironment
from megarl.agents.tools.calculator import calculator
from megarl.agents.tools.http import HttpGet
from megarl.agents.tools.python import PythonSessions, PythonTool
from megarl.agents.tools.search import FolderSearch
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig, EnvironmentConfig
from megarl.data.turns import TurnTemplate
from megarl.machine.reaper import OWNER, processes_of
from megarl.machine.sandbox_levels import SandboxError, SandboxLimits
from megarl.rollout.tool_calls import call_parser
from tests.unit.data.test_turns import CHATML, OPENING, tokenizer_of

TASK = Task(extra_info={"prices": {"ab": 42}})
HANG = threading.Event()


def price(item: str, task: Task) -> str:
    """The price of an item."""
    return str(task.extra_info["prices"][item])


async def wait(seconds: float = 0.0) -> ToolResult:
    await asyncio.sleep(seconds)
    return ToolResult(f"waited {seconds}", reward=0.5)


def stuck() -> None:
    HANG.wait(30)


async def deaf() -> str:
    """Ignores its cancellation."""
    while not HANG.is_set():
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return ""


def nothing() -> str:
    return ""


def respond(
    text: str, *functions: Any, max_parallel: int = 8, time_limit_s: float = 5.0, is_last: bool = False
) -> Reply:
    environment = ToolEnvironment(
        Toolbox([FunctionTool(each) for each in functions]),
        max_parallel=max_parallel,
        time_limit_s=time_limit_s,
    )

    async def play() -> Reply:
        await environment.start(TASK)
        reply = await environment.respond(Turn(0, text, parse_calls(text), is_last))
        HANG.set()
        await environment.close()
        return reply

    HANG.clear()
    return asyncio.run(play())


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_the_schema_of_a_function() -> None:
    def find(
        words: Annotated[list[str], "to look for"],
        kind: Literal["all", "any"],
        limit: int | None = None,
        near: dict[str, float] | None = None,
        task: Task = TASK,
    ) -> None:
        """Finds.

        And more."""

    function = function_schema(find)["function"]
    assert (function["name"], function["description"]) == ("find", "Finds.\n\nAnd more.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "description": "to look for"},
            "kind": {"enum": ["all", "any"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "near": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]
            },
        },
        "required": ["words", "kind"],
        "additionalProperties": False,
    }


def test_functions_without_a_schema_are_refused() -> None:
    def bare(x): ...  # type: ignore[no-untyped-def]

    def many(*values: int) -> None: ...

    def odd(when: complex) -> None: ...

    for function, said in (
        (bare, "no annotation; write x: str"),
        (many, r"takes \*values"),
        (odd, "complex'>, which a model cannot write"),
    ):
        with pytest.raises(ValueError, match=said):
            function_schema(function)

    with pytest.raises(ValueError, match="two tools have the same name; the names are price, price"):
        Toolbox([FunctionTool(price), FunctionTool(price)])


def test_results_stand_in_the_order_of_the_calls_whoever_is_done_first() -> None:
    reply = respond(
        call("wait", '{"seconds": 0.05}') + call("price", '{"item": "ab"}') + call("nothing"),
        wait,
        price,
        nothing,
    )
    assert [message["content"] for message in reply.messages] == [
        "waited 0.05",
        "42",
        "(the tool returned no text)",
    ]
    assert {message["role"] for message in reply.messages} == {"tool"}
    assert (reply.num_calls, reply.reward, reply.is_done, list(reply.errors)) == (3, 0.5, False, [])
    assert reply.tool_s >= 0.05


def test_a_turn_without_a_call_is_the_answer_and_in_the_last_turn_nothing_is_called() -> None:
    assert respond("42", price) == Reply(is_done=True)
    called: list[int] = []

    def note() -> None:
        called.append(1)

    assert respond(call("note"), note, is_last=True) == Reply()
    assert not called


def test_each_failure_has_its_line_and_its_kind_and_costs_no_other_call() -> None:
    calls = [
        call("price", '{"item": "zz"}'),
        call("stuck"),
        call("deaf"),
        call("price", '{"items": "ab"}'),
        call("price", "3"),
        call("cost"),
        "<tool_call>{price}</tool_call>",
        call("price", '{"item": "ab"}'),
        call("price", '{"item": "ab"}'),
    ]
    start_s = time.monotonic()
    reply = respond("".join(calls), price, stuck, deaf, max_parallel=8, time_limit_s=1.0)
    assert time.monotonic() - start_s < 30  # nothing waits for the hanging tool
    lines = [message["content"] for message in reply.messages]
    assert lines[7] == "42"
    expected = [
        "tool error (raised): price raised KeyError: 'zz'",
        "tool error (timed out): stuck took longer than 1 s",
        "tool error (timed out): deaf took longer than 1 s",
        "tool error (refused arguments): price: ",
        "tool error (refused arguments): arguments must be an object, not 3",
        "tool error (unknown tool): there is no tool 'cost'; there are: price, stuck, deaf",
        "tool error (unreadable): the call could not be read: it is not JSON",
        "42",
        "tool error (too many calls): a turn may have 8 calls; this is number 9 and was not run",
    ]

    for line, begins in zip(lines, expected, strict=True):
        assert line.startswith(begins)
        assert "\n" not in line

    kinds = [error.kind for error in reply.errors]
    assert set(kinds) == set(CallErrorKind)
    assert len(kinds) == 8


HALF = "\ud83d"


def echo(text: str) -> str:
    return text


def raise_half() -> str:
    raise ValueError(f"c{HALF}")


class _Chat:
    """An environment that replies with the given messages."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages

    async def start(self, task: Task) -> None: ...

    async def respond(self, turn: Turn) -> Reply:
        return Reply(messages=self.messages)

    async def close(self) -> None: ...


def answered(environment: Environment, text: str, template: str = CHATML) -> str:
    """Return the text of the bridge after a turn with `text`."""
    tokenizer = tokenizer_of(template, "<|im_end|>")
    is_tools = isinstance(environment, ToolEnvironment)
    turns = TurnTemplate(tokenizer, [function_schema(echo)] if is_tools else None)
    responder = Responder(
        environment, turns, call_parser(AgentConfig(), None, opens_thinking=turns.opens_thinking), TASK
    )

    async def play() -> str:
        await responder.start()
        written = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        token_ids, reply = await responder.answer(AnswerTurn((0, 0), written, is_last=False))
        assert str(reply.messages).encode()  # it can be encoded
        await responder.close()
        return str(tokenizer.decode(token_ids))

    return asyncio.run(play())


def test_no_text_of_a_tool_or_of_the_model_ends_the_run_because_it_cannot_be_encoded() -> None:
    tools = Toolbox([FunctionTool(each) for each in (echo, raise_half)])
    environment = ToolEnvironment(tools)
    spelled = call("echo", '{"text": "\\ud83d"}')
    assert (
        "unreadable): the call could not be read: it is not JSON (arguments.text has half of a"
        in answered(environment, spelled)
    )
    assert "ValueError: c<unk>" in answered(environment, call("raise_half"))

    async def shout(text: str) -> str:
        return f"{text}{HALF}!"

    shouting = ToolEnvironment(Toolbox([FunctionTool(shout)]))
    assert "<tool_response>\nab<unk>!\n" in answered(shouting, call("shout", '{"text": "ab"}'))
    assert "<|im_start|>user\nno<unk>" in answered(_Chat([{"role": "user", "content": f"no{HALF}"}]), "a")


@pytest.mark.parametrize(("template", "begin"), [(CHATML, "<think>"), (OPENING, "")])
def test_only_the_calls_behind_the_thinking_are_answered(template: str, begin: str) -> None:
    tools = ToolEnvironment(Toolbox([FunctionTool(echo)]))
    text = begin + call("echo", '{"text": "draft"}') + "</think>" + call("echo", '{"text": "meant"}')
    said = answered(tools, text, template)
    assert said.count("<tool_response>") == 1
    assert "meant" in said


def test_a_tool_that_ends_its_program_or_cancels_itself_ends_its_call_alone() -> None:
    def leave() -> str:
        sys.exit(3)

    async def leave_at_once() -> str:
        sys.exit(4)

    async def cancel() -> str:
        raise asyncio.CancelledError

    reply = respond(
        call("leave") + call("leave_at_once") + call("cancel") + call("price", '{"item": "ab"}'),
        leave,
        leave_at_once,
        cancel,
        price,
    )
    assert [message["content"] for message in reply.messages] == [
        "tool error (raised): leave raised RuntimeError: SystemExit(3)",
        "tool error (raised): leave_at_once raised RuntimeError: SystemExit(4)",
        "tool error (raised): cancel raised CancelledError",
        "42",
    ]


# ---- built-in tools


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 2", "14"),
        ("-2 ** 2", "-4"),
        ("7 // 2 + 7 % 4", "6"),
        ("round(sqrt(2), 3)", "1.414"),
        ("max(1, pi)", "3.14"),
    ],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculator(expression).startswith(result)


@pytest.mark.parametrize(
    "expression",
    [
        "9 ** 9 ** 9",
        "2 ** 4000 * 2 ** 4000",
        "__import__('os')",
        "(1).real",
        "'a' * 9",
        "1 +",
        "1 / 0",
        "(-1) ** 0.5",
        "1+" * 501 + "1",
        "True",
    ],
)
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculator(expression)


def run_turns(
    tools: list[Tool | SessionTool], *turns: list[ToolCall], time_limit_s: float = 30.0
) -> list[Reply]:
    """Run the turns of one episode, which is then closed."""
    environment = ToolEnvironment(Toolbox(tools), max_parallel=9, time_limit_s=time_limit_s)

    async def play() -> list[Reply]:
        await environment.start(TASK)
        try:
            return [
                await environment.respond(Turn(number, "", calls, is_last=False))
                for number, calls in enumerate(turns)
            ]
        finally:
            await environment.close()

    return asyncio.run(play())


def programs(*texts: str) -> list[ToolCall]:
    return [ToolCall("python", {"code": text}) for text in texts]


def texts_of(reply: Reply) -> list[str]:
    return [message["content"] for message in reply.messages]


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> str:
    """Mark the processes of the sandboxes that the test starts."""
    mark = f"{secrets.token_hex(8)}/"
    monkeypatch.setenv(OWNER, mark)
    return mark


LONG = "print('a' * 5000)"
SMALL = SandboxLimits(memory_mb=128, cpu_s=5, wall_s=1.0, output_kb=4)


def test_python_programs_remember_nothing_of_each_other_and_each_failure_is_a_line(owner: str) -> None:
    (reply,) = run_turns(
        [PythonTool(limits=SMALL)],
        programs(
            "kept = 3; print(kept + 1)",
            "print(kept)",
            "while True: pass",
            LONG,
            "import os; os._exit(3)",
            "b'x' * 10**9",
            "pass",
        ),
    )
    done, absent, endless, talkative, gone, large, silent = texts_of(reply)
    assert done == "4"
    assert absent.startswith("Traceback (most recent call last):\n")
    assert absent.endswith("NameError: name 'kept' is not defined")
    assert endless == "tool error (timed out): python: the program took longer than 1 s and was terminated"
    assert (
        talkative
        == "tool error (raised): python raised ProgramEndedError: the program printed more than 4 KB and was terminated"
    )
    assert gone == (
        "tool error (raised): python raised ProgramEndedError: the program ended its process (status "
        "3); its limit is 5 s of CPU time"
    )
    assert large.endswith("MemoryError")
    assert silent == "(the tool returned no text)"
    assert [error.kind for error in reply.errors] == [
        CallErrorKind.timed_out,
        CallErrorKind.raised,
        CallErrorKind.raised,
    ]
    assert not processes_of(owner)


def test_a_session_of_python_is_an_episodes_own_and_ends_with_it(owner: str) -> None:
    tool = PythonSessions(limits=SMALL)
    first, second, third = run_turns(
        [tool],
        programs("kept = [1]", "kept.append(2)", "print(kept)"),
        programs("print(sum(kept))", LONG),
        programs("print(kept)"),
    )
    assert texts_of(first)[2] == "[1, 2]"  # one after another, in order
    assert texts_of(second)[0] == "3"

    # The terminated program took the interpreter's state with it.
    assert texts_of(third)[0].endswith("NameError: name 'kept' is not defined")
    (other,) = run_turns([tool], programs("print(kept)"))
    assert texts_of(other)[0].endswith("NameError: name 'kept' is not defined")
    assert not processes_of(owner)


def test_a_clock_of_the_environment_ends_the_program_too(owner: str) -> None:
    limits = SandboxLimits(wall_s=60)
    for tool in (PythonTool(limits=limits), PythonSessions(limits=limits)):
        (reply,) = run_turns([tool], programs("import time; time.sleep(60)"), time_limit_s=0.1)
        assert texts_of(reply) == ["tool error (timed out): python took longer than 0.1 s"]
        deadline = time.monotonic() + 10
        while processes_of(owner) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not processes_of(owner)


def test_a_sandbox_that_is_gone_is_no_text_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise SandboxError("the sandbox landlock does not work here: forbidden")

    tool = PythonSessions(limits=SMALL)
    monkeypatch.setattr("megarl.machine.sandbox_session.StartedProgram", fail)
    with pytest.raises(BrokenToolError, match="landlock does not work here"):
        run_turns([tool], programs("print(1)"))
    monkeypatch.setattr("megarl.agents.tools.python.strongest", fail)
    with pytest.raises(ValueError, match="tool 'python': the sandbox landlock does not work here"):
        load_agent(AgentConfig(tools=["python"]))


def test_search_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("The fox runs.\n\nA hen sits on eggs, and eggs are warm.")
    (tmp_path / "deep/b.md").write_text(
        "Eggs are laid by hens of every kind, and by many other birds and reptiles too."
    )
    (tmp_path / "c.bin").write_bytes(b"\xff eggs")
    search = FolderSearch(tmp_path, num_results=1, name="look")
    assert search.schema["function"]["name"] == "look"
    found = asyncio.run(search.call({"query": 'egg" OR *'}, TASK))
    assert (
        found == "a.txt: A hen sits on eggs, and eggs are warm."
    )  # two occurrences of the word in a shorter paragraph
    assert asyncio.run(search.call({"query": "zebra"}, TASK)) == "nothing was found"
    (tmp_path / "many.txt").write_text("\n\n".join(f"Paragraph {number} of eggs." for number in range(2000)))
    hasty = FolderSearch(tmp_path, name="hasty", time_limit_s=0)
    (reply,) = run_turns(
        [search, hasty],
        [ToolCall("look", {"query": "***"}), ToolCall("hasty", {"query": "eggs of paragraph"})],
    )
    assert texts_of(reply) == [
        "tool error (raised): look raised ValueError: the query has no word",
        "tool error (timed out): hasty: the search took longer than 0 s",
    ]
    with pytest.raises(ValueError, match=r"no file ending in \.rst"):
        FolderSearch(tmp_path, suffixes=(".rst",))


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/slow":
            HANG.wait(10)
        if self.path == "/away":
            self.send_response(302)
            self.send_header("Location", "http://elsewhere.test/")
            self.end_headers()
            return

        self.send_response(200 if self.path != "/none" else 404)
        self.end_headers()
        with suppress(BrokenPipeError):  # the client has read enough, or has timed out
            self.wfile.write(b"x" * 5000 if self.path == "/long" else b"a page")

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    HANG.clear()
    yield f"127.0.0.1:{server.server_port}"
    HANG.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_pages_over_http(host: str) -> None:
    get = HttpGet([host], max_bytes=100, time_limit_s=30)

    def read(url: str) -> str:
        text = asyncio.run(get.call({"url": url}, TASK))
        assert isinstance(text, str)
        return text

    assert read(f"http://{host}/page") == "a page"
    assert read(f"http://{host}/long") == "x" * 100
    assert read(f"http://{host}/none") == "status 404\na page"
    assert read(f"http://{host}/away") == "status 302, to http://elsewhere.test/"

    for url in (
        f"http://user@{host}/",
        f"ftp://{host}/",
        "http://elsewhere.test/",
        f"http://elsewhere.test/?{host}",
        "page",
    ):
        with pytest.raises(ValueError, match=f"not allowed; allowed hosts: {host}"):
            read(url)

    slow, elsewhere = (
        ToolCall("http_get", {"url": url}) for url in (f"http://{host}/slow", "http://elsewhere.test/")
    )
    (reply,) = run_turns([HttpGet([host], time_limit_s=0.5)], [slow, elsewhere])
    assert texts_of(reply) == [
        f"tool error (timed out): http_get: {host} did not answer within 0.5 s",
        f"tool error (raised): http_get raised ValueError: 'elsewhere.test' is not allowed; allowed "
        f"hosts: {host}",
    ]


# ---- user tools

TOOLS = """
def price(item: str) -> str:
    return "42"
class Shop:
    schema = {"type": "function", "function": {"name": "shop", "parameters": {"type": "object"}}}
    async def call(self, arguments, task):
        return "open"
shop, number = Shop(), 3
class Game:
    async def start(self, task): ...
    async def respond(self, turn): ...
    async def close(self): ...
class Half:
    async def start(self, task): ...
    async def close(self): ...
class Needy(Game):
    def __init__(self, level): ...
"""


def test_what_a_user_names_is_loaded_or_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)

    def tools(*named: tuple[Path | None, str]) -> AgentConfig:
        return AgentConfig(tools=[name if path is None else f"{path}:{name}" for path, name in named])

    _, schemas = load_agent(tools((file, "price"), (file, "shop"), (None, "calculator")))
    assert schemas is not None
    assert [schema["function"]["name"] for schema in schemas] == ["price", "shop", "calculator"]

    for path, name, said in (
        (
            file,
            "cost",
            r"tool 'cost' is not in .*, which defines .*; set agent\.tools to FILE\.py:NAME, such as .*\.py:\w+$",
        ),
        (file, "number", "is a int, expected a function, or an object with a schema"),
        (file, "Shop", "is a class, expected"),
        (tmp_path / "none.py", "price", "there is no such file"),
        (
            None,
            "abacus",
            "there is no built-in tool 'abacus', only calculator, python, python_session; write FILE.py:NAME "
            "for a tool of your own",
        ),
    ):
        with pytest.raises(ValueError, match=said) as found:
            load_agent(tools((path, name)))
        assert "\n" not in str(found.value)

    def environment(name: str) -> AgentConfig:
        return AgentConfig(environment=EnvironmentConfig(path=f"{file}:{name}"))

    make, _ = load_agent(environment("Game"))
    assert type(make()).__name__ == "Game"

    for name, said in (
        ("Half", "not a class with `async def respond`"),
        ("price", "not a class with"),
        ("Needy", "instantiated without arguments"),
    ):
        with pytest.raises(ValueError, match=said):
            load_agent(environment(name))


def test_a_tool_whose_schema_is_none_is_refused() -> None:
    class Odd:
        schema: Mapping[str, Any] = {"function": {"name": "odd", "parameters": {"type": "thing"}}}

        async def call(self, arguments: Mapping[str, Any], task: Task) -> str:
            return ""

    odd: Tool = Odd()
    with pytest.raises(ValueError, match="parameters of the tool odd are not a JSON schema"):
        Toolbox([odd])


def test_a_task_knows_its_ground_truth() -> None:
    assert Task(reward_model={"style": "rule", "ground_truth": "5"}).ground_truth == "5"
    assert Task().ground_truth is None


def test_a_task_says_what_it_has_and_is_sent_between_processes() -> None:
    task = Task(messages=[{"role": "user", "content": "a"}], seed=3)
    assert pickle.loads(pickle.dumps(task)) == copy.deepcopy(task) == task

    with pytest.raises(
        AttributeError,
        match="no attribute 'answer', only messages, reward_model, extra_info, seed, memory, ground_truth, sandbox_image;",
    ):
        task.answer  # type: ignore[attr-defined]  # noqa: B018

    assert not hasattr(task, "prompt")
