"""Test that results of tools are paired with their calls by id, in chats of every kind of run."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import DataConfig, PreferenceDataConfig, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.pairs import AnswerEncoder, PairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tool_columns import order_results
from tests.unit.data.chats import TOOLS_TEMPLATE, assistant, character_tokenizer, prompt_row, user


def calls(*ids: Any, names: str = "fgh") -> list[dict[str, Any]]:
    made = [
        {"type": "function", "function": {"name": name, "arguments": {"item": name}}}
        | ({} if each is None else {"id": each})
        for name, each in zip(names, ids, strict=False)
    ]
    return assistant("", tool_calls=made)


def result(call_id: Any, content: str, **more: Any) -> dict[str, Any]:
    return {
        "role": "tool",
        "content": content,
        **({} if call_id is None else {"tool_call_id": call_id}),
        **more,
    }


def contents(messages: list[dict[str, Any]]) -> str:
    return " ".join(message["content"] for message in messages if message["role"] == "tool")


@pytest.mark.parametrize("order", permutations("abc"))
def test_any_order_of_results_becomes_that_of_the_calls(order: tuple[str, ...]) -> None:
    run = [result(each, f"of {each}") for each in order]
    # The ids of a later turn may repeat those of an earlier one.
    chat = [*user("?"), *calls("a", "b", "c"), *run, *assistant("so"), *calls("c", "a"), run[0], run[1]]
    if {order[0], order[1]} != {"a", "c"}:
        chat = chat[:6] + assistant("so")
    ordered = order_results(chat)
    assert contents(ordered[:5]) == "of a of b of c"
    assert contents(ordered[5:]) in ("", "of c of a")
    assert sorted(map(json.dumps, ordered)) == sorted(map(json.dumps, chat))


POSITIONS = [
    [*calls(None, None), result(None, "1"), result(None, "2"), *assistant("x")],
    # Parquet and CSV files may have empty texts in the place of absent ids.
    [*calls("", ""), result("", "1"), result(None, "2")],
    [*calls("a", "b"), result(None, "1", name="f"), result(None, "2", name="g")],
    [*assistant("<tool_call>f</tool_call>"), result(None, "1"), result(None, "2"), *assistant("x")],
    # A user may interrupt, and a call may be the answer that is trained.
    [*calls("a"), *user("stop"), *assistant("ok")],
    [*user("?"), *calls("a", "b")],
    [*user("?"), result(None, "1")],
]


@pytest.mark.parametrize("chat", POSITIONS)
def test_results_without_ids_keep_their_places(chat: list[dict[str, Any]]) -> None:
    assert order_results(chat) == chat


def test_calls_in_the_text_of_a_data_set_cannot_be_paired() -> None:
    chat = [*assistant("<tool_call>f</tool_call>"), result("b", "1"), result("a", "2")]
    assert order_results(chat, calls_in_text=True) == chat
    with pytest.raises(ValueError, match="the id 'b', which names no call of message 0"):
        order_results(chat)
    with pytest.raises(ValueError, match="the id 'b', which names no call of message 0"):
        order_results([*user("?"), *chat[1:]], calls_in_text=True)


WRONG = {
    "message 1: the tool result has the id 'x', which names no call of message 0; the ids of its calls: 'a', 'b'": [
        *calls("a", "b"),
        result("x", "1"),
        result("b", "2"),
    ],
    "message 3: the tool result has no id of message 1; the ids of its calls: 'a'": [
        *user("?"),
        *calls("a", None),
        result("a", "1"),
        result(None, "2"),
    ],
    "message 1: the tool result has the id 'x', which names no call of message 0; the ids of its calls: none": [
        *assistant("a call in text"),
        result("x", "1"),
    ],
    "message 0: the tool result has the id 'x'": [result("x", "1")],
    "message 0: two calls have the id 'a'; each needs its own": [*calls("a", "a"), result("a", "1")],
    "message 1: two results have the id 'a'; each needs its own": [
        *calls("a", "b"),
        result("a", "1"),
        result("a", "2"),
    ],
    "message 0: the call 'b' .of 'g'. has no result": [*calls("a", "b"), result("a", "1"), *user("go on")],
    "message 0: the call 'a' .of 'f'. has no result": [*calls("a"), *assistant("42")],
    "message 0: the call of 'f' has no result": [*calls(None), *assistant("42")],
    "message 0 has 2 calls, but 1 results without": [*calls(None, None), result(None, "1"), *assistant("x")],
    "message 0 has 1 calls, but 2 results without": [*calls("a"), result(None, "1"), result(None, "2")],
    "message 1: the tool result has the name 'g', but its place is that of the call of 'f'": [
        *calls(None, None),
        result(None, "2", name="g"),
        result(None, "1", name="f"),
    ],
    "message 1: tool_call_id is .'a'., expected a text": [*calls("a"), result(["a"], "1")],
    "message 0: id is 1.5, expected a text": [*calls(1.5), result("a", "1")],
}


@pytest.mark.parametrize("said", WRONG)
def test_results_that_cannot_be_paired_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        order_results(WRONG[said])


# ---- rows of data sets

SWAPPED = [*user("?"), *calls("a", "b"), result("b", "2"), result("a", "1")]
SORTED = [*user("?"), *calls("a", "b"), result("a", "1"), result("b", "2")]


def rendered(folder: Path, kind: str, chat: list[dict[str, Any]]) -> str:
    """Return what a model reads of a row whose chat ends with the results of tools."""
    tokenizer = character_tokenizer(TOOLS_TEMPLATE)
    rows: dict[str, dict[str, Any]] = {
        "prompts": prompt_row() | {"prompt": chat},
        "chats": {"messages": [*chat, *assistant("x")]},
        "pairs": {"prompt": chat, "chosen": "x", "rejected": "y"},
        # The chats of a pair may have their results in different orders.
        "whole pairs": {"chosen": [*chat, *assistant("x")], "rejected": [*SORTED, *assistant("y")]},
    }
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(rows[kind]) + "\n")
    files = [str(file)]
    if kind == "prompts":
        ids = PromptDataset(files, tokenizer, DataConfig(max_prompt_length=200))[0].token_ids
        return str(tokenizer.decode(list(ids)))
    if kind == "chats":
        example = SFTDataset(files, tokenizer, SFTDataConfig(max_length=200))[0]
        return str(tokenizer.decode(example.prompt_ids + example.response_ids))
    pair = PairDataset(files, AnswerEncoder(tokenizer, PreferenceDataConfig(max_length=200)))[0]
    return str(tokenizer.decode(pair.prompt_ids))


KINDS = ["prompts", "chats", "pairs", "whole pairs"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_reads_results_in_the_order_of_its_calls(tmp_path: Path, kind: str) -> None:
    text = rendered(tmp_path, kind, SWAPPED)
    assert "<|start|>tool\n1<|end|>\n<|start|>tool\n2<|end|>" in text
    assert text == rendered(tmp_path, kind, SORTED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_with_a_missing_result_is_named(tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        DataError,
        match=r"rows.jsonl, row 0, column '(prompt|messages|chosen)': message 1: the call 'a' .* has no",
    ):
        rendered(tmp_path, kind, [*user("?"), *calls("a", "b"), result("b", "2")])
