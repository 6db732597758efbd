"""Test that no parser cuts the value of an argument silently: a call is read with the whole value, or reported.

In formats with unescaped values, a value may contain the tags of the format itself."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable

import pytest

from megarl.rollout.sglang.function_calls import FORMATS, TagFormat, TaggedCalls, lost_value
from tests import fork_server
from tests.fork_server.client import SGLANG

SCHEMA = {
    "type": "function",
    "function": {
        "name": "price",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}, "n": {"type": "string"}}},
    },
}
# The program prints the results of each text: [name, arguments] or "unreadable".
PROGRAM = """
import json, sys
from megarl.agents.protocol import CallError
from megarl.config.schema import AgentConfig
from megarl.rollout.tool_calls import call_parser
schema, texts = json.load(sys.stdin)
parsers = {name: call_parser(AgentConfig(parser=name), [schema], opens_thinking=False) for name in {n for n, _ in texts}}
for name, text in texts:
    print(json.dumps([each.kind.value if isinstance(each, CallError) else each for each in parsers[name](text)]))
"""


def parse(texts: list[tuple[str, str]]) -> list[list[object]]:
    program = [*fork_server.PYTHON, f"--{SGLANG}", "-c", PROGRAM]
    given = json.dumps([SCHEMA, texts])
    ended = subprocess.run(program, input=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def functions(value: str) -> str:
    return (
        f"<tool_call>\n<function=price>\n<parameter=item>\n{value}\n</parameter>\n<parameter=n>\n1\n</parameter>\n"
        "</function>\n</tool_call>"
    )


def pairs(value: str) -> str:
    return (
        f"<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>{value}</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>"
    )


def reshaped(write: Callable[[str], str], reshape: Callable[[str], str]) -> Callable[[str], str]:
    """Return the writer of a variant of a format, which leaves values as they are."""
    return lambda value: reshape(write("@value@")).replace("@value@", value)


def invokes(begin: str, end: str, namespace: str = "", more: str = "") -> Callable[[str], str]:
    def write(value: str) -> str:
        def parameter(name: str, text: str) -> str:
            return f'<{namespace}parameter name="{name}"{more}>{text}</{namespace}parameter>\n'

        inside = parameter("item", value) + parameter("n", "1")
        return f'{begin}<{namespace}invoke name="price">\n{inside}</{namespace}invoke>\n{end}'

    return write


def dsml(block: str, blank: str = "") -> Callable[[str], str]:
    name = f"｜DSML｜{blank}"
    return invokes(f"<{name}{block}>\n", f"</{name}{block}>", name, ' string="true"')


def as_json(begin: str, end: str) -> Callable[[str], str]:
    return lambda value: begin + json.dumps({"item": value, "n": "1"}) + end


WRITE: dict[str, Callable[[str], str]] = {
    **dict.fromkeys(("qwen3_coder", "step3p5", "nanbeige"), functions),
    "mimo": reshaped(
        functions,
        lambda text: text.replace("=item>\n", "=item>").replace("=n>\n", "=n>").replace("\n</p", "</p"),
    ),
    **dict.fromkeys(("glm", "glm45", "ling3", "poolside_v1"), pairs),
    **dict.fromkeys(("glm47", "spark25"), reshaped(pairs, lambda text: text.replace("\n<", "<"))),
    "iquest_q1": reshaped(pairs, lambda text: text.replace("tool_call>", "iquest_tool_call>")),
    "hunyuan": reshaped(
        pairs, lambda text: f"<tool_calls>\n{text.replace('price', 'price<tool_sep>')}\n</tool_calls>"
    ),
    "minimax-m2": invokes("<minimax:tool_call>\n", "</minimax:tool_call>"),
    "dots": invokes("<dots_function_call>\n", "</dots_function_call>"),
    "step3": invokes(
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>",
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
        "steptml:",
    ),
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "deepseekv41": dsml("tool_calls", " "),
    "gigachat35": invokes("<｜GCML｜tool_calls>\n", "</｜GCML｜tool_calls>", "｜GCML｜", ' string="true"'),
    "minicpm5": lambda value: (
        f'<function name="price"><param name="item">{value}</param><param name="n">1</param></function>'
    ),
    "hermes": as_json('<tool_call>{"name": "price", "arguments": ', "}</tool_call>"),
    "qwen25": as_json('<tool_call>\n{"name": "price", "arguments": ', "}\n</tool_call>"),
    "mistral": as_json('[TOOL_CALLS] [{"name": "price", "arguments": ', "}]"),
    "llama3": as_json('<|python_tag|>{"name": "price", "parameters": ', "}"),
    "cohere_command4": as_json(
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "price", "parameters": ', "}]<|END_ACTION|>"
    ),
    "deepseekv31": as_json(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>price<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": as_json(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.price:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
}
PLAIN = ("ab", "a\nb", 'x = "y" \\n', "[1] {2}", "<tag>")


def values_of(name: str) -> list[str]:
    """Return values with each tag of a format, and with a whole call."""
    tags = sorted(set(re.findall(r"<[^<>\s][^<>]*>", WRITE[name]("@"))))
    hostile = [form.format(tag) for tag in tags for form in ("p {} q", "{}", "p {}", '"{}"')]
    return [*PLAIN, *hostile, WRITE[name]("in"), f"p {WRITE[name]('in')} q", "<tool_call>now</tool_call>"]


def test_a_value_is_read_as_a_whole_or_the_call_is_reported(forked_processes: None) -> None:
    asked = [(name, value) for name in WRITE for value in values_of(name)]
    found = parse([(name, WRITE[name](value)) for name, value in asked])
    kept = dict.fromkeys(WRITE, 0)
    for (name, value), read in zip(asked, found, strict=True):
        is_whole = read == [["price", {"item": value, "n": "1"}]]
        kept[name] += is_whole
        assert is_whole or "unreadable" in read, (name, value, read)
        # A call that runs has the arguments that the model wrote.
        assert all(each in ("unreadable", ["price", {"item": value, "n": "1"}]) for each in read), (
            name,
            value,
            read,
        )
        # Only these two read values as XML, in which a tag is no text.
        if value in PLAIN and not (value == "<tag>" and name in ("step3", "minicpm5")):
            assert is_whole, (name, value, read)
    assert all(count >= 4 for count in kept.values()), kept


def test_calls_before_an_unreadable_one_are_kept(forked_processes: None) -> None:
    texts = [
        ("qwen3_coder", f"so\n{functions('ab')}\n{functions('a</parameter>b')}\n{functions('cd')}"),
        ("glm45", pairs("ab") + pairs("a</arg_value>b")),
        ("qwen3_coder", functions("ab") + "\n<tool_call>\n<function=price\n</tool_call>"),
        ("minimax-m2", WRITE["minimax-m2"]("ab") + WRITE["minimax-m2"]("</invoke>")),
    ]
    expected = [["price", {"item": "ab", "n": "1"}], "unreadable"]
    assert parse(texts) == [expected] * len(texts)


FUNCTION = FORMATS["qwen3_coder"]


@pytest.mark.parametrize(
    ("text", "values", "bad_tag"),
    [
        (functions("ab"), [[("item", "\nab\n"), ("n", "\n1\n")]], None),
        # Prose is not a call, and tags of other formats are text.
        ("</parameter> and <parameter=x> in prose", [], None),
        (
            "<tool_call><function=f><parameter=a><arg_value>1</parameter></function></tool_call>",
            [[("a", "<arg_value>1")]],
            None,
        ),
        # A call may leave out closing tags at its end.
        ("<tool_call><function=f><parameter=a>1</function></tool_call>", [[("a", "1")]], None),
        ("<function=f>\n</function>", [[]], None),
        ("<tool_call><function=f><parameter=a>1</parameter>2</function>", [[("a", "1")]], "</function>"),
        ("<tool_call><function=f><parameter=a></tool_call></parameter>", [[("a", "")]], "</parameter>"),
        ("<function=f><parameter=a>1</parameter></parameter></function>", [[("a", "1")]], "</parameter>"),
    ],
)
def test_tags_are_read(text: str, values: list[list[tuple[str, str]]], bad_tag: str | None) -> None:
    read = TaggedCalls(text, FUNCTION)
    assert (read.values, read.bad_tag) == (values, bad_tag)


def test_values_that_a_parser_lost() -> None:
    raw = [("a", " x\n"), ("b", "2")]
    assert lost_value(raw, {"a": "x", "b": 2}, FUNCTION) is None
    assert lost_value([], {"a": "from JSON"}, FUNCTION) is None
    assert "'a'" in (lost_value(raw, {"a": "", "b": 2}, FUNCTION) or "")
    assert "2 values" in (lost_value(raw, {"a": "x"}, FUNCTION) or "")
    assert "2 values" in (lost_value(raw, None, FUNCTION) or "")
    escaped = TagFormat(("function",), "param", has_entities=True)
    assert lost_value([("a", "1 &lt; 2")], {"a": "1 < 2"}, escaped) is None
    assert lost_value([("a", "<![CDATA[<b>]]>")], {"a": "<b>"}, escaped) is None
    assert lost_value([("a", "1 &lt; 2")], {"a": "1 < 2"}, FUNCTION) is not None
