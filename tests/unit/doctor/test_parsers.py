"""Test that a parser of tool calls is compared with what the model's chat template writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.protocol import ToolCall
from megarl.config.finding import Status
from megarl.config.schema import AgentConfig, HarnessConfig, PPOConfig
from megarl.doctor import agents_and_judges
from megarl.rollout.tool_calls import example_call
from tests import fork_server
from tests.unit.data.chats import character_tokenizer

CODER = (
    "<tool_call>\n<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
AS_JSON = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
HERMES = f"<tool_call>\n{AS_JSON}\n</tool_call>"
# This is Mistral-Nemo's form, which needs ids of nine characters.
NEMO = (
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    f"[TOOL_CALLS][{AS_JSON}]"
)
TOOLS = """
def price(item: str, count: int, of: list[str], exact: bool = True):
    \"\"\"Return the price of an item.

    Args:
        item: The item.
        count: How many.
        of: The shops.
        exact: Whether to round.
    \"\"\"
    return "42"
"""
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ<>/_{}[]\"':,()|;"


@pytest.fixture(autouse=True)
def forked_parsers(forked_processes: None) -> Iterator[None]:
    """Fork the processes of the doctor from one that has imported SGLang."""
    with fork_server.spawned():
        yield


def template(call: str, thinking: str = "") -> str:
    return (
        "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool.function.name }}.{% endfor %}<|end|>\n{% endif %}"
        "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
        f"{{% for call in message.tool_calls or [] %}}{call}{{% endfor %}}<|end|>\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|start|>assistant\n{thinking}{{% endif %}}"
    )


def judged(folder: Path, chat_template: str, parser: str | None) -> Any:
    (folder / "tools.py").write_text(TOOLS)
    agent = AgentConfig(tools=[f"{folder / 'tools.py'}:price"], parser=parser)
    tokenizer = character_tokenizer(chat_template, vocabulary_extra=CHARACTERS)
    return agents_and_judges.judge_agent(PPOConfig(agent=agent), tokenizer, limit_s=300.0)


@pytest.mark.parametrize(
    ("call", "parser"), [(HERMES, None), (HERMES, "qwen25"), (CODER, "qwen3_coder"), (NEMO, "mistral")]
)
def test_a_parser_that_reads_the_template_is_good(tmp_path: Path, call: str, parser: str | None) -> None:
    found, tools = judged(tmp_path, template(call), parser)
    assert found.status is Status.ok, found.message
    assert tools[0]["function"]["name"] == "price"


def test_a_parser_of_another_form_is_refused_with_those_that_read_it(tmp_path: Path) -> None:
    # The template opens thinking for the model only.
    found, tools = judged(tmp_path, template(CODER, thinking="<think>\n"), None)
    assert (found.check, found.status, tools) == (agents_and_judges.AGENT, Status.error, None)
    assert (
        "agent.parser: null does not read calls as the chat template of the model writes them"
        in found.message
    )
    assert "<parameter=item>" in found.message
    assert "tool error (unreadable)" in found.message
    readers = found.message.split("set agent.parser to ")[1].split(" or ")
    assert {"qwen3_coder", "nanbeige", "step3p5"} <= set(readers)
    assert not {"null", "hermes", "mistral", "glm45"} & set(readers)


def test_a_template_that_no_parser_reads(tmp_path: Path) -> None:
    found, _ = judged(tmp_path, template("call {{ call.function.name }} now"), "hermes")
    assert found.status is Status.error
    assert "hermes does not read calls" in found.message
    assert "and was read as no call; no parser reads it, so use another chat template" in found.message


def test_a_template_that_writes_no_calls_is_not_compared(tmp_path: Path) -> None:
    found, _ = judged(tmp_path, template(""), None)
    assert found.status is Status.ok, found.message


@pytest.mark.parametrize(
    ("parser", "status"), [(None, Status.warning), ("hermes", Status.error), ("qwen3_coder", Status.ok)]
)
def test_programs_are_told_too(tmp_path: Path, parser: str | None, status: Status) -> None:
    (tmp_path / "program.py").write_text("def run(task, endpoint): ...\n")
    harness = HarnessConfig(function=f"{tmp_path / 'program.py'}:run")
    tokenizer = character_tokenizer(template(CODER), vocabulary_extra=CHARACTERS)
    config = PPOConfig(agent=AgentConfig(harness=harness, parser=parser))
    found, _ = agents_and_judges.judge_agent(config, tokenizer, limit_s=300.0)
    assert found.status is status, found.message


def test_example_calls() -> None:
    parameters = {
        "properties": {
            "kind": {"enum": ["x", "y"]},
            "count": {"type": ["null", "integer"]},
            "size": {"anyOf": [{"type": "null"}, {"type": "number"}]},
            "of": {"type": "array", "items": {"type": "boolean"}},
            "where": {"type": "object", "properties": {"shop": {"type": "string"}}},
            "tree": {"$ref": "#/$defs/tree"},
            "any": {},
        }
    }
    expected = {"kind": "x", "count": 3, "size": 2.5, "of": [True], "where": {"shop": "ab"}, "any": "ab"}
    assert example_call({"function": {"name": "f", "parameters": parameters}}) == ToolCall("f", expected)
    assert example_call({"function": {"name": "now"}}) == ToolCall("now", {})
