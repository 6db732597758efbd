"""Warnings of `megarl check` about tokenizers, chat templates and rows that can be used."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.finding import Status
from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import AgentConfig, DataConfig, EnvironmentConfig, PPOConfig
from megarl.doctor import agents_and_judges, texts
from tests.unit.config.folders import ppo_values, write_yaml
from tests.unit.data.chats import character_tokenizer, prompt_row, write


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    return load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path)))


def test_a_template_that_closes_answers_with_no_end_token(config: PPOConfig) -> None:
    """Folders of base models have such a template: it is a chat model's.

    A policy that learns to generate its closing token does not stop.
    """
    actor = next(role for role in model_roles(config) if role.name == "actor")
    base = character_tokenizer(eos_token="<|pad|>")
    found = texts.judge_tokenizer(actor, base)
    assert found.status is Status.warning
    end = base.convert_tokens_to_ids("<|end|>")
    assert (
        f"closes an answer with '<|end|>' ({end}), which does not end a sample: the tokenizer's end token is "
        f"'<|pad|>'" in found.message
    )
    assert "until data.max_response_length" in found.message
    assert texts.judge_tokenizer(actor, character_tokenizer()).status is Status.ok
    (Path(actor.path) / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [end, base.eos_token_id]})
    )
    assert texts.endless_turns(actor.path, base) is None
    assert texts.judge_tokenizer(actor, base).status is Status.ok


def test_rows_that_spell_special_tokens_are_said(config: PPOConfig, tmp_path: Path) -> None:
    good, evil = (
        write(tmp_path / f"{name}.parquet", [prompt_row("a"), prompt_row(text)])
        for name, text in (("a", "b"), ("b", "c<|end|>"))
    )
    tokenizer = character_tokenizer(vocabulary_extra="<|>")
    results = texts.data(replace(config, data=DataConfig(train_files=[good, evil])), tokenizer, [], 8)
    assert [(result.status, Path(str(result.facts["file"])).name) for result in results[:3]] == [
        (Status.ok, "a.parquet"),
        (Status.ok, "b.parquet"),
        (Status.warning, "b.parquet"),
    ]
    assert "1 of 2 rows contain special tokens such as '<|end|>'" in results[2].message


def test_a_validation_file_that_is_trained_is_a_warning(config: PPOConfig, tmp_path: Path) -> None:
    trained = write(tmp_path / "trained.parquet", [prompt_row("a")])
    held_out = write(tmp_path / "held_out.parquet", [prompt_row("b")])
    link = tmp_path / "link.parquet"
    link.symlink_to(trained)
    around = os.path.relpath(trained)

    data = DataConfig(train_files=[str(trained)], val_files=[str(held_out), str(link), around])
    results = list(texts.judge_held_out(replace(config, data=data)))
    assert [result.status for result in results] == [Status.warning] * 2
    assert f"{link} is also in data.train_files, as {trained}" in results[0].message
    assert f"{around} is also in data.train_files, as {trained}" in results[1].message


GAME = """
from megarl.agents.protocol import Reply


class Game:
    async def start(self, task):
        self.right, self.prices = task.ground_truth, task.extra_info.get("prices")
        assert task.messages[-1]["content"] == "a"
        {start}

    async def respond(self, turn):
        {respond}
        return Reply(messages=[{{"role": "user", "content": "no"}}], reward=float(turn.text == self.right))

    async def close(self):
        {close}
"""


@pytest.mark.parametrize(
    ("place", "line", "said"),
    [
        (
            "start",
            "self.right = task.answer",
            "seed, memory, ground_truth, sandbox_image; a column of your own belongs in extra_info (game.py:9), with",
        ),
        ("start", "task.extra_info['shop']", "Game.start: KeyError: 'shop' (game.py:9), with"),
        (
            "respond",
            "int(turn.text)",
            "in turn 1: ValueError: invalid literal for int() with base 10: 'I do not know.' (game.py:12), "
            "with",
        ),
        ("respond", "while True: pass", "timed out after 2 s in a first turn, with"),
    ],
    ids=["attribute", "column", "answer", "no end"],
)
def test_an_environment_is_tried_on_the_first_row(place: str, line: str, said: str, tmp_path: Path) -> None:
    data = DataConfig(train_files=[write(tmp_path / "rows.parquet", [prompt_row("a"), prompt_row("b")])])
    agent = AgentConfig(environment=EnvironmentConfig(path=f"{tmp_path / 'game.py'}:Game"))
    config = PPOConfig(data=data, agent=agent)
    (tmp_path / "game.py").write_text(
        GAME.format(**dict.fromkeys(("start", "respond", "close"), "pass") | {place: line})
    )
    found, tools = agents_and_judges.judge_agent(
        config, character_tokenizer(), limit_s=2.0 if "while" in line else 30.0
    )
    assert (found.check, found.status, tools) == (agents_and_judges.AGENT, Status.error, None)
    assert said in found.message
    assert found.message.endswith(
        f", with the first row of {tmp_path / 'rows.parquet'} and the answer 'I do not know.'"
    )
    assert "megarl generate --environment" in (found.hint or "")


def test_an_environment_that_answers_is_good_and_without_data_it_is_only_loaded(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.parquet", [prompt_row("a")])
    (tmp_path / "game.py").write_text(GAME.format(start="pass", respond="pass", close="pass"))
    agent = AgentConfig(environment=EnvironmentConfig(path=f"{tmp_path / 'game.py'}:Game"))

    for file, does in (
        (rows, f"answers a first turn about the first row of {rows}"),
        (str(tmp_path / "absent.parquet"), "can be used"),
    ):
        found, tools = agents_and_judges.judge_agent(
            PPOConfig(data=DataConfig(train_files=[file]), agent=agent), character_tokenizer()
        )
        assert (found.status, tools) == (Status.ok, None), found.message
        assert (
            f"the environment Game of {tmp_path / 'game.py'} {does}, and the chat template supports"
            in found.message
        )
