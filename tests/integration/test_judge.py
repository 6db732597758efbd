"""Test GRPO with a judge that the run serves: its server is killed, and no score is lost or changed."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AlgorithmConfig,
    JudgeConfig,
    JudgeParseConfig,
    KLConfig,
    KLWhere,
)
from megarl.roles.start import PPORoles
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.tiny_run import SYMBOLS, run_ppo, save_inputs, save_policy, tiny_config

pytestmark = pytest.mark.usefixtures("ray_cluster")

STEPS = 2
SERVER = "megarl.rollout.sglang.server_process"
DIGITS = "0123456789"
FIRST_DIGIT = SYMBOLS.index("0")
# without spaces, which the tokenizer of transformers drops
TEMPLATE = "{{ messages[-1].content }}{{ solution.replace(' ', '') }}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_inputs(folder := tmp_path_factory.mktemp("inputs"))
    save_policy(folder / "judge", seed=3)
    (folder / "judge.jinja").write_text(TEMPLATE)
    return folder


def judge(inputs: Path) -> JudgeConfig:
    """Return a judge whose reply is its most likely digit."""
    others = [index for index, symbol in enumerate(SYMBOLS) if symbol not in DIGITS]
    return JudgeConfig(
        name="toy",
        path=str(inputs / "judge"),
        prompt=str(inputs / "judge.jinja"),
        parse=JudgeParseConfig(regex="([0-9])"),
        weight=0.5,
        request={
            "max_tokens": 4,
            "logit_bias": {str(index): -100 for index in others},
            "stop": list(DIGITS),
            "no_stop_trim": True,
        },
    )


def test_scores_are_those_of_the_model_although_its_server_is_killed(inputs: Path, tmp_path: Path) -> None:
    servers: list[int] = []

    def kill(step: int, roles: PPORoles) -> None:
        (group,) = roles.reward.processes.servers.groups
        children = psutil.Process(group.pids[0]).children()
        servers.append(next(child.pid for child in children if SERVER in child.cmdline()))
        if step == STEPS:
            os.kill(servers[-1], signal.SIGKILL)

    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo), kl=KLConfig(where=KLWhere.none)
    )
    run = run_ppo(
        tiny_config(
            inputs,
            tmp_path / "run",
            algorithm=algorithm,
            reward={"functions": [], "judges": [judge(inputs)]},
            trainer={"total_steps": STEPS, "validate_before": False},
        ),
        look=kill,
    )

    assert servers[0] == servers[1]  # nothing was restarted before
    assert [line["reward/error_rate"] for line in run.metrics if "reward/error_rate" in line] == [0.0] * STEPS
    rows = [
        row for file in sample_files(run.output_dir).values() for row in read_samples(file).rows.to_pylist()
    ]
    scores = [row["score"] for row in rows]
    model = AutoModelForCausalLM.from_pretrained(inputs / "judge")
    tokenizer = AutoTokenizer.from_pretrained(inputs / "judge")
    assert scores == [0.5 * digit_of(model, tokenizer, row) for row in rows]
    assert len(set(scores)) > 1


def digit_of(judge: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any]) -> int:
    """Return the digit that the model finds most likely after the judge's prompt."""
    question = row["prompt"].removeprefix("<user>").removesuffix("<model>")
    messages = [{"role": "user", "content": question + row["response"].replace(" ", "")}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        logits = judge(torch.tensor([ids])).logits[0, -1]

    return int(logits[FIRST_DIGIT : FIRST_DIGIT + len(DIGITS)].argmax())
