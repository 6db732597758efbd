"""Conversations for a reward model: rendering with its own template and tokenizer, truncation, and refused
conversations."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.schema import OverlongConversation
from megarl.data.conversations import (
    Conversation,
    ConversationEncoder,
    ConversationError,
    check_chats,
    conversation_batch,
)
from megarl.data.prompts import Prompt
from tests.unit.data.chats import character_tokenizer, user

TURNS = [
    {"role": "system", "content": "be brief"},
    *user("1 + 1"),
    {"role": "assistant", "content": "2"},
    *user("and 3?"),
]


def encoder(tokenizer: Any, **changes: Any) -> ConversationEncoder:
    settings = {
        "vocab_size": len(tokenizer),
        "pad_token_id": None,
        "max_length": 100,
        "overlong": OverlongConversation.refuse,
    }
    return ConversationEncoder(tokenizer, **settings | changes)  # type: ignore[arg-type]


def test_all_turns_are_rendered_and_the_answer_is_closed(tokenizer: Any) -> None:
    conversation = encoder(tokenizer).encode("a", TURNS, "5.")
    text = (
        "<|start|>system\nbe brief<|end|>\n<|start|>user\n1 + 1<|end|>\n<|start|>assistant\n2<|end|>\n"
        "<|start|>user\nand 3?<|end|>\n<|start|>assistant\n5.<|end|>\n"
    )
    assert tokenizer.decode(conversation.token_ids) == text
    assert (conversation.is_truncated, conversation.spells_special) == (False, False)


def test_only_padding_at_the_end_is_left_off(tokenizer: Any) -> None:
    """Hugging Face searches for the last token that is not padding, so an end token that is also the pad
    token is not scored."""
    tokenizer = character_tokenizer("{% for message in messages %}{{ message.content }}<|end|>{% endfor %}")
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    kept, left_off = (
        encoder(tokenizer, pad_token_id=pad).encode("a", user("1"), "2").token_ids for pad in (None, end)
    )
    assert tokenizer.decode(kept) == "1<|end|>2<|end|>"
    assert tokenizer.decode(left_off) == "1<|end|>2"


def test_too_long_is_refused_or_loses_its_oldest_tokens(tokenizer: Any) -> None:
    whole = encoder(tokenizer).encode("a", user("1 + 1"), "2").token_ids
    assert encoder(tokenizer, max_length=len(whole)).encode("a", user("1 + 1"), "2") == Conversation(
        whole, False, False
    )
    short = len(whole) - 1

    with pytest.raises(
        ConversationError,
        match=rf"sample a: the conversation has {len(whole)} tokens .* reads at most {short}; raise",
    ):
        encoder(tokenizer, max_length=short).encode("a", user("1 + 1"), "2")

    truncating = encoder(tokenizer, max_length=short, overlong=OverlongConversation.truncate)
    assert truncating.encode("a", user("1 + 1"), "2") == Conversation(whole[1:], True, False)


def test_an_answer_that_spells_a_special_token_is_told(tokenizer: Any) -> None:
    """The pattern matches the tokens' text literally: `<.end.>` is not one."""
    assert encoder(tokenizer).encode("a", user("1"), "2<|end|>").spells_special
    assert not encoder(tokenizer).encode("a", user("<|end|>"), "2<.end.>").spells_special
    assert not encoder(tokenizer).encode("a", user("1"), "").spells_special


def test_what_cannot_be_read_is_refused(tokenizer: Any) -> None:
    with pytest.raises(
        ConversationError,
        match=r"sample a, by the reward model's tokenizer: the chat template refuses .*'tool'",
    ):
        encoder(tokenizer).encode("a", [{"role": "tool", "content": "x"}], "2")

    last = len(tokenizer) - 1
    with pytest.raises(
        ConversationError, match=rf"uses the token \d+, but the model has only {last - 1}; put the tokenizer"
    ):
        encoder(tokenizer, vocab_size=last - 1).encode("a", user("1"), "2")


def test_chats_that_can_never_be_read_are_known_before(tokenizer: Any) -> None:
    """The checked chats are the longest one in the policy's tokens, of any roles, and one of each sequence of
    roles."""

    def prompt(messages: list[dict[str, Any]], length: int) -> Prompt:
        return Prompt(
            token_ids=(1,) * length, messages=messages, data_source="sums", reward_model={}, extra_info={}
        )

    good = [prompt(user("1 + 1"), 5), prompt(TURNS, 30), prompt(user("2"), 3)]
    check_chats(encoder(tokenizer), good)

    with pytest.raises(
        ConversationError, match="sample of 'sums', by the reward model's tokenizer: .*'tool'"
    ):
        check_chats(encoder(tokenizer), [*good, prompt([*user("1"), {"role": "tool", "content": "x"}], 4)])

    with pytest.raises(ConversationError, match="sample of 'sums': the conversation has 1[0-9][0-9] tokens"):
        check_chats(encoder(tokenizer), [*good, prompt(user("1" * 90), 90), prompt(user("2"), 3)])


def test_a_batch_asks_for_the_value_after_the_last_token() -> None:
    """Row 0 has three tokens, row 1 has one; the token after them is never used."""
    conversations = [Conversation([7, 8, 9], False, False), Conversation([5], False, False)]
    batch = conversation_batch(conversations, [1, 0, 1])
    assert [row.tolist() for row in batch["prompts"].each()] == [[5], [7, 8, 9], [5]]
    assert [row.tolist() for row in batch["responses"].each()] == [[0]] * 3
    assert [row.tolist() for row in batch["response_mask"].each()] == [[True]] * 3
