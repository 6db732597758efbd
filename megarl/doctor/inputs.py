"""What a run reads: model folders, tokenizers and chat templates, data files, reward functions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from megarl.config.roles import ModelRole, model_roles
from megarl.config.schema import Overlong, PPOConfig, RewardFunctionConfig, SFTConfig
from megarl.data import prompts, sft
from megarl.data.files import DataError, open_file
from megarl.data.tokenizer import load_tokenizer
from megarl.doctor.check_result import CheckResult, doubtful, good, size, wrong
from megarl.doctor.examined_run import ExaminedRun

MODELS, TOKENIZERS, DATA, REWARDS = "models", "tokenizers", "data", "reward functions"
_INDEX = "model.safetensors.index.json"
_LFS = b"version https://git-lfs"
_ROWS = 256  # of each file that are rendered
_REWARD_LIMIT_S = 30
_LOAD_REWARD = "import sys; from megarl.rewards.functions import load_reward_function; load_reward_function(*sys.argv[1:])"


def models(subject: ExaminedRun) -> Iterator[CheckResult]:
    if subject.config is None:
        return
    for role in {role.path: role for role in reversed(model_roles(subject.config))}.values():
        yield from judge_model(Path(role.path), role.path_key)


def judge_model(folder: Path, key: str) -> Iterator[CheckResult]:
    """The weights are all there: each file whole, each tensor of the index in its file. Headers are read, weights are not."""
    again = f"download it again (hf download NAME --local-dir {folder}), or set {key} to another folder"
    if not folder.is_dir():
        yield wrong(MODELS, f"there is no folder {folder}", f"make or download the model, or set {key} to its folder", folder=str(folder))
        return
    try:
        index = json.loads((folder / _INDEX).read_text())["weight_map"] if (folder / _INDEX).exists() else None
    except (OSError, ValueError, KeyError) as error:
        yield wrong(MODELS, f"{folder / _INDEX} cannot be read: {error}", again, folder=str(folder))
        return
    files = sorted(set(index.values())) if index is not None else sorted(file.name for file in folder.glob("*.safetensors"))
    faults, tensors, total = [], 0, 0
    for name in files:
        try:
            names = _tensor_names(folder / name)
        except (OSError, SafetensorError) as error:
            faults.append(wrong(MODELS, f"{folder / name}: {_why(folder / name, error)}", again, folder=str(folder), file=name))
            continue
        tensors, total = tensors + len(names), total + (folder / name).stat().st_size
        lacking = sorted(tensor for tensor, file in (index or {}).items() if file == name and tensor not in names)
        if lacking:
            message = f"{folder / name} lacks {len(lacking)} tensors that the index has in it, such as {lacking[0]}"
            faults.append(wrong(MODELS, message, again, folder=str(folder), file=name, lacking=lacking[:10]))
    if not files:
        faults.append(wrong(MODELS, f"{folder} holds no *.safetensors", again, folder=str(folder)))
    yield from faults
    if not faults:
        count = "1 file" if len(files) == 1 else f"{len(files)} files"
        message = f"{folder}: {tensors:,} tensors in {count}, {size(total)}"
        yield good(MODELS, message, folder=str(folder), files=len(files), bytes=total)


def _tensor_names(file: Path) -> set[str]:
    """Raises SafetensorError for a file that is shorter than its header says."""
    with file.open("rb"):  # what the library says of a file that it may not read does not name the reason
        pass
    with safe_open(file, framework="numpy") as opened:
        return set(opened.keys())


def _why(file: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if file.read_bytes()[: len(_LFS)] == _LFS:
        return "is a pointer of Git LFS and not the weights; run `git lfs pull`"
    return f"is cut off or damaged, {file.stat().st_size:,} bytes ({error})"


def tokenizers(subject: ExaminedRun) -> Iterator[CheckResult]:
    if subject.config is None:
        return
    trust = subject.config.model.trust_remote_code
    readers = [role for role in model_roles(subject.config) if role.name == "actor" or not role.reads_policy_tokens]
    for role in readers:
        try:
            tokenizer = load_tokenizer(role.path, trust, role.path_key)
        except ValueError as error:
            remedy = "copy tokenizer.json, tokenizer_config.json and chat_template.jinja of the model into its folder"
            yield wrong(TOKENIZERS, str(error), remedy, folder=role.path)
            continue
        yield judge_tokenizer(role, tokenizer, subject)
        if role.name == "actor":
            yield from data(subject, tokenizer)


def judge_tokenizer(role: ModelRole, tokenizer: PreTrainedTokenizerBase, subject: ExaminedRun) -> CheckResult:
    """Of a tokenizer that loads and has a chat template."""
    facts = {"folder": role.path, "tokens": len(tokenizer), "end_token": tokenizer.eos_token}
    if role.name in subject.architectures and len(tokenizer) > (vocabulary := subject.architectures[role.name].vocab_size):
        message = f"{role.path}: the tokenizer has {len(tokenizer):,} tokens, and the model embeds {vocabulary:,}"
        return doubtful(TOKENIZERS, message, "use the tokenizer that the model was published with, or never write the others", **facts)
    return good(TOKENIZERS, f"{role.path}: {len(tokenizer):,} tokens, ends with {tokenizer.eos_token!r}, has a chat template", **facts)


def data(subject: ExaminedRun, tokenizer: PreTrainedTokenizerBase) -> Iterator[CheckResult]:
    """The first rows of each file, read and rendered as the run does."""
    config = subject.config
    assert config is not None
    vocabulary = subject.architectures["actor"].vocab_size if "actor" in subject.architectures else None
    for file in dict.fromkeys([*config.data.train_files, *config.data.val_files]):
        try:
            rendered = list(islice(_rendered(config, file, tokenizer), _ROWS))
            rows = open_file(file, ()).num_rows
        except DataError as error:
            example = "as in docs/rewards.md" if isinstance(config, PPOConfig) else "each a chat that ends with the assistant's answer"
            yield wrong(DATA, str(error), f"write the file again with the columns that are named, {example}", file=file)
            continue
        yield judge_rows(config, file, rows, rendered, vocabulary)


def _rendered(config: PPOConfig | SFTConfig, file: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence[int]]:
    """Token ids of each row: of the prompt, in SFT of the whole chat."""
    if isinstance(config, PPOConfig):
        for row in prompts.read_prompt_rows([file], config.data.columns):
            yield prompts.read_prompt(row, tokenizer, config.data).token_ids
    else:
        for row in sft.read_chat_rows([file], config.data.columns):
            example = sft.read_example(row, tokenizer, config.data)
            yield [*example.prompt_ids, *example.response_ids]


def judge_rows(
    config: PPOConfig | SFTConfig, file: str, rows: int | None, rendered: Sequence[Sequence[int]], vocabulary: int | None
) -> CheckResult:
    """`rows`: of the file, None where unknown. `rendered`: token ids of the first. `vocabulary`: tokens that the model embeds."""
    key = "data.max_prompt_length" if isinstance(config, PPOConfig) else "data.max_length"
    limit = config.data.max_prompt_length if isinstance(config, PPOConfig) else config.data.max_length
    longest, longer = max(map(len, rendered)), sum(len(ids) > limit for ids in rendered)
    facts = {"file": file, "rows": rows, "rows_read": len(rendered), "longest": longest, "longer": longer}
    highest = max(max(ids) for ids in rendered)
    if vocabulary is not None and highest >= vocabulary:
        message = f"{file}: a row has the token {highest}, and the model embeds {vocabulary:,}"
        return wrong(DATA, message, "use the tokenizer that the model was published with", **facts)
    if longer:
        message = f"{file}: {longer} of the first {len(rendered)} rows have more than {key}={limit} tokens, at most {longest}"
        if config.data.overlong is Overlong.refuse:
            return wrong(DATA, message, f"set {key}={longest} or more, or data.overlong=filter to leave them out", **facts)
        return doubtful(DATA, f"{message}; they will be left out", f"set {key}={longest} to keep them", **facts)
    of_all = "" if rows is None else f"{rows:,} rows; "
    return good(DATA, f"{file}: {of_all}the first {len(rendered)} have at most {longest} tokens", **facts)


def rewards(subject: ExaminedRun) -> Iterator[CheckResult]:
    if isinstance(subject.config, PPOConfig):
        for function in subject.config.reward.functions:
            yield judge_reward(function)


def judge_reward(function: RewardFunctionConfig, limit_s: float = _REWARD_LIMIT_S) -> CheckResult:
    """Loads it in a process of its own: the file is a user's, and may do anything."""
    name = f"{function.name} in {function.path}"
    command = [sys.executable, "-c", _LOAD_REWARD, function.path, function.name]
    remedy = f"mend {function.path}; python {function.path} shows the whole error"
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        slow = f"do nothing slow when {function.path} is imported"
        return wrong(REWARDS, f"{name} is not loaded after {limit_s:g} s", slow, file=function.path)
    if ended.returncode:
        said = (ended.stderr.strip() or "it ended the process").splitlines()[-1]
        return wrong(REWARDS, said.removeprefix("megarl.rewards.functions.RewardFunctionError: "), remedy, file=function.path)
    return good(REWARDS, f"{name} loads and takes the four arguments", file=function.path)
