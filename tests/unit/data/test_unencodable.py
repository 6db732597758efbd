"""Lone surrogates are refused anywhere in the data, with file, row and field, before anything reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import ChatColumnsConfig, DataConfig, PromptColumnsConfig, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tokenizer import render_chat
from tests.unit.data.chats import TOOLS_TEMPLATE, assistant, character_tokenizer, prompt_row, user

HALF = "a\ud800b"


def json_lines(path: Path, *rows: dict[str, Any]) -> str:
    # JSON escapes them.
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (prompt_row(HALF), r"column 'prompt': \[0\]\.content has half"),
        (prompt_row() | {"prompt": HALF}, "column 'prompt': its text has half"),
        (prompt_row(data_source=HALF), "column 'data_source': its text has half"),
        (prompt_row(reward_model={"ground_truth": HALF}), "column 'reward_model': ground_truth has half"),
        (
            prompt_row(reward_model={"ground_truth": ["5", {"a": [HALF]}]}),
            r"column 'reward_model': ground_truth\[1\]\.a\[0\] has half",
        ),
        (
            prompt_row(extra_info={"tests": [{HALF: 1}]}),
            r"column 'extra_info': the key 'a\\ud800b' of tests\[0\] has half",
        ),
    ],
)
def test_in_prompts(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], where: str
) -> None:
    file = json_lines(tmp_path / "rows.jsonl", prompt_row(), row)
    with pytest.raises(
        DataError, match=f"rows.jsonl, row 1, {where} of a character .a lone surrogate.*remove it"
    ):
        PromptDataset([file], tokenizer, DataConfig(max_prompt_length=60))


def test_in_columns_of_other_names_and_not_in_those_that_nobody_reads(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    columns = PromptColumnsConfig(
        prompt="question", ground_truth="answer", data_source=None, extra_info="more"
    )
    data = DataConfig(max_prompt_length=60, columns=columns)
    row = {"question": "a", "answer": "5", "more": {"index": 1}, "notes": HALF}
    assert len(PromptDataset([json_lines(tmp_path / "good.jsonl", row)], tokenizer, data)) == 1

    for name, value in (("question", HALF), ("answer", HALF), ("more", {"of": {"of": HALF}})):
        file = json_lines(tmp_path / "bad.jsonl", row, row | {name: value})
        with pytest.raises(DataError, match=f"row 1, column '{name}': .* has half of a character"):
            PromptDataset([file], tokenizer, data)


def tool_chat(arguments: Any) -> list[dict[str, Any]]:
    return user("a") + assistant(
        "", tool_calls=[{"type": "function", "function": {"name": "price", "arguments": arguments}}]
    )


PRICE = {
    "type": "function",
    "function": {"name": "price", "description": "", "parameters": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (
            {"messages": tool_chat({"item": {"of": [HALF]}})},
            r"column 'messages': \[1\]\.tool_calls\[0\]\.function\.arguments\.item\.of\[0\]",
        ),
        (
            {"messages": tool_chat(json.dumps({"item": HALF}))},
            "column 'messages': message 1: .*item has half of a character",
        ),
        (
            {"messages": user("a") + assistant("b", reasoning_content=HALF)},
            r"column 'messages': \[1\]\.reasoning_content",
        ),
        (
            {
                "messages": tool_chat({"item": "b"}),
                "tools": [{"type": "function", "function": {"name": "price", "description": HALF}}],
            },
            r"column 'tools': \[0\]\.function\.description",
        ),
        (
            {"messages": tool_chat({"item": "b"}), "tools": json.dumps([{**PRICE, "x": HALF}])},
            r"column 'tools': .*\[0\]\.x has half",
        ),
    ],
)
def test_in_chats(tmp_path: Path, row: dict[str, Any], where: str) -> None:
    good = {"messages": tool_chat({"item": "b"}), "tools": [PRICE]}
    with pytest.raises(DataError, match=f"rows.jsonl, row 1, {where}"):
        SFTDataset(
            [json_lines(tmp_path / "rows.jsonl", good, row)],
            character_tokenizer(TOOLS_TEMPLATE),
            SFTDataConfig(max_length=200),
        )


def test_in_answers_with_a_column_of_their_own(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    data = SFTDataConfig(max_length=60, columns=ChatColumnsConfig(prompt="question", answer="answer"))
    file = json_lines(
        tmp_path / "rows.jsonl", {"question": "a", "answer": "b"}, {"question": "a", "answer": HALF}
    )
    with pytest.raises(DataError, match="rows.jsonl, row 1, column 'answer': its text has half"):
        SFTDataset([file], tokenizer, data)


def test_in_what_a_caller_renders(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="the chat has half of a character"):
        render_chat(tokenizer, user(HALF), for_generation=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"item": float("nan")}, "a call of 'price' has the arguments .*with NaN or an infinity"),
        ('{"item": NaN}', "message 1: found the text .*, which is not JSON .NaN is not a JSON number"),
        ({"item": [{"of": float("-inf")}]}, "with NaN or an infinity, which JSON does not have"),
        (
            '{"item": 1, "item": 2}',
            "message 1: found the text .*, which is not JSON .the key 'item' occurs twice",
        ),
    ],
)
def test_arguments_that_are_no_json(tmp_path: Path, arguments: Any, said: str) -> None:
    file = json_lines(tmp_path / "rows.jsonl", {"messages": tool_chat(arguments), "tools": [PRICE]})
    with pytest.raises(DataError, match=f"rows.jsonl, row 0, column 'messages': .*{said}"):
        SFTDataset([file], character_tokenizer(TOOLS_TEMPLATE), SFTDataConfig(max_length=200))


def test_a_key_that_a_row_has_twice(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    file = tmp_path / "rows.jsonl"
    text = json.dumps({"messages": tool_chat({"item": "b"})})
    file.write_text(text + "\n" + text.replace('{"item": "b"}', '{"item": "b", "item": "c"}') + "\n")
    with pytest.raises(DataError, match="rows.jsonl, line 2: is not JSON .the key 'item' occurs twice"):
        SFTDataset([str(file)], character_tokenizer(TOOLS_TEMPLATE), SFTDataConfig(max_length=200))
