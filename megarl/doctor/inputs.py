"""Checks the inputs of a run, by reading them like the run.

The inputs are model folders, tokenizers and chat templates, data files and reward functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megarl.algorithms.user_functions import try_functions
from megarl.config.finding import DATA, Finding, Status, doubtful, good, refused, wrong
from megarl.config.roles import ModelRole, RoleKind, model_roles
from megarl.config.rules.data import too_few_rows
from megarl.config.rules.machine import has_tokenizer, has_weights
from megarl.config.schema import (
    AlgorithmConfig,
    DataConfig,
    Overlong,
    PPOConfig,
    PreferenceConfig,
    RunConfig,
    RunKind,
    SFTDataConfig,
)
from megarl.data.chat_clock import reads_clock
from megarl.data.curriculum import KEY as SAMPLER_KEY
from megarl.data.curriculum import load_sampler
from megarl.data.files import DataError, open_file
from megarl.data.images import ImageProcessor
from megarl.data.pairs import pair_encoder
from megarl.data.preferences import read_pair_rows
from megarl.data.prompts import read_prompt, read_prompt_rows
from megarl.data.sft import read_chat_rows, read_example
from megarl.data.tables import DataRow, escapes_message
from megarl.data.token_bounds import TooManyTokensError
from megarl.data.tokenizer import Tools, load_tokenizer
from megarl.data.turns import closing_token
from megarl.data.whole_chat import spelled_special
from megarl.doctor.agents_and_judges import judge_agent, judge_data_sources, judge_prompts, judge_teacher
from megarl.doctor.reward_functions import (
    LOAD_LIMIT_S,
    MOST_TRUTHS,
    choose_truths,
    judge_compared_metrics,
    judge_rewards,
)
from megarl.doctor.run_inputs import ROWS, ExaminedRun
from megarl.machine.errors import ConfigError, counted, sized
from megarl.machine.user_functions import UnfinishedError, UserFunctionError, call_in_process
from megarl.models.architecture import Architecture
from megarl.plan.step_time.device import profile_of
from megarl.rollout.interface import end_token_ids
from megarl.weights.manifest import check_headers
from megarl.weights.tensors import WeightTransferError

Config = RunConfig
_EXAMPLES = {
    RunKind.ppo: "as described in docs/rewards.md",
    RunKind.sft: "each row a conversation that ends with the assistant's answer",
    RunKind.dpo: "each row a prompt with two answers, chosen and rejected",
    RunKind.reward_model: "each row a prompt with two answers, chosen and rejected",
}
MODELS = "models"
TOKENIZERS = "tokenizers"
FUNCTIONS = "functions of the algorithm"
SAMPLER = "curriculum sampler"
DEVICES = "devices"


def check(subject: ExaminedRun) -> Iterator[Finding]:
    assert subject.config is not None
    yield from findings(subject.config, subject.architectures, subject.skipped, subject.num_rows)


def findings(
    config: Config,
    architectures: Mapping[str, Architecture],
    skipped: Collection[str] = (),
    num_rows: int = ROWS,
) -> Iterator[Finding]:
    """Check all inputs of a run that are on this machine.

    Args:
        architectures: The architectures of the models to check, by role.
        skipped: The keys to skip.
        num_rows: The number of rows of each data file that are rendered.
    """
    # Check each weight folder once, because several roles may share it.
    for role in (each for each in _distinct_models(config, architectures) if has_weights(each.path)):
        yield judge_model(Path(role.path), role.path_key, architectures[role.name], role)
    yield from _text_findings(config, architectures, skipped, num_rows)
    if config.placement.device_profile is not None and "placement.device_profile" not in skipped:
        yield judge_device(config)
    if isinstance(config, PPOConfig):
        yield from _scoring_findings(config, skipped, num_rows)


def _text_findings(
    config: Config, architectures: Mapping[str, Architecture], skipped: Collection[str], num_rows: int
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


def _scoring_findings(config: PPOConfig, skipped: Collection[str], num_rows: int) -> Iterator[Finding]:
    """Check rewards, judges, the functions of the algorithm, teachers and the curriculum."""
    if config.reward.functions and not any(key.startswith("reward.functions") for key in skipped):
        rows, val_sources = choose_truths(config.data, skipped, MOST_TRUTHS if num_rows > 1 else 1)
        results, keys = judge_rewards(config.reward, rows)
        yield from results
        yield from judge_compared_metrics(config, val_sources, keys)
    if config.reward.judges and not any(key.startswith("reward.judges") for key in skipped):
        yield from judge_prompts(config, skipped)

    if not any(key.endswith(".function") or key == "algorithm" for key in skipped):
        yield from judge_functions(config.algorithm)
    # The start of a run, which reads one row here, checks all rows when it renders them.
    if config.teachers and num_rows > 1 and "data.train_files" not in skipped:
        yield from judge_data_sources(config)
    sampler = config.data.curriculum.sampler
    if sampler is not None and not any(key.startswith("data.curriculum") for key in skipped):
        yield judge_sampler(sampler)


def judge_device(config: Config) -> Finding:
    """Check that the device profile of a run can be loaded."""
    key = "placement.device_profile"
    try:
        profile = profile_of(config)
    except ConfigError as error:
        return refused(
            DEVICES, key, error, "name a device of configs/devices, or a file of `megarl tune --calibrate`"
        )
    assert profile is not None
    return good(DEVICES, f"{key}: {profile.name}")


def _distinct_models(config: Config, architectures: Mapping[str, Architecture]) -> list[ModelRole]:
    """Return one role for each folder.

    The reference usually has the actor's folder, and a critic in it needs no other tensors.
    """
    roles = [role for role in model_roles(config) if role.name in architectures]
    return list({role.path: role for role in reversed(roles)}.values())[::-1]


def judge_model(folder: Path, key: str, architecture: Architecture, role: ModelRole) -> Finding:
    """Check that the weights are complete.

    Each file must have its full size, and each tensor of the index must be in its file with the shape of
    config.json. Only headers are read.
    """
    again = f"download it again (hf download NAME --local-dir {folder}), or set {key} to another folder"
    try:
        index = check_headers(
            folder,
            architecture.base,
            "value" if role.with_value_head else "lm",
            trains=role.optim is not None,
        )
    except WeightTransferError as error:
        return wrong(MODELS, f"{key}: {error}", again, folder=str(folder))

    files = {tensor.file for tensor in index.values()}
    total = sum(file.stat().st_size for file in files)
    return good(
        MODELS,
        f"{folder}: {counted(len(index), 'tensor')} in {counted(len(files), 'file')}, {sized(total)}",
        files=len(files),
        bytes=total,
    )


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
    config: Config,
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
            try:
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


def judge_held_out(config: Config) -> Iterator[Finding]:
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


def judge_count(config: Config, counts: Sequence[int | None]) -> Iterator[Finding]:
    """Check that the training files have enough rows for a step, if their number is known."""
    key = config.batch_key
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and (problem := too_few_rows(config.prompts_per_step, sum(known), key)):
        yield refused(DATA, key, ValueError(problem), f"lower {key}, or add rows")


def _rendered(
    config: Config, file: str, tokenizer: PreTrainedTokenizerBase, num_rows: int, tools: Tools
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
    config: Config, file: str, tokenizer: PreTrainedTokenizerBase, tools: Tools
) -> tuple[Iterator[DataRow], Callable[[DataRow], tuple[int, str | None]]]:
    """Return the rows of a file, and a function that returns the length and a special token of one."""
    section = config.data
    if isinstance(section, DataConfig):
        harness = config.agent.harness if isinstance(config, PPOConfig) else None
        images = ImageProcessor.of_folder(config.model.path, config.model.trust_remote_code)

        def of_prompt(row: DataRow) -> tuple[int, str | None]:
            prompt = read_prompt(row, tokenizer, section, tools, images, harness)
            return len(prompt.token_ids), spelled_special(tokenizer, prompt.messages)

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
    config: Config,
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


def judge_functions(algorithm: AlgorithmConfig, limit_s: float = LOAD_LIMIT_S) -> Iterator[Finding]:
    """Test a custom estimator and policy loss on two samples, in a process with a time limit.

    `try_functions` runs in that process.
    """
    references = [
        reference
        for reference in (algorithm.advantage.function, algorithm.policy_loss.function)
        if reference is not None
    ]
    if not references:
        return
    names = " and ".join(references)
    yield _judge_code(
        FUNCTIONS,
        "algorithm",
        names,
        "fix the file, or remove the key; docs/algorithms/custom.md describes the arguments and the result "
        "of such a function",
        partial(try_functions, algorithm),
        "on two samples",
        "loads, and returns values for two samples",
        limit_s,
    )


def judge_sampler(reference: str, limit_s: float = LOAD_LIMIT_S) -> Finding:
    """Load a custom sampler of a curriculum, in a process with a time limit."""
    return _judge_code(
        SAMPLER,
        SAMPLER_KEY,
        reference,
        "fix the file, or remove the key; docs/data.md describes the methods of such a class",
        partial(_load_sampler, reference),
        "while it is loaded",
        "loads, and has the methods of a sampler",
        limit_s,
    )


def _load_sampler(reference: str) -> None:
    load_sampler(reference)  # the class itself cannot be returned to another process


def _judge_code(
    check: str,
    key: str,
    names: str,
    hint: str,
    run: Callable[[], None],
    when: str,
    does: str,
    limit_s: float,
) -> Finding:
    """Run user code in a separate process, which is ended after the time limit.

    Args:
        run: Raises UserFunctionError if the code cannot be used.
        when: What `run` does, for the message about a time limit.
        does: What the code does if `run` succeeds.
    """
    try:
        call_in_process(run, limit_s=limit_s)
    except UserFunctionError as error:
        return refused(check, key, error, hint, names=names)
    except UnfinishedError as error:
        return wrong(check, f"{key}: {names}: {error} {when}", hint, names=names)
    return good(check, f"{names} {does}", names=names)
