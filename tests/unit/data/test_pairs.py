"""Test pairs of answers: the forms that are read, their tokens for a policy and for a reward model, and batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megarl.config.schema import (
    Overlong,
    OverlongConversation,
    PairColumnsConfig,
    PreferenceDataConfig,
    RatedPairColumnsConfig,
    RatedPreferenceDataConfig,
)
from megarl.data.conversations import ConversationEncoder
from megarl.data.files import DataError
from megarl.data.pairs import AnswerEncoder, ConversationPairEncoder, PairDataset, read_pair, read_pair_rows
from tests.unit.data.chats import TOOLS_TEMPLATE, assistant, character_tokenizer, user, write

EXPLICIT = {"prompt": "2+3", "chosen": "5", "rejected": "67"}
WITH_MESSAGES = {"prompt": user("2+3"), "chosen": assistant("5"), "rejected": assistant("67")}
IMPLICIT = {
    "chosen": user("2+3") + assistant("5"),
    "rejected": user("2+3") + assistant("67"),
}
# UltraFeedback's binarized form: the prompt is a text, and repeated in both chats.
WITH_BOTH = {"prompt": "2+3", **IMPLICIT}
AS_JSON = {"prompt": json.dumps(user("2+3")), **{key: json.dumps(chat) for key, chat in IMPLICIT.items()}}


def pairs_of(tmp_path, rows, tokenizer, *, suffix="parquet", for_reward=False, **changes):
    file = write(tmp_path / "pairs.parquet", rows)
    if suffix == "jsonl":
        file = str(tmp_path / "pairs.jsonl")
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if for_reward:
        data = RatedPreferenceDataConfig(**{"max_length": 80, **changes})
        return PairDataset([file], ConversationPairEncoder(tokenizer, data, tokenizer.pad_token_id))
    return PairDataset(
        [file], AnswerEncoder(tokenizer, PreferenceDataConfig(**{"max_length": 80, **changes}))
    )


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("row", [EXPLICIT, WITH_MESSAGES, IMPLICIT, WITH_BOTH, AS_JSON])
def test_all_forms_give_the_same_pair(tmp_path, tokenizer, row, suffix):
    (pair,) = pairs_of(tmp_path, [row], tokenizer, suffix=suffix)
    assert tokenizer.decode(pair.prompt_ids) == "<|start|>user\n2+3<|end|>\n<|start|>assistant\n"
    assert tokenizer.decode(pair.chosen_ids) == "5<|end|>"
    assert tokenizer.decode(pair.rejected_ids) == "67<|end|>"


def test_other_columns_a_system_prompt_and_earlier_turns(tmp_path, tokenizer):
    chat = user("a") + assistant("b") + user("c")
    row = {"question": chat, "good": "d", "bad": "e"}
    columns = PairColumnsConfig(prompt="question", chosen="good", rejected="bad")
    (pair,) = pairs_of(tmp_path, [row], tokenizer, columns=columns, system_prompt="s")
    text = tokenizer.decode(pair.prompt_ids)
    assert text.startswith("<|start|>system\ns<|end|>\n<|start|>user\na<|end|>")
    assert text.endswith("c<|end|>\n<|start|>assistant\n")
    whole = {"chosen": chat + assistant("d"), "rejected": chat + assistant("e")}
    (again,) = pairs_of(tmp_path, [whole], tokenizer, system_prompt="s")
    assert again == pair


def test_tools_are_shown(tmp_path):
    tools = character_tokenizer(TOOLS_TEMPLATE)
    schema = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}
    row = EXPLICIT | {"tools": json.dumps([schema])}
    (pair,) = pairs_of(tmp_path, [row], tools)
    assert tools.decode(pair.prompt_ids).startswith("<|start|>system\nprice.<|end|>")


WRONG = [
    (
        {"ask": "2+3", "chosen": "5", "rejected": "6"},
        r"'prompt': is missing, although 'chosen' is an answer without its prompt; the file has "
        r"\['ask', 'chosen', 'rejected'\]: name the column of the prompts, such as data.columns.prompt=question",
    ),
    (
        EXPLICIT | {"prompt": None},
        "'prompt': is null in this row, although 'chosen' is an answer without its prompt",
    ),
    (EXPLICIT | {"rejected": "5"}, "'rejected': is the same answer as 'chosen'"),
    (IMPLICIT | {"rejected": "6"}, "one of 'chosen' and 'rejected' is a whole chat"),
    (
        {"chosen": user("a") + assistant("b"), "rejected": user("c") + assistant("d")},
        "differ before their last message",
    ),
    ({"chosen": user("a"), "rejected": user("a")}, "last message must be the assistant's"),
    (WITH_MESSAGES | {"prompt": user("a") + assistant("b")}, "there is nothing to answer"),
    ({"prompt": "a", "rejected": "b"}, "column 'chosen' is missing.*data.columns.chosen=better"),
    (EXPLICIT | {"chosen": assistant("a") + user("b") + assistant("c")}, "an answer is one message"),
]


@pytest.mark.parametrize(("row", "match"), WRONG, ids=[match for _, match in WRONG])
def test_rows_that_are_no_pairs_are_refused(tmp_path, tokenizer, row, match):
    with pytest.raises(DataError, match=match):
        pairs_of(tmp_path, [row], tokenizer, suffix="jsonl")


def test_long_pairs_are_refused_or_dropped_by_their_longer_answer(tmp_path, tokenizer):
    rows = [EXPLICIT, EXPLICIT | {"rejected": "7" * 30}]
    with pytest.raises(
        DataError, match="1 of 2 rows have more than data.max_length=50 tokens, the longest 5"
    ):
        pairs_of(tmp_path, rows, tokenizer, max_length=50)
    kept = pairs_of(tmp_path, rows, tokenizer, max_length=50, overlong=Overlong.filter)
    assert (len(kept), kept.num_filtered) == (1, 1)


def test_a_batch_has_both_rows_of_each_pair(tmp_path, tokenizer):
    rows = [EXPLICIT, {"prompt": "a", "chosen": "bcd", "rejected": "e"}]
    pairs = pairs_of(tmp_path, rows, tokenizer)
    batch = pairs.batch([1, 0], ["x", "y"])
    assert list(batch.non_tensor_batch["uid"]) == ["x-chosen", "x-rejected", "y-chosen", "y-rejected"]
    answers = [tokenizer.decode(ids) for ids in batch.ragged["responses"].each()]
    assert answers == ["bcd<|end|>", "e<|end|>", "5<|end|>", "67<|end|>"]
    prompts = batch.ragged["prompts"]
    assert prompts.starts.tolist()[0::2] == prompts.starts.tolist()[1::2]  # stored once
    assert all(mask.all() for mask in batch.ragged["response_mask"].each())
    assert "ref_log_prob" not in batch.ragged

    pairs.reference = {
        number: (np.full(2 + 2 * number, -1.0), np.full(3 - number, -2.0)) for number in (0, 1)
    }
    log_probs = pairs.batch([1, 0], ["x", "y"]).ragged["ref_log_prob"]
    assert [row.tolist() for row in log_probs.each()] == [[-1.0] * 4, [-2.0] * 2, [-1.0] * 2, [-2.0] * 3]


def test_a_reward_model_reads_conversations_as_the_reward_of_a_run_does(tmp_path, tokenizer):
    """All common tokens are the shared prompt, and the score is read after the last token."""
    pairs = pairs_of(tmp_path, [EXPLICIT | {"rejected": "57"}], tokenizer, for_reward=True)
    encoder = ConversationEncoder(
        tokenizer,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_length=80,
        overlong=OverlongConversation.refuse,
    )
    batch = pairs.batch([0], ["0"])
    for row, answer in enumerate(("5", "57")):
        prompt, response, mask = (
            list(batch.ragged[key].each())[row].tolist() for key in ("prompts", "responses", "response_mask")
        )
        assert prompt + response[:-1] == encoder.encode("0", user("2+3"), answer).token_ids
        assert mask == [False] * (len(mask) - 1) + [True]
    assert tokenizer.decode(pairs[0].prompt_ids).endswith("assistant\n5")
    assert len(pairs[0].prompt_ids) + len(pairs[0].rejected_ids) == pairs[0].length


def test_margins_come_from_their_column(tmp_path, tokenizer):
    columns = RatedPairColumnsConfig(margin="gap")
    pairs = pairs_of(tmp_path, [EXPLICIT | {"gap": 1.5}], tokenizer, for_reward=True, columns=columns)
    for row in pairs.batch([0], ["0"]).ragged["margins"].each():
        assert torch.equal(row, torch.full_like(row, 1.5))
    plain = pairs_of(tmp_path, [EXPLICIT], tokenizer, for_reward=True)
    assert not plain.batch([0], ["0"]).ragged["margins"].values.any()
    with pytest.raises(DataError, match="'gap': found 'much', expected a number"):
        pairs_of(tmp_path, [EXPLICIT | {"gap": "much"}], tokenizer, for_reward=True, columns=columns)


def test_identities_follow_the_contents(tmp_path, tokenizer):
    first = pairs_of(tmp_path, [EXPLICIT], tokenizer).identity
    assert pairs_of(tmp_path, [EXPLICIT], tokenizer).identity == first
    assert pairs_of(tmp_path, [EXPLICIT | {"chosen": "67", "rejected": "5"}], tokenizer).identity != first


def test_a_pair_of_columns_is_read_row_by_row(tmp_path):
    file = write(tmp_path / "pairs.parquet", [EXPLICIT, EXPLICIT | {"chosen": "8"}])
    data = PreferenceDataConfig()
    pairs = [read_pair(row, data) for row in read_pair_rows([file], data.columns)]
    assert [pair.chosen["content"] for pair in pairs] == ["5", "8"]
    assert [pair.prompt for pair in pairs] == [user("2+3")] * 2
