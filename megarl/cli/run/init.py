"""`megarl init [FOLDER]`: writes the first files of a run: a commented configuration with the schema by which
an editor completes it, a reward with its test, a data script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.cli.run.starter_data import TRAIN_FILE, VALIDATION_FILE, UserData, read_user_data
from megarl.cli.run.starter_reward import NUMBER, STARTER, ChosenReward, choose_reward
from megarl.config.json_schema import json_schema
from megarl.config.load import load_config
from megarl.config.schema import DataConfig, Device, PPOConfig, PromptColumnsConfig, RunKind
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import is_hub_name
from megarl.machine.files import write_whole
from megarl.models.architecture import Architecture
from megarl.models.families import read_architecture

GOOD = 0
CONFIG_FILE = "run.yaml"
REWARD_FILE = "reward.py"
DATA_SCRIPT = "make_data.py"
SCHEMA_FILE = "megarl.schema.json"  # which the first line of the configuration names
_MADE = (TRAIN_FILE, VALIDATION_FILE)  # by the script, or split from the user's data
_MOST_TOKENS = 512  # of a prompt, and of a response, where the model has positions for more
# of a step; of a prompt
_PROMPTS = 16
_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a run is to be.

    Attributes:
        model: A Hugging Face folder, or a name on the hub.
        data: A file of questions and answers; None: made ones.
        validation: A file of held-out ones; None: some of `data` are held out.
        algorithm: A preset, for reinforcement learning.
        num_devices: GPUs, or processes on a CPU, which all models share.
    """

    folder: Path
    model: str
    data: str | None
    validation: str | None
    kind: RunKind
    algorithm: str
    device: Device
    num_devices: int


def run(wishes: Wishes) -> int:
    """Write the files, and print what to type next.

    Raises:
        ConfigError: The model cannot be trained, or there is no such preset.
        DataError: A data file cannot be read.
        ValueError: A data file has no known columns, or a file is there already.
    """
    if wishes.validation is not None and wishes.data is None:
        raise ValueError("--val names held-out rows of your own data; give those with --data too")
    model = read_architecture(_folder_of(wishes.model))
    data = None if wishes.data is None else read_user_data(wishes.data, wishes.kind, wishes.validation)
    _refuse_existing(wishes)

    # The reward is tried on the data before anything is written.
    reward = _reward(data, wishes.validation) if wishes.kind is RunKind.ppo else None
    files = {CONFIG_FILE: _config(wishes, model, data, reward)}
    files[SCHEMA_FILE] = json.dumps(json_schema(wishes.kind.value)) + "\n"
    files |= {} if reward is None else {REWARD_FILE: reward.source}
    files |= (
        {DATA_SCRIPT: (STARTER / DATA_SCRIPT).read_text(encoding="utf-8")} if data is None else data.split
    )
    wishes.folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_whole(wishes.folder / name, text)

    # The data script creates the files that the configuration names.
    if data is None:
        subprocess.run(
            [sys.executable, str(wishes.folder / DATA_SCRIPT)], check=True, stdout=subprocess.DEVNULL
        )

    print(
        f"{wishes.folder}: wrote {', '.join(files)}"
        + (f"; by {DATA_SCRIPT}: {', '.join(_MADE)}" if data is None else "")
    )
    for line in _remarks(wishes, data, reward):
        print(line)
    print("next:")
    if reward is not None:
        print(f"  python {wishes.folder / REWARD_FILE}    # the reward's own test")
    print(f"  megarl check {wishes.folder / CONFIG_FILE}\n  megarl train {wishes.folder / CONFIG_FILE}")

    return GOOD


def _refuse_existing(wishes: Wishes) -> None:
    script = [DATA_SCRIPT] if wishes.data is None else []
    names = [
        CONFIG_FILE,
        SCHEMA_FILE,
        *([REWARD_FILE] if wishes.kind is RunKind.ppo else []),
        *script,
        *_MADE,
    ]

    if there := [name for name in names if (wishes.folder / name).exists()]:
        raise ValueError(
            f"{wishes.folder} has {', '.join(there)} already, and nothing is written over: give another "
            f"folder"
        )


def _reward(data: UserData | None, validation: str | None) -> ChosenReward:
    # Without data of the user the answers are those of sums.
    if data is None:
        return ChosenReward(NUMBER.source(), NUMBER.prompt, [])
    columns: dict[str, Any] = dict(data.columns_here)
    val_files = [] if validation is None else [validation]

    return choose_reward(
        DataConfig(train_files=[data.path], val_files=val_files, columns=PromptColumnsConfig(**columns))
    )


def _remarks(wishes: Wishes, data: UserData | None, reward: ChosenReward | None) -> Iterator[str]:
    if reward is not None:
        yield from reward.lines
    if data is not None:
        yield f"validation: {wishes.validation or data.about_validation}"


def _folder_of(model: str) -> str:
    """Return the folder of a model; if the model is a name on a hub, without its weights."""
    if not is_hub_name(model):
        return model
    from megarl.data.hub import model_folder  # whose library takes half a second

    return str(model_folder(model, "--model", fetch=False))


def _config(wishes: Wishes, model: Architecture, data: UserData | None, reward: ChosenReward | None) -> str:
    # Prompt and response get half of the context each.
    tokens = min(_MOST_TOKENS, model.max_position_embeddings // 2)
    template = (STARTER / f"{wishes.kind.value}.yaml").read_text(encoding="utf-8")
    train, validation, columns = _data_values(wishes, data)

    return template.format(
        algorithm=wishes.algorithm,
        algorithms="or "
        + ", ".join(sorted(file.stem for file in (CONFIGS_DIR / "algorithm").glob("*.yaml"))),
        model=_from(wishes.folder, wishes.model),
        train=train,
        validation=f"[{validation or ''}]",
        columns=columns,
        system_prompt=json.dumps(reward.prompt) if reward is not None else "",
        tokens=tokens,
        row_tokens=2 * tokens,
        batch_tokens=max(8 * tokens, 2048),
        devices=wishes.num_devices,
        device=wishes.device.value,
        engine="sglang" if wishes.device is Device.cuda else "hf",
        samples=_SAMPLES,
        rows=max(min(_PROMPTS, _PROMPTS if data is None else data.num_rows), wishes.num_devices),
        every=10 if validation else 0,
        before=str(bool(validation)).lower(),
        output=wishes.folder / "run",
        critic=_critic(wishes),
    )


def _data_values(wishes: Wishes, data: UserData | None) -> tuple[str, str | None, str]:
    """Return the training file, the validation file and the line of `data.columns`, which may be empty."""
    if data is None:
        is_rl = wishes.kind is RunKind.ppo
        made = (
            {"prompt": "question", "ground_truth": "answer", "data_source": None}
            if is_rl
            else {"prompt": "question", "answer": "answer"}
        )
        return TRAIN_FILE, VALIDATION_FILE, _columns(made)

    train = TRAIN_FILE if data.split else _from(wishes.folder, data.path)
    validation = VALIDATION_FILE if data.split else None
    if wishes.validation is not None:
        validation = _from(wishes.folder, wishes.validation)

    return train, validation, _columns(data.columns)


def _columns(columns: Mapping[str, str | None]) -> str:
    if not columns:
        return ""
    values = ", ".join(f"{key}: {'null' if name is None else name}" for key, name in columns.items())
    return f"  columns: {{{values}}}{' # null: the name of the file' if None in columns.values() else ''}\n"


def _critic(wishes: Wishes) -> str:
    """Its section, where the algorithm has one."""
    if wishes.kind is RunKind.sft:
        return ""
    # The preset decides whether there is a critic; any valid configuration can load it.
    algorithm = load_config(
        PPOConfig, str(CONFIGS_DIR / "quickstart.yaml"), [f"algorithm={wishes.algorithm}"]
    ).algorithm
    needs = algorithm.advantage.estimator.needs.critic

    return f"\ncritic:\n  parallel:\n    data_parallel_size: {wishes.num_devices}\n" if needs else ""


def _from(folder: Path, path: str) -> str:
    """As the configuration names it: relative to its folder, where it was given so; a name on a hub as it
    is."""
    return path if os.path.isabs(path) or is_hub_name(path) else os.path.relpath(path, folder)


def ask(question: str, default: str | None, choices: tuple[str, ...] = ()) -> str:
    """On the terminal, until there is an answer that can be taken."""
    choice = f" ({', '.join(choices)})" if choices else ""
    shown = f"{question}{choice}{'' if default is None else f' [{default}]'}: "

    while True:
        answer = input(shown).strip() or default
        if answer is not None and (not choices or answer in choices):
            return answer
