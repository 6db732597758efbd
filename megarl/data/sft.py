"""Supervised data: chats that end with an assistant's answer.

A chat is split into a prompt and a response, and the assistant's tokens of the response are trained.

The keys are those of RL batches, so an engine sees a single format: the loss applies to `response_mask`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import ChatColumnsConfig, SFTDataConfig
from megarl.data.tables import (
    DataRow,
    Fingerprint,
    RowDataset,
    RowIdentity,
    chat_messages,
    read_rows,
    tool_schemas,
    typed_value,
    warn_of_escapes,
)
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tokenizer import Tools, encode_rendered, rendered_chat
from megarl.data.tool_columns import looks_like_tools, names_of
from megarl.data.turns import TurnTemplate, refuse_silent_template
from megarl.data.whole_chat import refuse_unsaid_answer, render_whole, rendering_identity, spelled_special
from megarl.machine.errors import counted

_log = logging.getLogger(__name__)
_OTHER_NAMES_OF_TOOLS = (
    "tools",
    "functions",
    "tool_defs",
    "tool_definitions",
    "tool_schemas",
    "available_tools",
)


class Example(NamedTuple):
    """A chat in the form that an engine trains on.

    `is_trained` marks the tokens of the response that the assistant wrote.
    """

    prompt_ids: list[int]
    response_ids: list[int]  # from the first trained answer to the end token of the last one
    is_trained: list[bool]
    is_as_rendered: bool  # whether the template renders the whole chat to the same tokens
    fingerprint: str  # of the messages and tools
    # A special token in a text that is not the assistant's, see data/tokenizer.py.
    escaped: str | None

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class SFTDataset(RowDataset[Example]):
    """The chats of `files`, read according to `data`.

    The last message is the assistant's. All of the assistant's text is trained, except messages with a
    `weight` of 0. `max_length` limits prompt and response together.

    Raises:
        DataError: A row cannot be used.
    """

    def __init__(self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, data: SFTDataConfig) -> None:
        self._pad_id = tokenizer.pad_token_id
        super().__init__(
            read_chat_rows(files, data.columns),
            lambda row: read_example(row, tokenizer, data),
            lambda example: example.length,
            data.max_length,
            "data.max_length",
            data.overlong,
        )
        warn_of_escapes([example.escaped for example in self._items])

        # Train on what the model sees during generation, not on a rendering of the whole chat.
        if others := sum(not example.is_as_rendered for example in self._items):
            _log.warning(
                "%d of %d chats would be rendered differently as a whole, because the chat template "
                "changes earlier answers once other messages follow them. They are trained turn by turn, "
                "as a model sees them during generation",
                others,
                len(self._items),
            )

        rows = Fingerprint()
        tokens = Fingerprint()
        for example in self._items:
            rows.add(values=example.fingerprint)
            tokens.add(
                example.prompt_ids,
                example.response_ids,
                values=None if all(example.is_trained) else example.is_trained,
            )

        self.identity = RowIdentity(rows.hex(), *rendering_identity(tokenizer, tokens))

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """Return a batch with `prompts`, `responses` and `response_mask` as rows of tokens.

        The mask is True for trained tokens. There is one array, `uid`.
        """
        rows = [self._items[index] for index in indices]
        tensors = {
            "prompts": RaggedTensor.of_rows(
                [row.prompt_ids for row in rows], torch.int32, padding=self._pad_id, on_left=True
            ),
            "responses": RaggedTensor.of_rows(
                [row.response_ids for row in rows], torch.int32, padding=self._pad_id
            ),
            "response_mask": RaggedTensor.of_rows([row.is_trained for row in rows], torch.bool),
        }
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": list(uids)})


def read_chat_rows(files: Sequence[str], columns: ChatColumnsConfig) -> Iterator[DataRow]:
    """Yield rows with the columns of SFTDataset. Raises DataError, see `read_rows`."""
    two = [name for name in (columns.prompt, columns.answer) if name is not None]
    hint = (
        "; data.columns sets which columns are read, such as data.columns.messages=conversation, or "
        "data.columns.prompt=question data.columns.answer=answer"
    )
    others = [name for name in _OTHER_NAMES_OF_TOOLS if name != columns.tools]

    for row in read_rows(files, two or [columns.messages], [columns.tools, *others], hint):
        _refuse_tools_elsewhere(row, columns.tools, others)
        yield row


def _refuse_tools_elsewhere(row: DataRow, column: str, others: Sequence[str]) -> None:
    """Refuse tools in a column of another name, which would be ignored while their calls are trained."""
    if row.values.get(column):
        return
    for name in others:
        if looks_like_tools(row.values.get(name)):
            raise row.error(
                name,
                f"contains tools, but tools are read from the column {column!r}, which has none in this row; "
                f"set data.columns.tools={name} "
                "(each as {'type': 'function', 'function': {...}}), or remove the column from the file",
            )


def _chat(row: DataRow, data: SFTDataConfig) -> tuple[str, list[dict[str, Any]]]:
    """Return the column that error messages name, and the chat with its answer."""
    columns = data.columns
    if columns.prompt is None or columns.answer is None:
        return columns.messages, chat_messages(row, columns.messages, data.system_prompt)
    answer = {"role": "assistant", "content": typed_value(row, columns.answer, str, "'The sum is 5.'")}
    return columns.prompt, [*chat_messages(row, columns.prompt, data.system_prompt), answer]


def read_example(row: DataRow, tokenizer: PreTrainedTokenizerBase, data: SFTDataConfig) -> Example:
    """Render the chat of a row of `read_chat_rows`.

    Raises:
        DataError: The row cannot be used.
        TooManyTokensError: The chat is far longer than `data.max_length`, and was not tokenized as a whole.
    """
    column, messages = _chat(row, data)
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    trained = [index for index in answers if _is_trained(row, column, messages[index])]

    if not trained or trained[0] == 0 or answers[-1] != len(messages) - 1:
        roles = [message["role"] for message in messages]
        raise row.error(
            column,
            f"the roles are {roles}; a row needs a prompt and, as its last message, the assistant's answer. "
            "Answers that are not to be trained have a weight of 0, but at least one must be trained",
        )

    tools = tool_schemas(row, data.columns.tools)
    # Each answer has at least its end token.
    turns = [index for index in answers if trained[0] <= index <= trained[-1]]
    if len(turns) > data.max_length:
        raise TooManyTokensError(len(turns), f"{len(turns)} answers")
    try:
        whole_ids = render_whole(
            tokenizer, messages, data.lossy, for_generation=False, tools=tools, limit=data.max_length
        )
        # Everything before the first trained answer is the prompt.
        prompt_ids, answer_ids = encode_answer(tokenizer, messages[: trained[0] + 1], tools)
        response_ids = [*answer_ids]
        is_trained = [True] * len(answer_ids)
        bridges = TurnTemplate(tokenizer, tools)
        # Append later turns as in generation: an untrained bridge, then the answer.
        for before, index in pairwise(turns):
            # Each turn renders the chat again, so a chat that is far too long is not measured to its end.
            if (length := len(prompt_ids) + len(response_ids)) > 2 * data.max_length:
                raise TooManyTokensError(length, f"{counted(length, 'token')} before message {index}")
            bridge_ids = bridges.bridge(messages[before + 1 : index])
            _, answer_ids = encode_answer(tokenizer, messages[: index + 1], tools)
            response_ids += bridge_ids + answer_ids
            is_trained += [False] * len(bridge_ids) + [index in trained] * len(answer_ids)
    except TooManyTokensError:
        raise
    except ValueError as error:
        raise row.error(column, str(error)) from error

    # The text that the template writes after the last trained answer is not compared.
    whole_ids = whole_ids[: len(prompt_ids) + len(response_ids)]
    is_as_rendered = whole_ids == prompt_ids + response_ids
    fingerprint = Fingerprint()
    fingerprint.add(values=[messages, tools])

    return Example(
        prompt_ids,
        response_ids,
        is_trained,
        is_as_rendered,
        fingerprint.hex(),
        spelled_special(tokenizer, messages),
    )


def _is_trained(row: DataRow, column: str, message: dict[str, Any]) -> bool:
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise row.error(
            column,
            f"a message has the weight {weight!r}, expected 1 (trained, the default) or 0 (not trained)",
        )

    return bool(weight)


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Tools
) -> tuple[list[int], list[int]]:
    """Return the token ids of the chat up to the start of its last message, and of that message.

    The message includes its end token. Raises ValueError.
    """
    prompt = rendered_chat(tokenizer, messages[:-1], for_generation=True, tools=tools)
    chat = rendered_chat(tokenizer, messages, for_generation=False, tools=tools)
    prompt_ids = encode_rendered(tokenizer, prompt)
    chat_ids = encode_rendered(tokenizer, chat)
    refuse_silent_template(names_of(tools), prompt)
    refuse_silent_template(names_of(messages[-1].get("tool_calls")), chat[len(prompt) :])
    # Compare tokens rather than text, because a tokenizer may merge across the boundary.
    if chat_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(_not_a_prefix(tokenizer, prompt_ids, chat_ids))
    refuse_unsaid_answer(tokenizer, messages, prompt, chat[len(prompt) :])
    answer_ids = chat_ids[len(prompt_ids) :]

    if tokenizer.eos_token_id not in answer_ids:
        raise ValueError(
            f"the rendered answer {tokenizer.decode(answer_ids)[-60:]!r} does not contain the end token "
            f"{tokenizer.eos_token!r}, so the model would not learn to stop; set the tokenizer's eos_token "
            "to the token with which its chat template ends an answer"
        )

    # A template may add a line break after the end token.
    last_end = len(answer_ids) - answer_ids[::-1].index(tokenizer.eos_token_id)
    return prompt_ids, answer_ids[:last_end]


def _not_a_prefix(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], full_ids: list[int]) -> str:
    """Explain why the answer's tokens cannot be separated from the prompt's.

    The explanation is the first difference between the two renderings.
    """
    pairs = enumerate(zip(prompt_ids, full_ids, strict=False))
    parting = next((i for i, (a, b) in pairs if a != b), min(len(prompt_ids), len(full_ids)))
    prompt, full = (tokenizer.decode(ids[parting : parting + 8]) for ids in (prompt_ids, full_ids))

    return (
        f"the prompt rendered for generation is not the beginning of the whole chat: from token {parting} on "
        f"it reads {prompt!r} and the chat {full!r}, so the tokens of the answer cannot be identified. Use a "
        "chat template that renders a message in the same way whatever follows it (templates that drop or "
        "add thinking parts do not)"
    )
