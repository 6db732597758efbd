"""The inputs of a reward model.

They are a prompt's chat and the answer to it, as token ids of the reward model's own tokenizer and chat
template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import OverlongConversation
from megarl.data.tokenizer import render_chat, spelled
from megarl.machine.errors import counted

if TYPE_CHECKING:  # workers read no tables
    from megarl.data.prompts import Prompt


class ConversationError(ValueError):
    """A conversation cannot be given to the reward model.

    The message says which one, why, and how to fix it.
    """


class Conversation(NamedTuple):
    """A conversation as token ids.

    Attributes:
        is_truncated: Whether its oldest tokens were removed.
        spells_special: Whether the text of the answer contains a special token of the reward model, which the
            tokenizer encodes as such. A policy may exploit this to end its answer or to forge another turn.
    """

    token_ids: list[int]
    is_truncated: bool
    spells_special: bool


class ConversationEncoder:
    """Renders a chat with the answer as its last message.

    The tokens include the end that the template gives the answer, and nothing after it.

    Trailing `pad_token_id` tokens are removed, because Hugging Face's classes score the last token that is
    not padding, by its id.

    Args:
        pad_token_id: From the model's config.json.
        max_length: The maximum number of tokens that the model reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        pad_token_id: int | None,
        max_length: int,
        overlong: OverlongConversation,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pad_token_id = pad_token_id
        self._max_length = max_length
        self._overlong = overlong

    def encode(self, uid: str, messages: Sequence[Mapping[str, Any]], answer: str) -> Conversation:
        """Encode a conversation.

        Raises:
            ConversationError: The template refuses the chat, the conversation is too long, or the model does
                not have one of its tokens.
        """
        chat = [*map(dict, messages), {"role": "assistant", "content": answer}]
        try:
            token_ids = render_chat(self._tokenizer, chat, for_generation=False)
        except ValueError as error:
            raise ConversationError(f"sample {uid}, by the reward model's tokenizer: {error}") from error

        token_ids = without_padding(token_ids, self._pad_token_id)
        if not token_ids:
            raise ConversationError(
                f"sample {uid}: the reward model's chat template renders the conversation to padding only"
            )

        if max(token_ids) >= self._vocab_size:
            raise ConversationError(
                f"sample {uid}: the reward model's tokenizer uses the token {max(token_ids)}, but the model "
                f"has only {self._vocab_size}; put the tokenizer that it was trained with into the folder of "
                "reward.model.path"
            )

        length = len(token_ids)
        if length > self._max_length and self._overlong is OverlongConversation.refuse:
            raise ConversationError(
                f"sample {uid}: the conversation has {counted(length, 'token')} of the reward model, which "
                f"reads at most {self._max_length}; raise reward.model.max_length and micro_batch up to its "
                "number of positions, use shorter prompts or responses, or set "
                "reward.model.overlong=truncate to remove the oldest tokens"
            )

        # Truncation keeps the newest tokens, because the answer is at the end.
        return Conversation(
            token_ids[-self._max_length :],
            length > self._max_length,
            spelled(self._tokenizer, [answer]) is not None,
        )


def without_padding(token_ids: list[int], pad_token_id: int | None) -> list[int]:
    """Return the tokens of a conversation without trailing padding, which would shift the scored position."""
    end = len(token_ids)
    while end and token_ids[end - 1] == pad_token_id:
        end -= 1
    return token_ids[:end]


def check_chats(encoder: ConversationEncoder, prompts: Iterable[Prompt]) -> None:
    """Encode some chats with an empty answer, so that unreadable chats are found before a run starts.

    They are one chat of each sequence of roles, and the longest chat of all in the policy's tokens.

    Raises:
        ConversationError: The reward model could not read a chat.
    """
    chosen: dict[tuple[str, ...], Prompt] = {}
    longest = None

    # Templates restrict the order of roles, so one chat of each order is enough.
    for prompt in prompts:
        chosen.setdefault(tuple(message["role"] for message in prompt.messages), prompt)
        if longest is None or len(prompt.token_ids) > len(longest.token_ids):
            longest = prompt

    for prompt in [*chosen.values(), *([longest] if longest else [])]:
        encoder.encode(f"of {prompt.data_source!r}", prompt.messages, "")


def conversation_batch(conversations: Sequence[Conversation], rows: Sequence[int]) -> dict[str, RaggedTensor]:
    """Return `prompts`, `responses` and `response_mask` of the conversations `rows` as rows of tokens.

    Each conversation is a prompt with a response of one token, and the value predicted before that token is
    the score of the conversation. The token itself (0) is never used, because attention is causal.
    """
    one_each = torch.ones(len(rows), dtype=torch.int64)
    return {
        "prompts": RaggedTensor.of_rows(
            [conversations[row].token_ids for row in rows], torch.int32, on_left=True
        ),
        "responses": RaggedTensor.constant(0, one_each, torch.int32),
        "response_mask": RaggedTensor.constant(True, one_each, torch.bool),
    }
