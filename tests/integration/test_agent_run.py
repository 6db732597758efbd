"""Test a run on real Ray whose samples are episodes: a model that calls a tool is trained on its own tokens,
even if processes die."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.agent import prepare
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.data.tokenizer import load_tokenizer, rendered_chat
from megarl.roles.start import PPORoles
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.tiny_run import run_ppo

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("ray_cluster")

# The example's tool, with every third item sold out. The first call never returns; a file records which
# processes were called.
TOOLS = """
import os, time
from examples.agent import tools
def price(item: str, task) -> str:
    is_first = not os.path.exists({called!r})
    with open({called!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    if is_first:
        time.sleep(600)
    if task.extra_info["list"] % 3 == 0:
        raise LookupError("sold out")
    return tools.price(item, task)
"""
NUM_ROWS = 12


def save_policy(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Save the example's model, which has memorized the teacher's responses to these prompts. It computes for
    some seconds."""
    prepare.save_model(folder, seed=0)
    tokenizer = load_tokenizer(str(folder))
    model = LlamaForCausalLM.from_pretrained(folder)
    chats = [prepare.conversation(row["extra_info"], "right", random.Random(0)) for row in rows]
    texts = [
        rendered_chat(tokenizer, chat["messages"], for_generation=False, tools=chat["tools"])
        for chat in chats
    ]
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for _ in range(60):
        optimizer.zero_grad()
        model(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss.backward()
        optimizer.step()

    model.save_pretrained(folder)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    chance = random.Random(0)
    rows = [prepare.prompt_row(chance, number % 2 == 0) for number in range(NUM_ROWS)]
    save_policy(tmp_path / "policy", rows)
    held_out = [row for row in rows if row["extra_info"]["list"] % 3]
    assert {row["extra_info"]["busy"] for row in held_out} == {False, True}
    for name, of_it in (("train", rows), ("validation", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_it))
    (tmp_path / "tools.py").write_text(TOOLS.format(called=str(tmp_path / "called")))

    return tmp_path


def test_a_model_with_a_tool_is_trained_on_what_it_wrote_and_no_episode_of_a_killed_process_is_lost(
    inputs: Path,
) -> None:
    """Generation is a step ahead of training; episodes of validation are generated in between."""
    called = inputs / "called"
    killed = list[int]()

    def kill_who_hangs(step: int, roles: PPORoles) -> None:
        """Kill the hanging process, then the only replica, when an episode with a call requests its next
        turn."""
        if step > 1:
            return
        assert roles.rollout.episodes is not None
        scheduler = roles.rollout.scheduler
        environments = roles.rollout.episodes.environments
        turn = environments.poll
        begin = scheduler.begin
        (replica,) = roles.rollout.replicas[0].call(RolloutWorker.process_ids)

        def turn_and_kill(wait_s: float) -> Any:
            if not killed and called.exists() and (pids := called.read_text().split()):
                killed.append(int(pids[0]))
                os.kill(killed[0], signal.SIGKILL)
            return turn(wait_s)

        def begin_and_kill(*requests: Any, **options: Any) -> list[int]:
            numbers = begin(*requests, **options)
            if len(killed) == 1 and len(called.read_text().split()) > 3:
                killed.append(replica)
                os.kill(replica, signal.SIGKILL)  # the newest requests cannot have completed yet
            return numbers

        environments.poll = turn_and_kill  # type: ignore[method-assign]
        scheduler.begin = begin_and_kill  # type: ignore[method-assign]

    config = load_config(
        PPOConfig,
        ROOT / "examples" / "agent" / "grpo.yaml",
        [
            *(
                f"data.{name}_files=[{inputs / file}.jsonl]"
                for name, file in (("train", "train"), ("val", "validation"))
            ),
            *(
                f"{key}={inputs / name}"
                for key, name in (("model.path", "policy"), ("trainer.output_dir", "run"))
            ),
            f"agent.tools=[{inputs / 'tools.py'}:price]",
            *(
                "agent.num_workers=2",
                "rollout.engine=hf",
                "rollout.n=4",
                "rollout.temperature=1.5",
                "rollout.max_staleness=1",
            ),
            *(
                "rollout.validation={n: 1, temperature: 0}",
                "algorithm.rollout_correction.level=token",
                "trainer.total_steps=2",
            ),
            *(
                "trainer.prompts_per_step=6",
                "trainer.validate_every_steps=1",
                "trainer.validate_before=false",
            ),
            *("actor.parallel.data_parallel_size=1", "checkpoint.at_end=false", "tracking.loggers=[jsonl]"),
        ],
    )
    finished = run_ppo(config, kill_who_hangs)
    line, second = finished.metrics

    # the second step's samples were begun with the first's
    assert (line["rollout/age/max"], second["rollout/age/max"]) == (0, 1)
    assert second["agent/calls/mean"] > 0
    assert second["agent/num_restarts"] == line["rollout/num_restarts"] + second["rollout/num_restarts"] == 1
    assert len(set(called.read_text().split())) == 3  # two, and the replacement of the killed one
    assert 1 < line["agent/turns/mean"] <= 4
    assert line["agent/calls/mean"] > 0
    assert line["agent/errors/raised"] > 0
    assert line["agent/ended/done"] > 0
    assert line["actor/grad_norm"] > 0
    assert 2 < line["val/turns/mean"] < 3  # some items are busy at first

    # greedily it calls, reads and answers; functions receive only the answer
    assert line["val/score/mean"] == 1

    # The engine's log-probs match the trainer's for each token that the model wrote, including those after
    # tool results.
    assert line["training/rollout_log_probs_diff_max"] < 1e-3
    samples = read_samples(sample_files(finished.output_dir)[1])
    rows = samples.rows.to_pylist()
    assert len(rows) == 24

    # told to call again, it did
    assert any(row["score"] == 1 and row["turn_rewards"] == [0, 0, 0] for row in rows)
    assert sum(len(row["turn_rewards"]) for row in rows) / 24 == pytest.approx(line["agent/turns/mean"])
    assert sum(row["num_calls"] for row in rows) / 24 == pytest.approx(line["agent/calls/mean"])

    for row in rows:
        texts = [samples.tokens[number] for number in row["response_ids"]]
        turns = [
            "".join(text for _, text in of_it)
            for _, of_it in groupby(zip(row["is_model"], texts, strict=True), itemgetter(0))
        ]
        assert re.sub("<[a-z]+>", "", turns[-1]) == row["response"]  # this text was scored
        assert len(row["turn_rewards"]) == (len(turns) + 1) // 2
        for answer in turns[1::2]:
            assert re.fullmatch(r"<tool>([0-9]{2}|busy|error)<assistant>", answer)
        silent = [place for place, is_model in enumerate(row["is_model"]) if not is_model]
        assert {
            row[name][place] for name in ("advantages", "log_probs", "rollout_log_probs") for place in silent
        } <= {0.0}
