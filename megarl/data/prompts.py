"""The prompts of a run: rows with verl's columns, or others, rendered to token ids once at the start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.batch.token_rows import TEACHER_PROMPTS
from megarl.config.rules.agent import image_problem
from megarl.config.schema import DataConfig, HarnessConfig, PromptColumnsConfig, SandboxProvider
from megarl.data.files import DataError, open_file
from megarl.data.images import (
    ImageProcessor,
    digests,
    image_columns,
    message_parts,
    read_images,
    without_placeholders,
)
from megarl.data.tables import (
    DataRow,
    Fingerprint,
    RowDataset,
    RowIdentity,
    chat_messages,
    read_rows,
    typed_value,
    warn_of_escapes,
)
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tokenizer import Tools, render_chat
from megarl.data.whole_chat import render_whole, rendering_identity, spelled_special

GROUND_TRUTH = "ground_truth"
SANDBOX_IMAGE = "sandbox_image"  # key of extra_info
GROUND_TRUTH_EXAMPLE = "{'style': 'rule', 'ground_truth': '5'}"
_HINT = (
    "; data.columns sets which columns are read, such as data.columns.prompt=question "
    "data.columns.ground_truth=answer data.columns.data_source=null, and data.columns.reward_model=null for "
    "rows without answers"
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    images: tuple[bytes, ...] = ()  # encoded files
    teacher_ids: tuple[int, ...] | None = None  # the prompt that the teacher sees, if it is another


class PromptDataset(RowDataset[Prompt]):
    """The prompts of `files`, read according to `data`.

    Columns: `prompt` (chat messages, or a text), `data_source` (str), `reward_model` ({style, ground_truth};
    or a column `ground_truth`), and optionally `extra_info` (a dict), under the names in `data.columns`. The
    chat is rendered with the tokenizer's template, with the `tools` shown to the model, up to the start of
    the assistant's answer. A model of images also reads `images` (see `read_images`), whose places in the
    prompt are marked by `<image>`; the tokens of images count for the limit. The prompts of the teacher, if
    there are any, are rendered in the same way, and have the same limit.

    Raises:
        DataError: A row cannot be used.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        tools: Tools = None,
        images: ImageProcessor | None = None,
        harness: HarnessConfig | None = None,
    ) -> None:
        self._pad_id = tokenizer.pad_token_id
        super().__init__(
            read_prompt_rows(files, data.columns),
            lambda row: read_prompt(row, tokenizer, data, tools, images, harness),
            lambda prompt: max(len(prompt.token_ids), len(prompt.teacher_ids or ())),
            data.max_prompt_length,
            "data.max_prompt_length",
            data.overlong,
        )
        warn_of_escapes([spelled_special(tokenizer, prompt.messages) for prompt in self._items])
        self._has_images = any(prompt.images for prompt in self._items)
        self.has_teacher_prompts = any(prompt.teacher_ids is not None for prompt in self._items)
        for prompt, file in zip(self._items, self.row_files, strict=True):
            if self.has_teacher_prompts and prompt.teacher_ids is None:
                raise DataError(
                    f"{file} has no column {data.columns.teacher_prompt!r} (data.columns.teacher_prompt), "
                    "but other files have it; add it to all files, with the prompt itself where the teacher "
                    "sees no other"
                )

        rows = Fingerprint()
        tokens = Fingerprint()
        # Fingerprint rows and tokens separately, because another chat template changes only the tokens.
        for prompt in self._items:
            values = [prompt.data_source, prompt.reward_model, prompt.extra_info]
            # Rows without images keep the fingerprint that they had before there were images.
            rows.add(values=[prompt.messages, *values, *digests(prompt.images)])
            # So do rows without prompts of the teacher.
            of_teacher = [] if prompt.teacher_ids is None else [prompt.teacher_ids]
            tokens.add(prompt.token_ids, *of_teacher, values=values)

        self.identity = RowIdentity(rows.hex(), *rendering_identity(tokenizer, tokens))

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """Return a batch with `prompts` as rows of tokens, padded on the left.

        If prompts have images, their files are the columns of `image_columns`. If the teacher has other
        prompts, they are the column TEACHER_PROMPTS. The arrays are `uid`,
        `messages` (the rendered chat), `data_source`, `reward_model` and `extra_info`.
        Every row has its own dicts.
        """
        rows = [self._items[index] for index in indices]
        prompts = RaggedTensor.of_rows(
            [row.token_ids for row in rows], torch.int32, padding=self._pad_id, on_left=True
        )

        of_teacher = (
            {
                TEACHER_PROMPTS: RaggedTensor.of_rows(
                    [row.teacher_ids for row in rows if row.teacher_ids is not None],
                    torch.int32,
                    padding=self._pad_id,
                    on_left=True,
                )
            }
            if self.has_teacher_prompts
            else {}
        )
        # Batches of a data set have the same columns, whether or not their rows have images.
        images = image_columns([row.images for row in rows]) if self._has_images else {}

        return DataProto.from_dict(
            tensors={"prompts": prompts, **of_teacher, **images},
            non_tensors={
                "uid": list(uids),
                "messages": [[dict(message) for message in row.messages] for row in rows],
                "data_source": [row.data_source for row in rows],
                "reward_model": [dict(row.reward_model) for row in rows],
                "extra_info": [dict(row.extra_info) for row in rows],
            },
        )


def read_prompt_rows(files: Sequence[str], columns: PromptColumnsConfig) -> Iterator[DataRow]:
    """Yield rows with the columns of PromptDataset. Raises DataError, see `read_rows`."""
    if not files:
        yield from read_rows(files, ())
    for file in files:
        yield from read_rows([file], *columns_of(file, columns), hint=_HINT)


def read_reward_rows(files: Sequence[str], columns: PromptColumnsConfig) -> Iterator[DataRow]:
    """Yield rows with the columns of `read_reward_inputs`, without the prompts.

    Raises DataError, see `read_rows`.
    """
    for file in files:
        required, optional = columns_of(file, columns)
        yield from read_rows(
            [file], [name for name in required if name != columns.prompt], optional, hint=_HINT
        )


def columns_of(file: str, columns: PromptColumnsConfig) -> tuple[list[str], list[str]]:
    """Return the required and the optional columns of a file.

    Ground truths are in the mapping `reward_model`, or, unless configured otherwise, in a column
    `ground_truth`.
    """
    answers = columns.reward_model if columns.ground_truth is None else columns.ground_truth
    if columns.ground_truth is None and columns.reward_model is not None:
        there = open_file(file, (columns.reward_model, GROUND_TRUTH)).columns
        answers = GROUND_TRUTH if GROUND_TRUTH in there and columns.reward_model not in there else answers

    required = [name for name in (columns.prompt, columns.data_source, answers) if name is not None]
    optional = [columns.extra_info, columns.images]
    defaults = (PromptColumnsConfig().extra_info, PromptColumnsConfig().images)

    # A column that is named explicitly must exist, but the teacher's is for training only.
    named = [name for name, default in zip(optional, defaults, strict=True) if name != default]
    of_teacher = [] if columns.teacher_prompt is None else [columns.teacher_prompt]
    return [*required, *named], [*(name for name in optional if name not in named), *of_teacher]


class RewardInputs(NamedTuple):
    """The inputs of a reward function from a row, in addition to the response."""

    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]


def read_reward_inputs(row: DataRow, columns: PromptColumnsConfig) -> RewardInputs:
    """Return the reward inputs of a row of `read_prompt_rows` or `read_reward_rows`. Raises DataError."""
    if columns.ground_truth is not None:
        reward_model = {"style": "rule", GROUND_TRUTH: row.values[columns.ground_truth]}
    elif columns.reward_model is None:
        reward_model = {"style": "rule", GROUND_TRUTH: None}
    elif GROUND_TRUTH in row.values and columns.reward_model not in row.values:
        reward_model = {"style": "rule", GROUND_TRUTH: row.values[GROUND_TRUTH]}
    else:
        reward_model = typed_value(row, columns.reward_model, dict, GROUND_TRUTH_EXAMPLE)
        if GROUND_TRUTH not in reward_model:
            problem = (
                f"it has no 'ground_truth', only {sorted(reward_model)}; expected {GROUND_TRUTH_EXAMPLE}"
            )
            raise row.error(columns.reward_model, problem)

    # A cell of a CSV file is empty instead of null.
    extra_info = (
        {}
        if row.values.get(columns.extra_info) in (None, "")
        else typed_value(row, columns.extra_info, dict, "{'index': 0}")
    )
    source = Path(row.file).stem

    # The name becomes part of metric names, so it must be printable.
    if columns.data_source is not None:
        source = typed_value(row, columns.data_source, str, "'openai/gsm8k'")
        if not source.strip() or not source.isprintable():
            problem = (
                f"is {source!r}, but names the kind of task in metrics such as val/<data_source>/score/mean"
            )
            raise row.error(
                columns.data_source,
                f"{problem}; give it a name, or set data.columns.data_source=null for the file's",
            )

    return RewardInputs(source, reward_model, extra_info)


def _check_sandbox_image(
    row: DataRow, column: str, extra_info: Mapping[str, Any], harness: HarnessConfig
) -> None:
    """Check the image of a row's sandbox before a run, in which it would fail the row's episodes."""
    provider = harness.sandbox.provider
    if provider is None:
        return
    image = extra_info.get(SANDBOX_IMAGE)
    if image is None:
        # A function may choose the image itself.
        if harness.command and provider is SandboxProvider.container and harness.sandbox.image is None:
            raise row.error(
                column,
                f"has no {SANDBOX_IMAGE}, and agent.harness.sandbox.image is null, so there is no image for "
                "the row's container; set either of them",
            )
        return
    problem = image_problem(provider, image)
    if problem is None and provider is SandboxProvider.local and not os.path.isdir(image):
        problem = f"is {image!r}, which is no folder of this machine; it must be on all nodes of the run"
    if problem is not None:
        raise row.error(column, f"{SANDBOX_IMAGE} {problem}")


def read_prompt(
    row: DataRow,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    tools: Tools = None,
    processor: ImageProcessor | None = None,
    harness: HarnessConfig | None = None,
) -> Prompt:
    """Read and render the prompt of a row of `read_prompt_rows`.

    Args:
        harness: The agent program that plays the row, in whose sandbox its image must work.

    Raises:
        DataError: The row cannot be used.
        TooManyTokensError: The prompt is far longer than `data.max_prompt_length`, and was not tokenized.
    """
    columns = data.columns
    images = () if processor is None else read_images(row, columns.images, data)
    if processor is None and columns.images in row.values and row.values[columns.images] not in (None, []):
        raise row.error(
            columns.images,
            "the row has images, but megarl reads none with this model; use one whose vision tower it "
            "supports (docs/models.md), or remove the column",
        )
    messages = _to_be_answered(row, columns.prompt, data.system_prompt)
    inputs = read_reward_inputs(row, columns)
    if harness is not None:
        _check_sandbox_image(row, columns.extra_info, inputs.extra_info, harness)
    column = columns.prompt
    render = partial(
        render_whole,
        tokenizer,
        lossy=data.lossy,
        for_generation=True,
        tools=tools,
        limit=data.max_prompt_length,
    )
    teacher_ids = None
    try:
        # The checks of the text do not concern images.
        token_ids = render(without_placeholders(messages) if images else messages)
        if processor is not None and images:
            parts = message_parts(messages, len(images))
            rendered = render_chat(tokenizer, parts, for_generation=True, tools=tools)
            token_ids = processor.expanded(rendered, images)
        if columns.teacher_prompt is not None and columns.teacher_prompt in row.values:
            column = columns.teacher_prompt
            teacher_ids = tuple(render(_to_be_answered(row, column, data.system_prompt)))
    except TooManyTokensError:
        raise
    except ValueError as error:
        raise row.error(column, str(error)) from error

    if images and teacher_ids is not None:
        raise row.error(
            column,
            "the row has images, which a prompt of the teacher cannot have; set "
            "data.columns.teacher_prompt=null, or remove the images",
        )
    if not token_ids or teacher_ids == ():
        raise DataError(f"{row.file}, row {row.number}: the chat template renders the prompt to no tokens")

    return Prompt(
        token_ids=tuple(token_ids),
        messages=messages,
        images=images,
        teacher_ids=teacher_ids,
        **inputs._asdict(),
    )


def _to_be_answered(row: DataRow, column: str, system_prompt: str | None) -> list[dict[str, Any]]:
    messages = chat_messages(row, column, system_prompt)
    if messages[-1]["role"] == "assistant":
        problem = "the last message is the assistant's, so the model would answer its own answer"
        raise row.error(column, f"{problem}; end the prompt with the message to be answered")
    return messages
