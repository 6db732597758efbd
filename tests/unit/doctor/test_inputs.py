"""What `megarl check` says of tokenizers, chat templates and rows that can be used, though perhaps not as they are meant."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.roles import model_roles
from megarl.config.schema import DataConfig, PPOConfig
from megarl.doctor import inputs
from megarl.doctor.check_result import Status
from tests.unit.config.folders import ppo_values, write_yaml
from tests.unit.data.chats import character_tokenizer, prompt_row, write


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    return load_config(PPOConfig, write_yaml(tmp_path / "run.yaml", ppo_values(tmp_path)))


def test_a_template_that_closes_answers_with_no_end_token(config: PPOConfig) -> None:
    """As in folders of base models, whose template is a chat model's: a policy that learns to write it does not stop."""
    actor = next(role for role in model_roles(config) if role.name == "actor")
    base = character_tokenizer(eos_token="<|pad|>")
    found = inputs.judge_tokenizer(actor, base)
    assert found.status is Status.warning
    end = base.convert_tokens_to_ids("<|end|>")
    assert f"closes an answer with '<|end|>' ({end}), which ends no sample: the tokenizer ends with '<|pad|>'" in found.message
    assert "goes on to data.max_response_length" in found.message
    assert inputs.judge_tokenizer(actor, character_tokenizer()).status is Status.ok
    (Path(actor.path) / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, base.eos_token_id]}))
    assert inputs.endless_turns(actor.path, base) is None
    assert inputs.judge_tokenizer(actor, base).status is Status.ok


def test_rows_that_spell_special_tokens_are_said(config: PPOConfig, tmp_path: Path) -> None:
    good, evil = (
        write(tmp_path / f"{name}.parquet", [prompt_row("a"), prompt_row(text)]) for name, text in (("a", "b"), ("b", "c<|end|>"))
    )
    tokenizer = character_tokenizer(vocabulary_extra="<|>")
    results = inputs.data(replace(config, data=DataConfig(train_files=[good, evil])), tokenizer, [], 8)
    assert [(result.status, Path(str(result.facts["file"])).name) for result in results[:3]] == [
        (Status.ok, "a.parquet"),
        (Status.ok, "b.parquet"),
        (Status.warning, "b.parquet"),
    ]
    assert "1 of 2 rows spell special tokens such as '<|end|>'" in results[2].message
