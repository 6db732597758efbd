"""Data sets of pairs of answers, encoded for a policy or for a reward model.

The forms of rows are those of TRL. With an explicit prompt, the column `prompt` has the chat or one user
message, and the answers are strings or lists with the assistant's message. With an implicit prompt, both
answers are whole chats, which differ in their last message only.

A batch of n pairs has 2 n rows: pair i is in the rows 2 i (the preferred answer) and 2 i + 1. Both rows have
the same prompt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import MARGINS, REFERENCE_LOG_PROBS
from megarl.config.schema import (
    PairColumnsConfig,
    PreferenceConfig,
    PreferenceDataConfig,
    RatedPairColumnsConfig,
    RunKind,
)
from megarl.data.conversations import without_padding
from megarl.data.files import open_file
from megarl.data.sft import encode_answer
from megarl.data.tables import (
    DataRow,
    Fingerprint,
    RowDataset,
    RowIdentity,
    chat_messages,
    read_rows,
    tool_schemas,
    warn_of_escapes,
)
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.whole_chat import render_whole, rendering_identity, spelled_special
from megarl.models.families import read_fields

# A response token after a conversation. The score is predicted before it, and it is never read.
_AFTER = 0


Messages = list[dict[str, Any]]


class Pair(NamedTuple):
    """Two answers to a chat.

    Attributes:
        prompt: The messages before the answers.
        chosen: The message of the preferred answer.
        rejected: The message of the other answer.
        tools: The schemas of the tools that the assistant may call.
        margin: How much better the preferred answer is; 0 if that is unknown.
    """

    prompt: Messages
    chosen: dict[str, Any]
    rejected: dict[str, Any]
    tools: list[dict[str, Any]] | None = None
    margin: float = 0.0


def read_pair_rows(files: Sequence[str], columns: PairColumnsConfig) -> Iterator[DataRow]:
    """Yield rows with the columns of a pair. Raises DataError, see `read_rows`."""
    margin = _margin_column(columns)
    hint = (
        "; data.columns sets which columns are read, such as data.columns.prompt=question "
        "data.columns.chosen=better data.columns.rejected=worse"
    )
    required = [columns.chosen, columns.rejected, *([] if margin is None else [margin])]
    yield from read_rows(files, required, [columns.prompt, columns.tools], hint)


def read_pair(row: DataRow, data: PreferenceDataConfig) -> Pair:
    """Return the pair of a row of `read_pair_rows`. Raises DataError if the row cannot be used."""
    columns = data.columns
    chosen_prompt, chosen = _answer(row, columns.chosen, data)
    rejected_prompt, rejected = _answer(row, columns.rejected, data)

    if (chosen_prompt is None) != (rejected_prompt is None):
        raise row.error(
            columns.rejected,
            f"one of {columns.chosen!r} and {columns.rejected!r} is a whole chat, the other only an answer; "
            "write both in the same form",
        )

    # Whole chats contain their prompt. Pairs whose chats differ earlier are not two answers to one prompt.
    if chosen_prompt is not None:
        if chosen_prompt != rejected_prompt:
            raise row.error(
                columns.rejected,
                f"the chats of {columns.chosen!r} and {columns.rejected!r} differ before their last message; "
                "a pair is two answers to the same prompt",
            )
        prompt = chosen_prompt
    else:
        prompt = _explicit_prompt(row, data)

    if chosen == rejected:
        raise row.error(
            columns.rejected, f"is the same answer as {columns.chosen!r}, so there is no preference"
        )
    return Pair(prompt, chosen, rejected, tool_schemas(row, columns.tools), _margin(row, columns))


def _answer(row: DataRow, column: str, data: PreferenceDataConfig) -> tuple[Messages | None, dict[str, Any]]:
    """Return the prompt of a whole chat, or None, and the assistant's last message."""
    # Plain text is an answer, but `chat_messages` would take it for a user's message.
    value = row.values[column]
    if isinstance(value, str) and not value.lstrip().startswith(("[", "{")):
        return None, {"role": "assistant", "content": value}

    messages = chat_messages(row, column)
    # A text that only looks like JSON is an answer too.
    if isinstance(value, str) and messages == [{"role": "user", "content": value}]:
        return None, {"role": "assistant", "content": value}

    if messages[-1]["role"] != "assistant":
        roles = [message["role"] for message in messages]
        raise row.error(
            column, f"the roles are {roles}; the last message must be the assistant's answer to compare"
        )
    if len(messages) == 1:
        return None, messages[-1]
    if messages[0]["role"] == "assistant":
        raise row.error(
            column,
            "begins with the assistant's message and has more messages; an answer is one message, and "
            "everything before it belongs to the prompt",
        )
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": data.system_prompt}, *messages]

    return messages[:-1], messages[-1]


def _explicit_prompt(row: DataRow, data: PreferenceDataConfig) -> Messages:
    columns = data.columns
    if row.values.get(columns.prompt) is None:
        there = open_file(row.file, ()).columns
        is_absent = columns.prompt not in there
        raise row.error(
            columns.prompt,
            f"is {'missing' if is_absent else 'null in this row'}, although {columns.chosen!r} is an answer "
            "without its prompt; "
            + (f"the file has {list(there)}: " if is_absent else "")
            + "name the column of the prompts, such as data.columns.prompt=question, "
            f"or write whole chats into {columns.chosen!r} and {columns.rejected!r}",
        )
    prompt = chat_messages(row, columns.prompt, data.system_prompt)
    if prompt[-1]["role"] == "assistant":
        raise row.error(columns.prompt, "ends with the assistant's message, so there is nothing to answer")
    return prompt


def _margin_column(columns: PairColumnsConfig) -> str | None:
    return columns.margin if isinstance(columns, RatedPairColumnsConfig) else None


def _margin(row: DataRow, columns: PairColumnsConfig) -> float:
    column = _margin_column(columns)
    if column is None:
        return 0.0
    value = row.values[column]
    # In Python, booleans are integers. NaN is not less than infinity.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise row.error(column, f"found {value!r}, expected a number, such as 1.0")
    return float(value)


class EncodedPair(NamedTuple):
    """A pair as token ids.

    Attributes:
        prompt_ids: The tokens that both rows have in common.
        chosen_ids: The other tokens of the preferred answer's row.
        rejected_ids: The other tokens of the rejected answer's row.
        margin: See Pair.
        fingerprint: Of the messages and tools.
        escaped: A special token in a text that is not the assistant's, see data/tokenizer.py.
    """

    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]
    margin: float
    fingerprint: str
    escaped: str | None

    @property
    def length(self) -> int:
        """The tokens of the longer row."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


class PairEncoder(ABC):
    """Encodes pairs. A subclass determines the tokens of a row, and which of them a loss reads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: PreferenceDataConfig) -> None:
        self.tokenizer = tokenizer
        self.data = data

    def encode(self, row: DataRow) -> EncodedPair:
        """Encode a row of `read_pair_rows`.

        Raises:
            DataError: The row cannot be used.
            TooManyTokensError: A chat is far longer than `data.max_length`, and was not tokenized.
        """
        pair = read_pair(row, self.data)
        try:
            prompt_ids, chosen_ids, rejected_ids = self.token_ids(pair)
        except TooManyTokensError:
            raise
        except ValueError as error:
            raise row.error(self.data.columns.chosen, str(error)) from error

        if chosen_ids == rejected_ids:
            raise row.error(
                self.data.columns.rejected,
                f"has the same tokens as {self.data.columns.chosen!r} once the chat template has rendered "
                "them, so there is no preference",
            )

        fingerprint = Fingerprint()
        fingerprint.add(values=[*pair])
        escaped = spelled_special(self.tokenizer, pair.prompt)
        return EncodedPair(prompt_ids, chosen_ids, rejected_ids, pair.margin, fingerprint.hex(), escaped)

    def render(self, chat: list[dict[str, Any]], pair: Pair) -> list[int]:
        """Return the ids of a chat with an answer, see `render_whole`."""
        return render_whole(
            self.tokenizer,
            chat,
            self.data.lossy,
            for_generation=False,
            tools=pair.tools,
            limit=self.data.max_length,
        )

    @abstractmethod
    def token_ids(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the prompt, and of both answers. Raises ValueError."""

    @abstractmethod
    def is_read(self, num_tokens: int) -> np.ndarray:
        """Return which of the tokens of an answer the loss reads, (num_tokens,) bool."""


class AnswerEncoder(PairEncoder):
    """Encodes pairs for a policy, which trains on all tokens of both answers, up to their end tokens."""

    def token_ids(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        chats = [[*pair.prompt, answer] for answer in (pair.chosen, pair.rejected)]
        for chat in chats:
            self.render(chat, pair)
        (prompt_ids, chosen_ids), (_, rejected_ids) = (
            encode_answer(self.tokenizer, chat, pair.tools) for chat in chats
        )
        return prompt_ids, chosen_ids, rejected_ids

    def is_read(self, num_tokens: int) -> np.ndarray:
        return np.ones(num_tokens, dtype=bool)


class ConversationPairEncoder(PairEncoder):
    """Encodes pairs for a reward model, whose score is read after the last token of a conversation.

    Conversations are rendered as the reward of an RL run renders them (data/conversations.py), including what
    the template writes after the answer. Trailing padding is removed, as there.

    Args:
        pad_token_id: From the model's config.json.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: PreferenceDataConfig, pad_token_id: int | None
    ) -> None:
        super().__init__(tokenizer, data)
        self._pad_token_id = pad_token_id

    def token_ids(self, pair: Pair) -> tuple[list[int], list[int], list[int]]:
        chosen, rejected = (
            without_padding(self.render([*pair.prompt, answer], pair), self._pad_token_id)
            for answer in (pair.chosen, pair.rejected)
        )
        # All tokens before the first difference are common, wherever the template's answer begins.
        common = sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], zip(chosen, rejected, strict=False)))
        if common == 0:
            raise ValueError("the two conversations have no first token in common, so no prompt is shared")
        return chosen[:common], [*chosen[common:], _AFTER], [*rejected[common:], _AFTER]

    def is_read(self, num_tokens: int) -> np.ndarray:
        return np.arange(num_tokens) == num_tokens - 1


def pair_encoder(config: PreferenceConfig, tokenizer: PreTrainedTokenizerBase) -> PairEncoder:
    """Return the encoder of a run's pairs."""
    if config.kind is RunKind.dpo:
        return AnswerEncoder(tokenizer, config.data)
    model = read_fields(config.model.path)
    return ConversationPairEncoder(tokenizer, config.data, model.get("pad_token_id"))


class PairDataset(RowDataset[EncodedPair]):
    """The pairs of `files`.

    Attributes:
        reference: The reference's log-probs of both answers of each pair, float32, by the pair's number.
            Batches of pairs that have them contain them.

    Raises:
        DataError: A row cannot be used.
    """

    def __init__(self, files: Sequence[str], encoder: PairEncoder) -> None:
        data = encoder.data
        super().__init__(
            read_pair_rows(files, data.columns),
            encoder.encode,
            lambda pair: pair.length,
            data.max_length,
            "data.max_length",
            data.overlong,
        )
        warn_of_escapes([pair.escaped for pair in self._items])
        self._encoder = encoder
        self.reference: Mapping[int, tuple[np.ndarray, np.ndarray]] = {}

        rows = Fingerprint()
        for pair in self._items:
            rows.add(values=pair.fingerprint)
        self.identity = RowIdentity(
            rows.hex(), *rendering_identity(encoder.tokenizer, self.token_fingerprint())
        )

    def token_fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the tokens of all pairs."""
        tokens = Fingerprint()
        for pair in self._items:
            tokens.add(pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
        return tokens

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """Return the rows of some pairs, with `prompts`, `responses` and `response_mask` as rows of tokens.

        The mask is True for the tokens that the loss reads. `margins` has the pair's margin, and
        `ref_log_prob` the reference's log-probs if there are any, at every token. There is one array, `uid`.
        """
        pairs = [self._items[index] for index in indices]
        answers = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
        pad_id = self._encoder.tokenizer.pad_token_id
        prompts = RaggedTensor.of_rows(
            [pair.prompt_ids for pair in pairs], torch.int32, padding=pad_id, on_left=True
        )
        tensors = {
            # Both rows of a pair share the values of their prompt.
            "prompts": prompts.select(torch.arange(len(pairs)).repeat_interleave(2)),
            "responses": RaggedTensor.of_rows(answers, torch.int32, padding=pad_id),
            "response_mask": RaggedTensor.of_rows(
                [self._encoder.is_read(len(ids)) for ids in answers], torch.bool
            ),
            MARGINS: RaggedTensor.of_rows(
                [np.full(len(ids), pairs[row // 2].margin) for row, ids in enumerate(answers)], torch.float32
            ),
        }
        if all(index in self.reference for index in indices):
            log_probs = [each for index in indices for each in self.reference[index]]
            tensors[REFERENCE_LOG_PROBS] = RaggedTensor.of_rows(log_probs, torch.float32)

        names = [f"{uid}-{answer}" for uid in uids for answer in ("chosen", "rejected")]
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": names})
