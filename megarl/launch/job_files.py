"""The files of a submitted job: the checked, resolved configuration and the code that checked it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import megarl
from megarl.config.load import contents_of
from megarl.config.paths import is_url
from megarl.config.schema import PPOConfig, RunConfig
from megarl.config.shipped import CONFIGS_DIR
from megarl.config.sources import is_hub_name
from megarl.machine.errors import ConfigError

RUN_FILE = "run.yaml"
LIMIT_MB = 100  # limited because Ray keeps the package in the head's memory
# Keys of files and folders that are not uploaded: they are on a disk that the cluster shares with this
# machine.
SHARED = frozenset(
    {
        "model.path",
        "reference.path",
        "teacher.path",
        "teachers.path",
        "actor.lora.path",
        "critic.lora.path",
        "critic.model.path",
        "reward.model.path",
        "reward.judges.path",
        "rollout.sglang.server_args.speculative_draft_model_path",
        "data.train_files",
        "data.val_files",
        "checkpoint.dir",
        "checkpoint.resume",
        "trainer.output_dir",
    }
)
# Keys of Python files, which are uploaded. Those of FUNCTIONS have the form FILE.py:NAME.
FUNCTIONS = frozenset(
    {"algorithm.advantage.function", "algorithm.policy_loss.function", "data.curriculum.sampler"}
)
CODE = FUNCTIONS | {
    "reward.functions.path",
    "reward.judges.prompt",
    "reward.judges.parse.path",
    "agent.tools.path",
    "agent.environment.path",
    "agent.harness.function.path",
    "agent.harness.sandbox.files",
}
_WORDS = frozenset({"auto", "disable"})  # values of checkpoint.resume that are not paths
_IGNORE_FILES = (".gitignore", ".rayignore")  # already applied; Ray would apply them again


def pack(config: RunConfig, folder: Path, here: Path) -> tuple[int, int]:
    """Fill the job's current directory, the empty `folder`, and return how many files and bytes it gets.

    It receives the files of `here` that git does not ignore, the megarl of this process, and `run.yaml`.
    Outside a git work tree, only the code that the configuration names is taken from `here`.

    Raises:
        ConfigError: The files exceed LIMIT_MB.
    """
    files = {folder / name: here / name for name in _work_tree(here)}
    files |= {folder / "megarl" / name: file for name, file in _own_files()}
    resolved = _moved(contents_of(config), "", here, lambda path: _take_along(path, folder, here, files))
    # Check sizes before anything is copied.
    sizes = {source: source.stat().st_size for source in files.values()}

    if sum(sizes.values()) > LIMIT_MB * 2**20:
        largest = sorted(sizes, key=lambda source: sizes[source], reverse=True)[:3]
        raise ConfigError(
            str(here),
            [
                f"the job's files have {sum(sizes.values()) / 2**20:,.0f} MiB, more than {LIMIT_MB}; add "
                "files that the job does not need to .gitignore; the largest are "
                + ", ".join(f"{source} ({sizes[source] / 2**20:,.0f} MiB)" for source in largest)
            ],
        )

    for target, source in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)

    OmegaConf.save(OmegaConf.create(resolved), folder / RUN_FILE)
    return len(files) + 1, sum(sizes.values())


def absent_secrets(config: RunConfig) -> list[str]:
    """Return a line for each API key that the job needs and does not receive.

    The variables of a job are shown to everyone who can see the cluster's dashboard, so it gets no keys.
    """
    if not isinstance(config, PPOConfig):
        return []
    return [
        f"reward.judges[{index}].api_key_env: {judge.api_key_env}; export it on the cluster's nodes before "
        "`ray start`"
        for index, judge in enumerate(config.reward.judges)
        if judge.api_key_env is not None
    ]


def _own_files() -> Iterator[tuple[Path, Path]]:
    """Yield the files of megarl that a wheel contains.

    Each item is the path in the package, and the file on this machine.
    """
    package = Path(megarl.__file__).parent
    for root, place in ((package, Path()), (CONFIGS_DIR, Path("configs"))):
        for file in root.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                yield place / file.relative_to(root), file


def _work_tree(here: Path) -> list[str]:
    """Return the tracked files in `here`, and new ones that are not ignored."""
    command = [
        "git",
        "-C",
        str(here),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        ".",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    except (FileNotFoundError, subprocess.CalledProcessError):  # git is missing, or this is not a work tree
        return []

    return [
        name
        for name in dict.fromkeys(listed)
        if name and (here / name).is_file() and Path(name).name not in _IGNORE_FILES
    ]


def _moved(value: Any, key: str, here: Path, take_along: Callable[[str], str]) -> Any:
    """Return the plain values of a configuration with paths that are valid in the job."""
    if isinstance(value, Mapping):
        return {
            name: _moved(item, f"{key}.{name}" if key else name, here, take_along)
            for name, item in value.items()
        }

    if isinstance(value, list):
        return [_moved(item, key, here, take_along) for item in value]
    if not isinstance(value, str) or value in _WORDS or is_url(value):
        return value
    # Data and models are not uploaded, and their paths become absolute to be valid on all nodes.
    if key in SHARED:
        return value if _is_on_hub(value, here) else str(here / value)

    # Upload the file of FILE.py:NAME.
    if key in FUNCTIONS:
        path, colon, name = value.rpartition(":")
        return f"{take_along(path)}{colon}{name}"

    return take_along(value) if key in CODE else value


def _is_on_hub(value: str, here: Path) -> bool:
    """Whether a value is a name on the hub.

    `models/Qwen3-8B` has its form, but is a path if there is a folder `models`.
    """
    return is_hub_name(value) and not (here / value.partition("/")[0]).is_dir()


def _take_along(path: str, folder: Path, here: Path, files: dict[Path, Path]) -> str:
    """Add a file, or a folder with its files, to the job.

    Returns the path relative to the job's current directory.
    """
    source = (here / path).resolve()
    # A file outside of the current folder keeps its whole path, in a folder of its own.
    inside = (
        source.relative_to(here.resolve())
        if source.is_relative_to(here.resolve())
        else Path("outside", *source.parts[1:])
    )
    if source.is_dir():
        inner = (file for file in source.rglob("*") if file.is_file() and file.suffix != ".pyc")
        files.update((folder / inside / file.relative_to(source), file) for file in inner)
    else:
        files[folder / inside] = source

    return str(inside)
