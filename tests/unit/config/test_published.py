"""The `config.json` of published models is used in checks if a model is not here, but never in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.shipped import with_published_models
from megarl.doctor.checks import load_for_plan, load_for_run
from megarl.machine.errors import ConfigError
from megarl.models.families import read_architecture
from tests.unit.config.folders import ARCHITECTURE, model_folder, ppo_values, write_yaml


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A good run in a folder with two published models, of which it uses none."""
    monkeypatch.chdir(tmp_path)
    for name, hidden_size in (("Tiny", 96), ("maker/tuned", 192)):
        folder = tmp_path / "configs" / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(ARCHITECTURE | {"hidden_size": hidden_size}))

    return write_yaml(tmp_path / "configs" / "run.yaml", ppo_values(tmp_path))


def test_a_model_that_is_here_is_read_itself(run: str, tmp_path: Path) -> None:
    model_folder(tmp_path / "models" / "Tiny")
    loaded = load_for_plan(PPOConfig, run, ["model.path=models/Tiny"])
    assert loaded.config.model.path == "models/Tiny"
    assert loaded.absent == ()


@pytest.mark.parametrize(
    ("path", "hidden_size"),
    [("models/Tiny", 96), ("/on/the/cluster/Tiny", 96), ("Tiny", 96), ("outputs/maker/tuned", 192)],
)
def test_one_that_is_not_is_found_by_the_end_of_its_path(path: str, hidden_size: int, run: str) -> None:
    loaded = load_for_plan(PPOConfig, run, [f"model.path={path}", "data.train_files=[far/away.parquet]"])
    config = loaded.config
    assert read_architecture(config.model.path).hidden_size == hidden_size
    about_model, about_data = loaded.absent
    assert (
        about_model == f"model.path: there is no folder {str(path)!r}; using {config.model.path}/config.json"
    )
    assert about_data.startswith("data.train_files: there is no file 'far/away.parquet'")


def test_each_role_has_its_own(run: str, tmp_path: Path) -> None:
    """The reference and the critic have the policy's where they name none."""
    given = load_config(PPOConfig, run, ["critic.model.path=models/Tiny", "reference.path=there/maker/tuned"])
    config, absent = with_published_models(given, run)
    paths = config.model.path, config.critic.model.path, config.reference.path
    folder = tmp_path / "configs" / "models"
    assert paths == (given.model.path, str(folder / "Tiny"), str(folder / "maker" / "tuned"))
    assert [line.partition(":")[0] for line in absent] == ["reference.path", "critic.model.path"]


def test_the_model_of_a_judge_is_found_too(run: str, tmp_path: Path) -> None:
    (tmp_path / "judge.jinja").write_text("{{ solution }}")
    judge = "{name: good, path: models/Tiny, prompt: judge.jinja, parse: {regex: '(.)'}}"
    given = load_config(PPOConfig, run, [f"reward.judges=[{judge}]"])
    config, (line,) = with_published_models(given, run)
    assert config.reward.judges[0].path == str(tmp_path / "configs" / "models" / "Tiny")
    assert line.startswith("reward.judges[0].path: there is no folder 'models/Tiny'")


@pytest.mark.parametrize("path", ["models/tiny", "models/tuned", "models/maker", "Tiny/x"])
def test_a_name_that_is_none_of_theirs_is_refused(
    path: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might be one of a hub's, of which none is asked here."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=f"'{path}' does not exist locally, and the hub does not provide it"
    ):
        load_for_plan(PPOConfig, run, [f"model.path={path}"])


def test_data_may_be_elsewhere_where_the_model_is_here(run: str) -> None:
    """A run that starts on this machine needs both."""
    (line,) = load_for_plan(PPOConfig, run, ["data.train_files=[far/away.parquet]"]).absent
    assert line.startswith("data.train_files: there is no file 'far/away.parquet'")
    with pytest.raises(ConfigError, match="there is no file 'far/away.parquet'"):
        load_for_run(PPOConfig, run, ["data.train_files=[far/away.parquet]"], reads_inputs=False)


def test_everything_else_is_checked_as_ever(run: str) -> None:
    with pytest.raises(ConfigError, match="data.train_files: is empty"):
        load_for_plan(PPOConfig, run, ["model.path=models/Tiny", "data.train_files=[]"])
    with pytest.raises(
        ConfigError, match="num_key_value_heads 2 of .*Tiny does not divide by tensor_parallel_size 4"
    ):
        load_for_plan(PPOConfig, run, ["model.path=models/Tiny", "actor.parallel.tensor_parallel_size=4"])


def test_a_run_wants_the_model(run: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder 'models/Tiny'"):
        load_for_run(PPOConfig, run, ["model.path=./models/Tiny"], reads_inputs=False)
