"""Test the calls of other families with SGLang's parsers: what counts as a call, and that no attempted call
is ignored."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from megarl.config.schema import AgentConfig
from megarl.rollout.tool_calls import call_parser
from tests import fork_server
from tests.fork_server.client import SGLANG

PRICE = '{"name": "price", "arguments": {"item": "ab"}}'
ITEM = '{"item": "ab"}'
LLAMA = '{"name": "price", "parameters": {"item": "ab"}}'
CODER = "<tool_call>\n<function=price>\n<parameter=item>\nab\n</parameter>\n</function>\n</tool_call>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>price\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CALL = ["price", {"item": "ab"}]
UNREADABLE = "unreadable"
# (parser, text, result: calls in order, and the kinds of errors)
READ: list[tuple[str, str, list[Any]]] = [
    ("qwen25", f"<tool_call>\n{PRICE}\n</tool_call>", [CALL]),
    (
        "qwen25",
        f"so<tool_call>\n{PRICE}\n</tool_call>\n<tool_call>\n{PRICE.replace('ab', 'cd')}\n</tool_call>",
        [CALL, ["price", {"item": "cd"}]],
    ),
    ("qwen25", "<tool_call>\n{price}\n</tool_call>", [UNREADABLE]),
    ("qwen25", "<tool_call>\n[1]\n</tool_call>", [UNREADABLE]),
    ("qwen25", f"<tool_call>\n{PRICE}", [UNREADABLE]),
    (
        "qwen25",
        f"<tool_call>\n{PRICE}\n</tool_call>\n<tool_call>\n{{price}}\n</tool_call>",
        [CALL, UNREADABLE],
    ),
    ("qwen25", '<tool_call>\n{"name": "cost", "arguments": {}}\n</tool_call>', [["cost", {}]]),
    ("qwen25", '<tool_call>\n{"name": "price", "arguments": 3}\n</tool_call>', [["price", 3]]),
    ("qwen25", "42, and no {} at all", []),
    ("hermes", f"<tool_call>{PRICE}</tool_call>", [CALL]),
    ("hermes", "<tool_call>{price}</tool_call>", [UNREADABLE]),
    ("llama3", f"<|python_tag|>{LLAMA}", [CALL]),
    ("llama3", f"{LLAMA}; {LLAMA}", [CALL, CALL]),
    ("llama3", '<|python_tag|>{"name": "price", "par', [UNREADABLE]),
    ("llama3", '{"x": 3}', [UNREADABLE]),
    ("mistral", f"[TOOL_CALLS] [{PRICE}]", [CALL]),
    ("mistral", '[TOOL_CALLS] [{"name": "pri', [UNREADABLE]),
    # Mistral-Nemo's template writes no blank, and newer ones no list.
    ("mistral", f"[TOOL_CALLS][{PRICE}]", [CALL]),
    (
        "mistral",
        f"so[TOOL_CALLS][{PRICE}, {PRICE.replace('ab', '[TOOL_CALLS][')}]",
        [CALL, ["price", {"item": "[TOOL_CALLS]["}]],
    ),
    ("mistral", '[TOOL_CALLS]price[ARGS]{"item": "[TOOL_CALLS][{"}', [["price", {"item": "[TOOL_CALLS][{"}]]),
    ("mistral", '[TOOL_CALLS][{"name": "pri', [UNREADABLE]),
    # GLM-4.5 leaves out the line break, for example before no arguments.
    ("glm45", "<tool_call>cost</tool_call>", [["cost", {}]]),
    ("glm45", "<tool_call>price<arg_key>item</arg_key><arg_value>ab</arg_value></tool_call>", [CALL]),
    ("glm45", "<tool_call>price\n<arg_key>item</arg_key>\n<arg_value>ab</arg_value>\n</tool_call>", [CALL]),
    # The generation prompt of gpt-oss contains the beginning of the first message.
    ("gpt-oss", f"<|channel|>commentary to=functions.price <|constrain|>json<|message|>{ITEM}", [CALL]),
    ("gpt-oss", f" to=functions.price<|channel|>commentary json<|message|>{ITEM}", [CALL]),
    (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.price "
        f"<|constrain|>json<|message|>{ITEM}",
        [CALL],
    ),
    ("gpt-oss", "<|channel|>final<|message|>42", []),
    # Without a line break, the form is Hermes'.
    ("qwen25", f"<tool_call>{PRICE}</tool_call>", [UNREADABLE]),
    ("pythonic", "[price(item='ab'), cost()]", [CALL, ["cost", {}]]),
    ("qwen3_coder", CODER, [CALL]),
    ("qwen3_coder", "<tool_call>\n<function=price\n</tool_call>", [UNREADABLE]),
    ("deepseekv3", DEEPSEEK.format('{"item": "ab"}'), [CALL]),
    ("deepseekv3", DEEPSEEK.format('{"item": '), [UNREADABLE]),
    # Calls inside thinking are drafts, and mentions there are not mistakes.
    (
        "qwen25",
        f"<think>a <tool_call>\n{PRICE}\n</tool_call></think>\n\n<tool_call>\n{PRICE}\n</tool_call>",
        [CALL],
    ),
    ("qwen25", "<think>no need of a <tool_call>\n here</think>The answer is 5.", []),
    ("hermes", f"<think>never closed <tool_call>{PRICE}</tool_call>", []),
    ("llama3", f"<think><|python_tag|>{LLAMA}</think><|python_tag|>{LLAMA}", [CALL]),
    ("mistral", f"<think>[TOOL_CALLS] [{PRICE}]</think>[TOOL_CALLS] [{PRICE}]", [CALL]),
    ("pythonic", "<think>[cost()]</think>[price(item='ab')]", [CALL]),
    ("qwen3_coder", f"<think>{CODER}</think>{CODER}", [CALL]),
    (
        "deepseekv3",
        "<think>" + DEEPSEEK.format("{}") + "</think>" + DEEPSEEK.format('{"item": "ab"}'),
        [CALL],
    ),
    ("qwen3_coder", CODER.replace("ab", "<think>a</think>"), [["price", {"item": "<think>a</think>"}]]),
    (
        "qwen25",
        f"<tool_call>\n{PRICE.replace('ab', '<think>a</think>')}\n</tool_call>",
        [["price", {"item": "<think>a</think>"}]],
    ),
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "price",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    },
}
# In a separate process: SGLang changes what others import.
PROGRAM = """
import json, sys
from megarl.agents.protocol import CallError
from megarl.config.schema import AgentConfig
from megarl.rollout.tool_calls import call_parser
schema, texts = json.load(sys.stdin)
for name, text in texts:
    parse = call_parser(AgentConfig(parser=name), [schema], opens_thinking=False)
    print(json.dumps([each.kind.value if isinstance(each, CallError) else each for each in parse(text)]))
try:
    call_parser(AgentConfig(parser="llama3"), [{"function": {}}], opens_thinking=False)
except ValueError:
    print("refused")
"""


def test_calls_of_other_families(forked_processes: None) -> None:
    given = json.dumps([SCHEMA, [(name, text) for name, text, _ in READ]])
    program = [*fork_server.PYTHON, f"--{SGLANG}", "-c", PROGRAM]
    ended = subprocess.run(program, input=given, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    *lines, refused = ended.stdout.splitlines()
    for (name, text, expected), line in zip(READ, lines, strict=True):
        assert json.loads(line) == expected, (name, text)
    assert refused == "refused"
    assert "Failed to parse" not in ended.stderr  # a model's mistakes are not logged


def test_a_parser_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"agent\.parser is 'gpt', but SGLang has no such parser; there are: .*llama3, .*qwen3_coder",
    ):
        call_parser(AgentConfig(parser="gpt"), [SCHEMA], opens_thinking=False)

    assert "sglang" not in sys.modules
    monkeypatch.setattr("megarl.rollout.sglang.function_calls.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="SGLang is not installed"):
        call_parser(AgentConfig(parser="llama3"), [SCHEMA], opens_thinking=False)
