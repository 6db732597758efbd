"""Rules for judges: each fault has one violation with a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.roles import judge_roles
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from megarl.doctor.checks import load_for_plan
from megarl.rewards.role import score_weights
from tests.unit.config.folders import model_folder, ppo_values, write_yaml


def config_of(folder: Path, judges: list[dict[str, Any]], functions: bool = True) -> PPOConfig:
    values = ppo_values(folder)
    (folder / "judge.jinja").touch()
    if not functions:
        del values["reward"]["functions"]
    values["reward"]["judges"] = judges
    return load_config(PPOConfig, write_yaml(folder / "run.yaml", values))


def judge(**changes: Any) -> dict[str, Any]:
    good = {
        "name": "quality",
        "url": "http://localhost:30000/v1",
        "model": "m",
        "prompt": "judge.jinja",
        "parse": {"regex": "Score: ([0-9.]+)"},
        "weight": 0.5,
    }
    return good | changes


def test_good_judges_have_none(tmp_path: Path) -> None:
    judges = [
        judge(),
        judge(name="second", parse={"json": "score"}, url="https://api.example.com/v1/", api_key_env="A_KEY"),
        judge(
            name="third", parse={"path": "reward.py"}, request={"reasoning_effort": "low", "max_tokens": None}
        ),
    ]
    config = config_of(tmp_path, judges, functions=False)
    assert list(validate(config)) == []
    assert score_weights(config.reward) == [0.5, 0.5, 0.5]
    # Paths are relative to the file of the configuration.
    assert config.reward.judges[0].prompt == str(tmp_path / "judge.jinja")
    assert config.reward.judges[2].parse.path == str(tmp_path / "reward.py")


def test_files_must_exist(tmp_path: Path) -> None:
    config_of(tmp_path, [judge(prompt="no.jinja", parse={"path": "no.py"})])
    absent = list(map(str, load_for_plan(PPOConfig, str(tmp_path / "run.yaml")).absent))
    assert [line.partition(": there is no file")[0] for line in absent] == [
        "reward.judges[0].prompt",
        "reward.judges[0].parse.path",
    ]


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"url": None}, "url", "neither is given; give the base URL"),
        ({"model": None}, "model", "is missing; give the name of the model on the server"),
        ({"num_replicas": 2}, "num_replicas", "has no effect with reward.judges[0].path=null"),
        ({"name": "a/b"}, "name", "is 'a/b', but is part of metrics"),
        (
            {"url": "localhost:30000"},
            "url",
            "'localhost:30000' is not an http or https URL; give the base URL",
        ),
        ({"url": "http://me:key@host/v1"}, "url", "has a user name, a query or a fragment"),
        ({"url": "http://host/v1/chat/completions"}, "url", "ends with /chat/completions"),
        ({"api_key_env": "sk-12 34"}, "api_key_env", "is not the name of an environment variable"),
        ({"request": {"n": 2, "top_k": 1}}, "request", "has n, which megarl sets"),
        (
            {"request": {"temperature": 3}},
            "request",
            "has temperature=3, which must be a number of at least 0",
        ),
        ({"request": {"seed": 0.5}}, "request", "has seed=0.5, which must be an integer"),
        ({"request": {"max_tokens": "9"}}, "request", "has max_tokens='9', which must be an integer"),
        ({"parse": {}}, "parse", "has neither regex, json nor path, but needs exactly one"),
        ({"parse": {"regex": "(a)", "json": "b"}}, "parse", "has regex and json, but needs exactly one"),
        ({"parse": {"regex": "(a"}}, "parse.regex", "is no regular expression: missing )"),
        (
            {"parse": {"regex": "(a)|(b)"}},
            "parse.regex",
            "has 2 groups, but its only group must be the score",
        ),
    ],
)
def test_each_fault_is_named(tmp_path: Path, changes: dict[str, Any], key: str, said: str) -> None:
    (found,) = validate(config_of(tmp_path, [judge(**changes)]))
    assert found.keys[0] == f"reward.judges[0].{key}"
    assert said in found.message
    assert "sk-12" not in str(found)
    assert "me:key" not in str(found)


def test_a_judge_that_the_run_serves_has_a_folder_and_no_server(tmp_path: Path) -> None:
    model = str(model_folder(tmp_path / "judged"))

    def checked(name: str, **changes: Any) -> PPOConfig:
        served = judge(url=None, model=None, path=model, num_replicas=2)
        (tmp_path / name).mkdir()
        return config_of(tmp_path / name, [{**served, **changes}])

    good = checked("good")
    assert list(validate(good)) == []
    assert judge_roles(good)["judge_quality"].path == model
    both = list(validate(checked("both", url="http://host/v1", api_key_env="KEY")))
    assert [found.keys[0] for found in both] == ["reward.judges[0].url", "reward.judges[0].api_key_env"]
    (absent,) = validate(checked("absent", path="nowhere"))
    assert absent.keys == ("reward.judges[0].path",)

    # Models that return a score have no replies.
    for name, called in (
        ("Qwen2ForSequenceClassification", "a reward model"),
        ("Qwen2ForTokenClassification", "a critic"),
    ):
        config = Path(model) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [name]}))
        (scoring,) = validate(checked(name))
        assert scoring.keys == ("reward.judges[0].path",)
        assert scoring.message.startswith(
            f"{model!r} is {called} ({name}), which returns a score instead of "
        )
        assert scoring.message.endswith("or use this one as reward.model.path")


def test_names_are_unique(tmp_path: Path) -> None:
    (found,) = validate(config_of(tmp_path, [judge(), judge()]))
    assert str(found) == "reward.judges[1].name: is 'quality', the name of reward.judges[0]; use another"
