"""The configuration and the rows of `megarl eval` for a Hugging Face folder, without processes."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli.main import build_parser, commands_of, in_argparse_order
from megarl.cli.run.eval import scored_by
from megarl.cli.run.evaluation_config import evaluation_config
from megarl.cli.run.named_model import find_model
from megarl.config.roles import model_roles
from megarl.config.schema import PPOConfig, RewardModelConfig
from megarl.data.prompts import PromptDataset
from megarl.data.tokenizer import load_tokenizer
from megarl.doctor.checks import load_for_run
from megarl.machine.errors import ConfigError
from tests.integration.tiny_run import save_policy

MODEL = RewardModelConfig(path="rm", weight=0.25)
ROWS = [("1+1=", "2"), ("2+1=", "3")]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_policy(folder := tmp_path_factory.mktemp("evaluated") / "policy")
    (folder.parent / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0\n"
    )
    return folder


def rows_of(policy: Path, data: Path, *overrides: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return what `megarl eval` reads from the file: prompts, data sources and the reward's inputs."""
    reward = f"{policy.parent / 'reward.py'}:compute_score"
    lengths = ("--max-tokens", "8", "data.max_prompt_length=8")
    words = ["eval", str(policy), "--data", str(data), "--reward", reward, *lengths, "device=cpu", *overrides]
    parser = build_parser()
    config = evaluation_config(
        find_model(policy, "latest"), parser.parse_args(in_argparse_order(words, commands_of(parser)))
    )
    prompts = PromptDataset(config.data.val_files, load_tokenizer(config.model.path, False), config.data)

    return [
        (prompts[row].messages[0]["content"], prompts[row].data_source, prompts[row].reward_model)
        for row in range(len(prompts))
    ]


def test_rows_as_the_tutorial_writes_them_are_read(policy: Path, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    lines = [{"prompt": question, "data_source": "sums", "ground_truth": answer} for question, answer in ROWS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rows_of(policy, data) == [
        (question, "sums", {"style": "rule", "ground_truth": answer}) for question, answer in ROWS
    ]


def test_columns_with_other_names_are_read(policy: Path, tmp_path: Path) -> None:
    data = tmp_path / "questions.csv"
    with data.open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *ROWS])
    columns = (
        "data.columns.prompt=question",
        "data.columns.ground_truth=answer",
        "data.columns.data_source=null",
    )
    assert rows_of(policy, data, *columns) == [
        (question, "questions", {"style": "rule", "ground_truth": answer}) for question, answer in ROWS
    ]

    with pytest.raises(
        ValueError,
        match=r"column 'prompt' is missing.*data\.columns\.prompt=question "
        r"data\.columns\.ground_truth=answer",
    ):
        rows_of(policy, data)


SCORERS = """
reward:
  functions: [{path: reward.py, weight: 0.5}]
  judges:
    - {name: kind, url: http://localhost:1/v1, model: large, prompt: judge.jinja, weight: 2.0, parse: {json: score}}
  model: {path: policy, weight: 0.25}
  pass_score: 3
"""


def test_a_function_replaces_all_that_scores(policy: Path, tmp_path: Path) -> None:
    """Judges and a reward model do not add to the score of `--reward`; without it, all of them score."""
    folder = policy.parent
    (folder / "judge.jinja").write_text("{{ solution }}")
    (folder / "run.yaml").write_text(SCORERS)
    (data := tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    own = f"{folder / 'reward.py'}:compute_score"
    parser = build_parser()

    def config_of(*more: str) -> PPOConfig:
        words = ["eval", str(policy), "--config", str(folder / "run.yaml"), "--data", str(data), "--n", "2"]
        words += ["data.max_response_length=8", "data.max_prompt_length=8", "device=cpu", *more]
        parsed = parser.parse_args(in_argparse_order(words, commands_of(parser)))
        return evaluation_config(find_model(policy, "latest"), parsed)

    replaced = config_of("--reward", own)
    assert scored_by(replaced) == [f"function {own}"]
    assert replaced.reward.judges == []
    assert replaced.reward.model.path is None
    assert [(each.file, each.weight) for each in replaced.reward.functions] == [
        (str(folder / "reward.py"), 1.0)
    ]
    assert replaced.reward.pass_score == 3
    assert scored_by(config_of("--reward", str(folder / "reward.py"))) == [f"function {own}"]

    without_model = config_of("reward.model.path=null", "reward.model.weight=1.0")
    assert scored_by(without_model) == [
        f"0.5 x function {own}",
        "2 x judge kind (large at http://localhost:1/v1)",
    ]
    assert scored_by(replace(without_model, reward=replace(without_model.reward, model=MODEL))) == [
        f"0.5 x function {own}",
        "2 x judge kind (large at http://localhost:1/v1)",
        "0.25 x reward model rm",
    ]


def test_an_evaluation_does_not_quantize(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(json.dumps({"prompt": "1+1=", "ground_truth": "2"}) + "\n")
    with pytest.raises(
        ConfigError, match=r"rollout\.dtype: is fp8, but an evaluation.*use rollout\.dtype=model"
    ):
        rows_of(policy, tmp_path / "sums.jsonl", "rollout.dtype=fp8", "rollout.engine=sglang")


RUN = """
model: {path: policy}
data: {train_files: [sums.jsonl], val_files: [sums.jsonl], max_prompt_length: 8, max_response_length: 8}
reward: {functions: [{path: reward.py}]}
rollout: {n: 2}
trainer: {prompts_per_step: 1}
device: cpu
"""
OF_A_TEACHER = ["algorithm=grpo", "algorithm.advantage.estimator=distillation", "algorithm.kl.where=none"]
AHEAD = ["algorithm=grpo", "rollout.max_staleness=1", "algorithm.rollout_correction.level=token"]
EXPERTS = ["model.path={folder}/experts", "rollout.engine=sglang"]
TWO_REPLICAS = ["rollout.num_replicas=2", "actor.parallel.data_parallel_size=2"]


@pytest.mark.parametrize(
    "settings",
    [
        AHEAD,
        [*AHEAD, "rollout.late=mask", *TWO_REPLICAS],
        [*AHEAD, "rollout.on_update=drain", "placement.strategy=stand_alone"],
        [*OF_A_TEACHER, "teacher.path={folder}/experts"],
        [*OF_A_TEACHER, "teachers=[{{name: a, path: {folder}/experts, data_sources: [sums]}}]"],
        ["resharding.transport=group", "placement.strategy=stand_alone"],
        ["resharding.transport=folder", "resharding.delta=true"],
        [*EXPERTS, "engine.routing_replay=trainer", "trainer.epochs_per_batch=2"],
        [*EXPERTS, "algorithm=grpo", "engine.routing_replay=rollout"],
        ["algorithm=ppo", "profile.steps=[2]", "profile.roles=[critic]", "trainer.critic_warmup_steps=1"],
        ["algorithm=grpo", "data.curriculum.kind=learnability", "algorithm.dynamic_sampling.enabled=true"],
        ["actor.lora.rank=2", "recovery.enabled=true", "actor.optim.on_nonfinite=recover"],
    ],
    ids=lambda settings: settings[-1].partition("=")[0],
)
def test_a_run_is_evaluated_whatever_it_set_for_training(
    policy: Path, tmp_path: Path, settings: list[str]
) -> None:
    folder = policy.parent
    if not (folder / "experts").exists():
        save_policy(folder / "experts", with_experts=True)
    (folder / "sums.jsonl").write_text(
        json.dumps({"prompt": "1+1=", "ground_truth": "2", "data_source": "sums"}) + "\n"
    )
    file = folder / "training.yaml"
    file.write_text(RUN)
    overrides = [setting.format(folder=folder) for setting in settings]
    overrides.append(f"trainer.output_dir={tmp_path}")
    trained = load_for_run(PPOConfig, str(file), overrides, reads_inputs=False)

    words = ["eval", trained.model.path, "--config", str(file), "--n", "1", *overrides]
    parser = build_parser()
    parsed = parser.parse_args(in_argparse_order(words, commands_of(parser)))
    config = evaluation_config(find_model(Path(trained.model.path)), parsed)
    assert [role.name for role in model_roles(config)] == ["actor"]
    assert config.rollout.validation == replace(trained.rollout.validation, n=1)
    assert config.rollout.num_replicas == trained.rollout.num_replicas
