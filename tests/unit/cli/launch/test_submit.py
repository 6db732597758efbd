"""The files of a job: the code that git tracks, the checked configuration, and portable paths."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from megarl.cli.launch import submit
from megarl.cli.launch.job import missing_packages
from megarl.config.load import load_config, read_config
from megarl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    DType,
    JudgeConfig,
    ModelConfig,
    PolicyLossConfig,
    PPOConfig,
    RewardConfig,
    RewardFunctionConfig,
    SFTConfig,
    TrainerConfig,
)
from megarl.config.schema.keys import PathKind, naming
from megarl.machine.errors import ConfigError
from tests.unit.config.folders import write_yaml


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "rewards").mkdir(parents=True)
    (folder / "outputs").mkdir()
    for name in ("rewards/count.py", "rewards/neighbor.py", "outputs/weights.bin", "notes.txt"):
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("outputs/\n")
    (tmp_path / "elsewhere.py").write_text("elsewhere")

    return folder


def config(*functions: str) -> PPOConfig:
    return PPOConfig(
        model=ModelConfig(path="model"),
        data=DataConfig(train_files=["train.parquet", "/data/more.parquet"]),
        reward=RewardConfig(functions=[RewardFunctionConfig(path=path) for path in functions]),
        trainer=TrainerConfig(output_dir="outputs/run"),
    )


def test_what_git_does_not_ignore_is_taken_and_paths_hold_elsewhere(here: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", here], check=True)
    num_files, _ = submit.pack(
        config("rewards/count.py", str(tmp_path / "elsewhere.py")), job := tmp_path / "job", here
    )
    outside = Path("outside", *tmp_path.resolve().parts[1:], "elsewhere.py")
    names = {str(file.relative_to(job)) for file in job.rglob("*") if file.is_file()}
    of_megarl = {name for name in names if name.startswith("megarl/")}
    assert names - of_megarl == {
        "run.yaml",
        "rewards/count.py",
        "rewards/neighbor.py",
        "notes.txt",
        str(outside),
    }
    assert {"megarl/__main__.py", "megarl/cli/run/train.py"} <= of_megarl
    assert num_files == len(names)
    found = load_config(PPOConfig, str(job / "run.yaml"))
    assert found.model.path == str(here / "model")
    assert found.data.train_files == [str(here / "train.parquet"), "/data/more.parquet"]
    assert found.trainer.output_dir == str(here / "outputs/run")
    assert [function.path for function in found.reward.functions] == [
        str(job / "rewards/count.py"),
        str(job / outside),
    ]
    assert found.checkpoint.resume == "auto"


def test_outside_a_work_tree_only_what_the_configuration_names_is_taken(here: Path, tmp_path: Path) -> None:
    submit.pack(config("rewards/count.py"), job := tmp_path / "job", here)
    names = {str(file.relative_to(job)) for file in job.rglob("*") if file.is_file()}
    assert {name for name in names if not name.startswith("megarl/")} == {"run.yaml", "rewards/count.py"}


def test_functions_of_the_algorithm_go_along_and_names_on_the_hub_stay(here: Path, tmp_path: Path) -> None:
    (here / "data").mkdir()
    given = replace(
        config("rewards/count.py"),
        model=ModelConfig(path="Qwen/Qwen3-8B"),
        data=DataConfig(train_files=["openai/gsm8k", "data/train"]),  # `data` is a folder
        algorithm=AlgorithmConfig(policy_loss=PolicyLossConfig(function="rewards/neighbor.py:loss")),
        agent=AgentConfig(tools=["rewards/tool.py:price", "calculator"]),
    )
    (here / "rewards/tool.py").write_text("")
    submit.pack(given, job := tmp_path / "job", here)
    found = load_config(PPOConfig, str(job / "run.yaml"))
    assert found.model.path == "Qwen/Qwen3-8B"
    assert found.data.train_files == ["openai/gsm8k", str(here / "data/train")]
    assert found.algorithm.policy_loss.function == f"{job / 'rewards/neighbor.py'}:loss"
    assert (job / "rewards/neighbor.py").is_file()
    assert found.agent.tools == [f"{job / 'rewards/tool.py'}:price", "calculator"]


@pytest.mark.parametrize("text", ["costs ${amount}", "ends with ${", "\\${seed}", "${seed}"])
def test_signs_of_references_in_a_text_are_its_own_characters(here: Path, tmp_path: Path, text: str) -> None:
    given = config("rewards/count.py")
    submit.pack(replace(given, data=replace(given.data, system_prompt=text)), job := tmp_path / "job", here)
    assert load_config(PPOConfig, str(job / "run.yaml")).data.system_prompt == text


def test_the_job_finds_what_ships_even_beside_a_folder_of_the_same_name(here: Path, tmp_path: Path) -> None:
    """The project has a `configs` folder of its own, which the job takes along too."""
    subprocess.run(["git", "init", "--quiet", here], check=True)
    (here / "configs").mkdir()
    (here / "configs" / "mine.yaml").write_text("base: configs/quickstart.yaml\n")
    submit.pack(config("rewards/count.py"), job := tmp_path / "job", here)
    assert [file.name for file in (job / "configs").iterdir()] == ["mine.yaml"]
    assert (job / "megarl/configs/algorithm/grpo.yaml").is_file()

    command = [sys.executable, "-m", "megarl", "check", "--fast", "configs/mine.yaml", "algorithm=grpo"]
    checked = subprocess.run(command, cwd=job, env={}, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "REWARD  1 x compute_score in megarl/recipes/quickstart/reward.py" in checked.stdout


def test_a_dtype_that_depends_on_the_device_is_chosen_where_the_job_runs(here: Path, tmp_path: Path) -> None:
    path = write_yaml(
        tmp_path / "run.yaml", {"model": {"path": "model"}, "data": {"train_files": ["train.parquet"]}}
    )
    given = read_config(PPOConfig, path).required()
    submit.pack(given, job := tmp_path / "job", here)
    found = read_config(PPOConfig, str(job / "run.yaml")).required()
    assert (given.model.dtype, found.model.dtype) == (DType.auto, DType.auto)


def test_a_python_without_the_packages_is_named(here: Path, tmp_path: Path) -> None:
    """The job's Python has only the standard library, like a head whose Ray runs in another environment."""
    assert missing_packages() == []
    submit.pack(config(), job := tmp_path / "job", here)
    command = [sys.executable, "-S", "-m", "megarl.cli.launch.job", "train", "run.yaml"]
    ended = subprocess.run(command, cwd=job, env={}, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert f"the cluster runs jobs with {sys.executable}" in ended.stderr
    assert "which lacks torch, " in ended.stderr
    assert "Install megarl there" in ended.stderr


def test_too_much_is_refused_with_what_is_large(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "--quiet", here], check=True)
    monkeypatch.setattr(submit, "LIMIT_MB", 0.1)
    (here / "large.bin").write_bytes(bytes(200_000))

    with pytest.raises(ConfigError, match=r"more than 0.1; .* to .gitignore; the largest are .*large.bin"):
        submit.pack(config(), tmp_path / "job", here)


def test_every_key_of_a_path_is_known() -> None:
    """A new one must be given a place in a job: code that goes along, or a file that all nodes see."""
    words = ("path", "dir", "files", "folder", "file", "function")
    keys = {
        key
        for schema in (PPOConfig, SFTConfig)
        for key in leaves(schema)
        if key.rsplit(".", 1)[-1].rsplit("_", 1)[-1] in words
    }
    # and one that is an argument of SGLang
    without_the_words = {
        "reward.judges.prompt",
        "data.curriculum.sampler",
        "agent.tools",
        "rollout.sglang.server_args.speculative_draft_model_path",
    }
    assert keys | without_the_words == set(_with_places(PPOConfig)) | set(_with_places(SFTConfig))


def _with_places(schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of which the schema says what they name."""
    for entry in fields(schema):
        kind = get_type_hints(schema)[entry.name]
        section = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
        if section is not None:
            yield from _with_places(section, f"{prefix}{entry.name}.")
        if PathKind in entry.metadata:
            yield f"{prefix}{entry.name}"
        yield from (f"{prefix}{entry.name}.{name}" for name in entry.metadata.get(naming, ()))


def test_output_folders_that_look_like_names_on_the_hub_are_on_the_shared_disk(
    here: Path, tmp_path: Path
) -> None:
    given = replace(
        config("rewards/count.py"),
        trainer=TrainerConfig(output_dir="new/run"),
        checkpoint=CheckpointConfig(resume="old/run", dir="new/checkpoints"),
    )
    submit.pack(given, job := tmp_path / "job", here)
    found = load_config(PPOConfig, str(job / "run.yaml"))
    assert found.trainer.output_dir == str(here / "new/run")
    assert found.checkpoint.resume == str(here / "old/run")
    assert found.checkpoint.dir == str(here / "new/checkpoints")


def leaves(section: type, prefix: str = "") -> list[str]:
    hints = get_type_hints(section)
    found = []

    for entry in fields(section):
        key = f"{prefix}{entry.name}"
        hint = hints[entry.name]
        inner = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        found += leaves(inner, f"{key}.") if isinstance(inner, type) else [key]

    return found


def test_keys_of_judges_are_not_sent() -> None:
    judges = [
        JudgeConfig(name=name, url="http://host/v1", model="m", prompt="prompt.jinja", api_key_env=variable)
        for name, variable in (("open", None), ("closed", "SECRET"))
    ]
    run = replace(config(), reward=RewardConfig(judges=judges))
    assert submit.absent_secrets(run) == [
        "reward.judges[1].api_key_env: SECRET; export it on the cluster's nodes before `ray start`"
    ]
    assert submit.absent_secrets(SFTConfig()) == []
