"""Rules for a reward model's folder and settings: each fault has one violation with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.batch_arithmetic import work_of_roles
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import read_architectures, validate
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

CLASS = {
    "architectures": ["LlamaForSequenceClassification"],
    "id2label": {"0": "LABEL_0"},
    "model_type": "llama",
}


@pytest.fixture
def ppo(tmp_path: Path) -> str:
    """Rows of the policy have at most 24 tokens, the critic has 2 devices, the reward model 48 positions."""
    values = ppo_values(tmp_path)
    folder = model_folder(tmp_path / "judge", **CLASS, max_position_embeddings=48)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    values["reward"]["model"] = {"path": str(folder), "micro_batch": {"max_tokens": 40}}
    return write_yaml(tmp_path / "run.yaml", values)


def load(path: str, *overrides: str) -> PPOConfig:
    return load_config(PPOConfig, path, list(overrides))


def violations(path: str, *overrides: str) -> list[str]:
    return [str(violation) for violation in validate(load(path, *overrides))]


def judge(path: str) -> Path:
    return Path(path).parent / "judge"


def edit(path: str, **changes: object) -> None:
    file = judge(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_good_settings_have_none(ppo: str) -> None:
    assert violations(ppo) == []
    assert violations(ppo, "reward.functions=[]", "reward.model.weight=-0.5") == []
    assert (
        violations(
            ppo, "reward.model.parallel.tensor_parallel_size=2", "reward.model.parallel.data_parallel_size=4"
        )
        == []
    )
    assert violations(ppo, "reward.model.max_length=20", "reward.model.overlong=truncate") == []
    edit(ppo, id2label=None, num_labels=1)
    assert violations(ppo) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.model.parallel.pipeline_parallel_size=3"],
            "does not divide by pipeline_parallel_size 3",
        ),
        (
            ["reward.model.parallel.virtual_pipeline_parallel_size=2"],
            "reward.model.parallel.virtual_pipeline_parallel_size",
        ),
        (
            ["reward.model.micro_batch.sequences=2"],
            "reward.model.micro_batch.sequences, reward.model.micro_batch.max_tokens: exactly one",
        ),
        (
            ["reward.model.path=null"],
            "reward.model.micro_batch.max_tokens, reward.model.path: is 40, but has no effect with reward.model.path=null",
        ),
        (
            ["reward.model.path=nowhere"],
            "reward.model.path: nowhere/config.json: there is no folder 'nowhere'",
        ),
        (["reward.model.weight=.inf"], "reward.model.weight: is inf, but must be a finite number"),
        (["reward.model.max_length=0"], "reward.model.max_length: is 0, but must be at least 1"),
        (
            ["reward.model.max_length=64", "reward.model.micro_batch.max_tokens=64"],
            "reward.model.max_length: max_length 64 is above max_position_embeddings 48 of {judge}; use 48 "
            "or less",
        ),
        (
            ["reward.model.max_length=41"],
            "reward.model.max_length, reward.model.micro_batch.max_tokens: max_length 41 is above "
            "micro_batch.max_tokens 40; use 40",
        ),
        (
            ["reward.model.max_length=20"],
            "a row may have 24 of the policy's tokens, but the reward model reads at most 20 of its own "
            "tokens (limited by max_length, max_position_embeddings 48, and a micro-batch); use shorter rows, raise "
            "these limits up to max_position_embeddings, or use reward.model.overlong=truncate",
        ),
        (
            ["data.max_response_length=33"],
            "a row may have 49 of the policy's tokens, but the reward model reads at most 40",
        ),
    ],
)
def test_one_mistake_is_one_violation(ppo: str, overrides: list[str], said: str) -> None:
    found = violations(ppo, *overrides)
    assert len(found) == 1, found
    assert said.format(judge=judge(ppo)) in found[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "field 'architectures' is ['LlamaForCausalLM'], so this is a language model (LlamaForCausalLM), but a reward model",
        ),
        ({"architectures": None}, "field 'architectures' is [], so this is a model, but a reward model"),
        (
            {"id2label": {"0": "bad", "1": "good"}},
            "the model has 2 labels, but a score is one number; use a reward model with num_labels 1",
        ),
        ({"id2label": None}, "the model has 2 labels"),  # transformers' default, which it leaves out
        ({"num_labels": 5}, "the model has 5 labels"),
    ],
)
def test_a_head_that_gives_no_score_is_refused(ppo: str, changes: dict[str, object], said: str) -> None:
    edit(ppo, **changes)
    (found,) = violations(ppo)
    assert found.startswith(f"reward.model.path: {judge(ppo) / 'config.json'}: ")
    assert said in found


def test_a_chat_template_is_needed_and_may_be_in_the_tokenizers_file(ppo: str) -> None:
    (judge(ppo) / "chat_template.jinja").unlink()
    (found,) = violations(ppo)
    assert found.startswith(f"reward.model.path: {judge(ppo)} has no chat template")
    (judge(ppo) / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert violations(ppo) == []


def test_arithmetic_of_a_reward_model(ppo: str) -> None:
    """The pass has 48 conversations of up to 40 of its own tokens.

    At worst, a micro-batch of 40 tokens has one conversation. The value head is frozen.
    """
    config = load(ppo)
    architectures, _ = read_architectures(config)
    *_, role = work_of_roles(config, architectures)
    assert (role.role, role.num_ranks, role.rows_per_replica, role.micro_batches) == (
        "reward_model",
        1,
        (48, 48),
        (3, 48),
    )
    assert (role.optimizer_steps_total, role.state_bytes_per_rank) == (0, 2 * role.num_parameters)
