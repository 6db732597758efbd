"""Checks the tokenizers of a run, and its data, rendered like in the run. It imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from transformers import PreTrainedTokenizerBase

from megarl.config.finding import DATA, Finding, Status, doubtful, good, refused, wrong
from megarl.config.roles import ModelRole, RoleKind, absent_teacher_prompts, model_roles
from megarl.config.rules.data import too_few_rows
from megarl.config.rules.machine import has_tokenizer
from megarl.config.schema import (
    DataConfig,
    Overlong,
    PPOConfig,
    PreferenceConfig,
    RunConfig,
    RunKind,
    SFTDataConfig,
)
from megarl.data.chat_clock import reads_clock
from megarl.data.files import DataError, open_file
from megarl.data.images import ImageProcessor
from megarl.data.pairs import pair_encoder, read_pair_rows
from megarl.data.prompts import read_prompt, read_prompt_rows
from megarl.data.sft import read_chat_rows, read_example
from megarl.data.tables import DataRow, escapes_message
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tokenizer import Tools, load_tokenizer
from megarl.data.turns import closing_token
from megarl.data.whole_chat import spelled_special
from megarl.doctor.agents_and_judges import judge_agent, judge_teacher
from megarl.machine.errors import counted
from megarl.models.architecture import Architecture
from megarl.rollout.interface import end_token_ids

_EXAMPLES = {
    RunKind.ppo: "as described in docs/rewards.md",
    RunKind.sft: "each row a conversation that ends with the assistant's answer",
    RunKind.dpo: "each row a prompt with two answers, chosen and rejected",
    RunKind.reward_model: "each row a prompt with two answers, chosen and rejected",
}
TOKENIZERS = "tokenizers"


def text_findings(
    config: RunConfig, architectures: Mapping[str, Architecture], skipped: Collection[str], num_rows: int
) -> Iterator[Finding]:
    """Check the tokenizers, and what is rendered with the policy's: the agent and the data."""
    policy: PreTrainedTokenizerBase | None = None
    for role in model_roles(config):
        if (
            role.name not in architectures
            or role.kind not in (RoleKind.actor, RoleKind.reward_model, RoleKind.teacher)
            or not has_tokenizer(role.path)
        ):
            continue
        try:
            tokenizer = load_tokenizer(role.path, config.model.trust_remote_code, role.path_key)
            if role.kind is RoleKind.teacher:
                yield judge_teacher(role, tokenizer, policy)
                continue
            yield judge_tokenizer(role, tokenizer)
        except ValueError as error:
            yield refused(
                TOKENIZERS,
                role.path_key,
                error,
                "copy the model's tokenizer.json, tokenizer_config.json and chat_template.jinja into its "
                "folder",
                folder=role.path,
            )
            continue
        # The data is rendered with the policy's tokenizer, so it is checked here.
        if role.name == "actor":
            policy = tokenizer
            tools = None
            if (
                isinstance(config, PPOConfig)
                and config.agent.is_used
                and not any(key.startswith("agent") for key in skipped)
            ):
                judged, tools = judge_agent(config, tokenizer, skipped)
                yield judged
                # Without the tools' schemas the prompts would be rendered without them.
                if judged.status is Status.error:
                    continue
            yield from data(config, tokenizer, skipped, num_rows, tools)


def judge_tokenizer(role: ModelRole, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Check a tokenizer with a chat template. Raises ValueError if generation_config.json cannot be read."""
    facts = {"folder": role.path, "tokens": len(tokenizer), "end_token": tokenizer.eos_token}
    others = sorted(end_token_ids(role.path) - {tokenizer.eos_token_id})

    if role.reads_policy_tokens and others and tokenizer.eos_token_id not in end_token_ids(role.path):
        named = ", ".join(f"{tokenizer.decode([index])!r} ({index})" for index in others)
        return doubtful(
            TOKENIZERS,
            f"{role.path}: the end token of the tokenizer is {tokenizer.eos_token!r} "
            f"({tokenizer.eos_token_id}), but that of the model's generation_config.json or config.json is "
            f"{named}; each of them ends a sample",
            "set eos_token in tokenizer_config.json to the token with which the chat template ends an answer",
            **facts,
        )

    if role.reads_policy_tokens and (problem := endless_turns(role.path, tokenizer)):
        return doubtful(
            TOKENIZERS,
            f"{role.path}: {problem}",
            "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json, to that "
            "token",
            **facts,
        )

    template = "has a chat template"
    if reads_clock(tokenizer):
        template += " that writes the date; prompts have the date of the run's start, also after resuming"
    return good(
        TOKENIZERS,
        f"{role.path}: {counted(len(tokenizer), 'token')}, end token {tokenizer.eos_token!r}, {template}",
        **facts,
    )


def endless_turns(folder: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Describe the problem if the chat template closes an answer with a token that does not end a sample.

    This is common in folders of base models. None if there is no problem.
    """
    closing = closing_token(tokenizer)
    if closing is None or closing in {tokenizer.eos_token_id, *end_token_ids(folder)}:
        return None
    return (
        f"the chat template closes an answer with {tokenizer.decode([closing])!r} ({closing}), which does "
        f"not end a sample: the tokenizer's end token is {tokenizer.eos_token!r}, and neither "
        "generation_config.json nor config.json lists it. A policy that learns to write it keeps generating "
        "until data.max_response_length"
    )


def data(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    skipped: Collection[str],
    num_rows: int,
    tools: Tools = None,
) -> list[Finding]:
    """Check the first rows of each file, read and rendered like in the run."""
    results: list[Finding] = []
    counts = list[int | None]()

    for key in ("data.train_files", "data.val_files"):
        if key in skipped:
            continue
        for file in dict.fromkeys(
            config.data.train_files if key == "data.train_files" else config.data.val_files
        ):
            if not os.path.exists(file):  # reported elsewhere
                continue
            column = config.data.columns.teacher_prompt if isinstance(config, PPOConfig) else None
            try:
                if (
                    key == "data.train_files"
                    and column is not None
                    and column not in open_file(file, (column,)).columns
                ):
                    problem, hint = absent_teacher_prompts(column)
                    results.append(wrong(DATA, f"{key}: {file} {problem}", hint, file=file))
                    continue
                lengths, has_bounds, spelled = _rendered(config, file, tokenizer, num_rows, tools)
            except DataError as error:
                example = _EXAMPLES[config.kind]
                results.append(
                    refused(DATA, key, error, f"rewrite the file with these columns, {example}", file=file)
                )
                continue
            # With fewer rows than requested, the file has been read to its end.
            rows = open_file(file, ()).num_rows if len(lengths) == num_rows else len(lengths)
            counts += [rows] if key == "data.train_files" else []
            results.append(judge_rows(config, key, file, rows, lengths, has_bounds=has_bounds))
            if spelled:
                results.append(
                    doubtful(
                        DATA,
                        f"{key}: {file}: {escapes_message(spelled, len(lengths))}",
                        "remove them from the text if they are not intended",
                        file=file,
                    )
                )

    if not {"data.train_files", "data.val_files"} & set(skipped):
        results += judge_held_out(config)

    # The total is only known if every training file could be read.
    if "data.train_files" not in skipped and len(counts) == len(set(config.data.train_files)):
        results += judge_count(config, counts)
    return results


def judge_held_out(config: RunConfig) -> Iterator[Finding]:
    """Warn about validation files that are training files too, under the same or another name."""
    trained = {os.path.realpath(file): file for file in config.data.train_files}
    for file in dict.fromkeys(config.data.val_files):
        same = trained.get(os.path.realpath(file))
        if same is not None:
            name = "" if same == file else f", as {same}"
            yield doubtful(
                DATA,
                f"data.val_files: {file} is also in data.train_files{name}, so validation does not measure "
                "how the model answers prompts that it was not trained on",
                "move some rows to a file of their own, and name that file",
                file=file,
            )


def judge_count(config: RunConfig, counts: Sequence[int | None]) -> Iterator[Finding]:
    """Check that the training files have enough rows for a step, if their number is known."""
    key = config.batch_key
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and (problem := too_few_rows(config.prompts_per_step, sum(known), key)):
        yield refused(DATA, key, ValueError(problem), f"lower {key}, or add rows")


def _rendered(
    config: RunConfig, file: str, tokenizer: PreTrainedTokenizerBase, num_rows: int, tools: Tools
) -> tuple[list[int], bool, list[str]]:
    """Read and render the first rows like a run.

    Returns:
        The tokens of each prompt or, for supervised fine-tuning, of each conversation; whether some are lower
        bounds, of rows that are too long to be tokenized; special tokens in text that the assistant did not
        write.
    """
    lengths: list[int] = []
    spelled: list[str] = []
    has_bounds = False
    rows, read = _reading(config, file, tokenizer, tools)
    for row in islice(rows, num_rows):
        try:
            length, token = read(row)
        except TooManyTokensError as error:
            length, token = error.at_least, None
            has_bounds = True
        lengths.append(length)
        spelled += [] if token is None else [token]
    return lengths, has_bounds, spelled


def _reading(
    config: RunConfig, file: str, tokenizer: PreTrainedTokenizerBase, tools: Tools
) -> tuple[Iterator[DataRow], Callable[[DataRow], tuple[int, str | None]]]:
    """Return the rows of a file, and a function that returns the length and a special token of one."""
    section = config.data
    if isinstance(section, DataConfig):
        harness = config.agent.harness if isinstance(config, PPOConfig) else None
        images = ImageProcessor.of_folder(config.model.path, config.model.trust_remote_code)

        def of_prompt(row: DataRow) -> tuple[int, str | None]:
            prompt = read_prompt(row, tokenizer, section, tools, images, harness)
            length = max(len(prompt.token_ids), len(prompt.teacher_ids or ()))
            return length, spelled_special(tokenizer, prompt.messages)

        return read_prompt_rows([file], section.columns), of_prompt

    if isinstance(config, PreferenceConfig):
        rows = read_pair_rows([file], config.data.columns)
        encode = pair_encoder(config, tokenizer).encode
    else:
        assert isinstance(section, SFTDataConfig)
        rows = read_chat_rows([file], section.columns)
        encode = partial(read_example, tokenizer=tokenizer, data=section)

    def of_answers(row: DataRow) -> tuple[int, str | None]:
        encoded = encode(row)
        return encoded.length, encoded.escaped

    return rows, of_answers


def judge_rows(
    config: RunConfig,
    key: str,
    file: str,
    rows: int | None,
    lengths: Sequence[int],
    *,
    has_bounds: bool = False,
) -> Finding:
    """Check the lengths of the first rows.

    Args:
        rows: The number of rows of the file; None if unknown.
        has_bounds: Whether some lengths are lower bounds.
    """
    limit_key = config.length_keys[0]
    limit = config.data.longest_row
    longest = max(lengths)
    longer = sum(length > limit for length in lengths)
    facts = {"file": file, "rows": rows, "rows_read": len(lengths), "longest": longest, "longer": longer}

    if longer:
        message = (
            f"{key}: {file}: {longer} of the first {counted(len(lengths), 'row')} have more than "
            f"{limit_key}={limit} tokens, the longest {'at least ' if has_bounds else ''}{longest}"
        )
        if config.data.overlong is Overlong.refuse:
            return wrong(
                DATA,
                message,
                f"set {limit_key}={longest} or more, or data.overlong=filter to skip them",
                **facts,
            )
        return doubtful(
            DATA, f"{message}; they will be skipped", f"set {limit_key}={longest} to keep them", **facts
        )

    of_all = "" if rows is None else f"{counted(rows, 'row')}; "
    return good(
        DATA, f"{file}: {of_all}the first {len(lengths)} have at most {counted(longest, 'token')}", **facts
    )
