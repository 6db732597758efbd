"""`megarl init [FOLDER]`: writes what a run of one's own begins with: a commented configuration, a reward with its test, a data script."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from megarl.config.architecture import Architecture, read_architecture
from megarl.config.load import load_config
from megarl.config.schema import Device, PPOConfig, RunKind
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import is_hub_name
from megarl.data.files import DataError, open_file
from megarl.machine.files import write_whole

GOOD = 0
CONFIG_FILE, REWARD_FILE, DATA_SCRIPT = "run.yaml", "reward.py", "make_data.py"
_MADE = ("train.jsonl", "validation.jsonl")  # by the script
_STARTER = Path(__file__).resolve().parents[1] / "recipes" / "starter"
_QUESTIONS = ("question", "prompt", "problem", "instruction", "input", "query")
_ANSWERS = ("answer", "ground_truth", "solution", "output", "response", "target", "completion")
_WHOLE = {RunKind.ppo: ("prompt", "data_source", "reward_model"), RunKind.sft: ("messages",)}  # columns that need no others' names
_MOST_TOKENS = 512  # of a prompt, and of a response, where the model has positions for more
_PROMPTS, _SAMPLES = 16, 8  # of a step; of a prompt


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a run is to be. model: a Hugging Face folder, or a name on the hub. data: a file of questions and answers, None: made ones.
    algorithm: a preset, for reinforcement learning. num_devices: GPUs, or processes on a CPU, which all models share."""

    folder: Path
    model: str
    data: str | None
    kind: RunKind
    algorithm: str
    device: Device
    num_devices: int


class _Data(NamedTuple):
    """columns: the line of the configuration that names them, may be empty. num_rows: those that there are, as far as a step needs them."""

    columns: str
    num_rows: int


def run(wishes: Wishes) -> int:
    """Writes the files and says what to type next; 0. Raises ConfigError for a model that cannot be trained or a preset that there is not,
    DataError for a data file that cannot be read, ValueError for one without known columns, and where a file is there already."""
    model = read_architecture(_folder_of(wishes.model))
    made = _Data(_columns(wishes.kind, "question", "answer"), _PROMPTS)
    files = {CONFIG_FILE: _config(wishes, model, made if wishes.data is None else _look_at(wishes.data, wishes.kind))}
    if wishes.kind is RunKind.ppo:
        files[REWARD_FILE] = (_STARTER / REWARD_FILE).read_text(encoding="utf-8")
    if wishes.data is None:
        files[DATA_SCRIPT] = (_STARTER / DATA_SCRIPT).read_text(encoding="utf-8")
    if there := [name for name in (*files, *_MADE) if (wishes.folder / name).exists()]:
        raise ValueError(f"{wishes.folder} has {', '.join(there)} already, and nothing is written over: give another folder")
    wishes.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(wishes.folder / name, text)
    if wishes.data is None:
        subprocess.run([sys.executable, str(wishes.folder / DATA_SCRIPT)], check=True, stdout=subprocess.DEVNULL)
    print(f"{wishes.folder}: wrote {', '.join(files)}" + (f"; by {DATA_SCRIPT}: {', '.join(_MADE)}" if wishes.data is None else ""))
    print("next:")
    if wishes.kind is RunKind.ppo:
        print(f"  python {wishes.folder / REWARD_FILE}    # the reward's own test")
    print(f"  megarl check {wishes.folder / CONFIG_FILE}\n  megarl train {wishes.folder / CONFIG_FILE}")
    return GOOD


def _folder_of(model: str) -> str:
    """Of a name on a hub, without its weights."""
    if not is_hub_name(model):
        return model
    from megarl.data.hub import model_folder  # whose library takes half a second

    return str(model_folder(model, "--model", fetch=False))


def _look_at(path: str, kind: RunKind) -> _Data:
    opened = open_file(path, (*_QUESTIONS, *_ANSWERS))
    num_rows = sum(1 for _ in islice(opened.rows, _PROMPTS))
    if num_rows == 0:
        raise DataError(f"{path}: the file has no rows")
    if set(_WHOLE[kind]) <= set(opened.columns):
        return _Data("", num_rows)
    question, answer = (next((name for name in known if name in opened.columns), None) for known in (_QUESTIONS, _ANSWERS))
    if question is None or answer is None:
        raise ValueError(
            f"{path} has the columns {', '.join(opened.columns)}: a question is looked for in {', '.join(_QUESTIONS)}, its answer in "
            f"{', '.join(_ANSWERS)}; leave --data out, and name file and columns in the configuration (data.train_files, data.columns)"
        )
    return _Data(_columns(kind, question, answer), num_rows)


def _columns(kind: RunKind, question: str, answer: str) -> str:
    if kind is RunKind.sft:
        return f"  columns: {{prompt: {question}, answer: {answer}}}\n"
    return f"  columns: {{prompt: {question}, ground_truth: {answer}, data_source: null}} # null: the name of the file\n"


def _config(wishes: Wishes, model: Architecture, data: _Data) -> str:
    tokens = min(_MOST_TOKENS, model.max_position_embeddings // 2)
    has_own = wishes.data is not None
    template = (_STARTER / f"{wishes.kind.value}.yaml").read_text(encoding="utf-8")
    return template.format(
        algorithm=wishes.algorithm,
        algorithms="or " + ", ".join(sorted(file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml"))),
        model=_from(wishes.folder, wishes.model),
        train=_from(wishes.folder, wishes.data) if wishes.data is not None else _MADE[0],
        validation="[]" if has_own else f"[{_MADE[1]}]",
        columns=data.columns,
        tokens=tokens,
        row_tokens=2 * tokens,
        batch_tokens=max(8 * tokens, 2048),
        devices=wishes.num_devices,
        device=wishes.device.value,
        engine="sglang" if wishes.device is Device.cuda else "hf",
        samples=_SAMPLES,
        rows=max(data.num_rows, wishes.num_devices),
        every=0 if has_own else 10,
        before=str(not has_own).lower(),
        output=wishes.folder / "run",
        critic=_critic(wishes),
    )


def _critic(wishes: Wishes) -> str:
    """Its section, where the algorithm has one."""
    if wishes.kind is RunKind.sft:
        return ""
    algorithm = load_config(PPOConfig, str(CONFIGS_DIR / "quickstart.yaml"), [f"algorithm={wishes.algorithm}"]).algorithm
    needs = algorithm.advantage.estimator.needs.critic
    return f"\ncritic:\n  parallel:\n    data_parallel_size: {wishes.num_devices}\n" if needs else ""


def _from(folder: Path, path: str) -> str:
    """As the configuration names it: relative to its folder, where it was given so; a name on a hub as it is."""
    return path if os.path.isabs(path) or is_hub_name(path) else os.path.relpath(path, folder)


def ask(question: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
    """On the terminal, until there is an answer that can be taken."""
    choice = f" ({', '.join(choices)})" if choices else ""
    shown = f"{question}{choice}{'' if default is None else f' [{default}]'}: "
    while True:
        answer = input(shown).strip() or default
        if answer is not None and (not choices or answer in choices):
            return answer
