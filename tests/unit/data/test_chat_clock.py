"""A chat template that reads the clock gets one time per run, and data are identified by their rows."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config.schema import DataConfig, SFTDataConfig
from megarl.data.chat_clock import reads_clock, saved_chat_time, set_chat_time
from megarl.data.loader import BatchLoader
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.tables import Fingerprint
from megarl.data.tokenizer import load_tokenizer
from tests.unit.data.chats import TEMPLATE, assistant, character_tokenizer, prompt_row, user, write

MONDAY = datetime(2026, 3, 2, 23, 59, 59)
TUESDAY = datetime(2026, 3, 3, 0, 0, 1)
DATED = "<|start|>system\n{{ strftime_now('%Y %m %d') }}<|end|>\n" + TEMPLATE
ROWS = [prompt_row("a"), prompt_row("b", extra_info={"index": 1})]
CHATS = [{"messages": user("a") + assistant("b")}, {"messages": user("c") + assistant("d")}]


def tokenizer_on(day: datetime, template: str = DATED) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a process that is started at that time."""
    tokenizer = character_tokenizer(template)
    set_chat_time(tokenizer, day)
    return tokenizer


def data_set(
    folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]] | None = None
) -> Any:
    if kind == "prompts":
        return PromptDataset(
            [write(folder / "rows.parquet", rows or ROWS)], tokenizer, DataConfig(max_prompt_length=100)
        )
    return SFTDataset(
        [write(folder / "rows.parquet", rows or CHATS)], tokenizer, SFTDataConfig(max_length=100)
    )


def loader(rows: Any) -> BatchLoader:
    return BatchLoader(rows, 1, shuffle=True, seed=0)


def shown(tokenizer: PreTrainedTokenizerBase, rows: Any) -> list[str]:
    name = "token_ids" if isinstance(rows, PromptDataset) else "prompt_ids"
    return [tokenizer.decode(getattr(rows[index], name)) for index in range(len(rows))]


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_a_run_is_resumed_on_another_day_with_the_prompts_that_it_had(tmp_path: Path, kind: str) -> None:
    monday = tokenizer_on(MONDAY)
    first = data_set(tmp_path, kind, monday)
    assert "2026 03 02" in shown(monday, first)[0]
    begun = loader(first)
    next(begun)
    state = json.loads(json.dumps(begun.state_dict()))

    # restored like in `megarl train`, before the data is read
    tuesday = tokenizer_on(TUESDAY)
    set_chat_time(tuesday, saved_chat_time(state))
    second = data_set(tmp_path, kind, tuesday)
    resumed = loader(second)
    resumed.load_state_dict(state)
    assert shown(tuesday, second) == shown(monday, first)
    assert resumed.state_dict() == state
    assert next(resumed).non_tensor_batch["uid"].tolist() == next(begun).non_tensor_batch["uid"].tolist()


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_rows_are_known_by_what_they_say_and_not_by_how_they_are_rendered(tmp_path: Path, kind: str) -> None:
    state = loader(data_set(tmp_path, kind, tokenizer_on(MONDAY))).state_dict()
    loader(data_set(tmp_path, kind, tokenizer_on(TUESDAY))).load_state_dict(state)
    loader(
        data_set(tmp_path, kind, tokenizer_on(MONDAY, DATED.replace("system\n", "system\n\n")))
    ).load_state_dict(state)
    others = {
        "prompts": [
            [prompt_row("a"), prompt_row("c", extra_info={"index": 1})],
            [ROWS[0], prompt_row("b")],
            ROWS[::-1],
        ],
        "chats": [[CHATS[0], {"messages": user("c") + assistant("e")}], CHATS[::-1]],
    }

    for rows in others[kind]:
        with pytest.raises(ValueError, match="cannot resume the data: .* with rows="):
            loader(data_set(tmp_path, kind, tokenizer_on(MONDAY), rows)).load_state_dict(state)


def test_a_time_is_the_same_in_all_of_a_process_and_begins_with_its_first_use(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("{{ strftime_now('%S%f') }}" + TEMPLATE)
    first, second = (data_set(tmp_path, "prompts", tokenizer) for _ in range(2))
    assert shown(tokenizer, first) == shown(tokenizer, second)
    assert datetime.fromisoformat(first.identity.chat_time) <= datetime.now()


def test_which_templates_read_the_clock(tmp_path: Path) -> None:
    assert reads_clock(character_tokenizer(DATED))
    assert not reads_clock(character_tokenizer(TEMPLATE))
    several = character_tokenizer({"default": TEMPLATE, "tool_use": DATED})
    assert reads_clock(several)
    guarded = (
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}26 Jul 2024{% endif %}" + TEMPLATE
    )
    character_tokenizer(guarded).save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    set_chat_time(loaded, datetime(2031, 1, 1))
    assert shown(loaded, data_set(tmp_path, "prompts", loaded))[0].startswith("2031")


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_checkpoints_that_know_rows_by_their_tokens_are_resumed(tmp_path: Path, kind: str) -> None:
    rows = data_set(tmp_path, kind, character_tokenizer())
    old = Fingerprint()

    for row in (rows[index] for index in range(2)):
        if kind == "prompts":
            old.add(row.token_ids, values=[row.data_source, row.reward_model, row.extra_info])
        else:
            old.add(row.prompt_ids, row.response_ids, values=None)

    state = {
        name: value
        for name, value in loader(rows).state_dict().items()
        if name not in ("tokens", "chat_time")
    }
    loader(rows).load_state_dict(state | {"rows": old.hex()})
    with pytest.raises(ValueError, match="cannot resume the data"):
        loader(rows).load_state_dict(state | {"rows": "of other rows"})


def test_a_saved_time_that_is_none() -> None:
    assert saved_chat_time({}) is None
    with pytest.raises(ValueError, match="chat_time is 'today', but must be a time such as"):
        saved_chat_time({"chat_time": "today"})
