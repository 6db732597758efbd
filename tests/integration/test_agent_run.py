"""A run whose samples are episodes, on real Ray: a model that calls a tool is trained on what it wrote itself, whoever dies meanwhile."""

from __future__ import annotations

import os
import re
import signal
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megarl.config.schema import (
    AdvantageConfig,
    AdvantageEstimator,
    AgentConfig,
    AlgorithmConfig,
    CorrectionLevel,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
    ToolConfig,
)
from megarl.roles.episodes import EpisodeRollout
from megarl.roles.start import PPORoles
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.tiny_run import run_ppo, tiny_config
from tests.unit.agents.calling_model import save_calling_model

pytestmark = pytest.mark.usefixtures("ray_cluster")

# Every third item is sold out. The first call of all does not end; a file says which processes were called.
TOOLS = """
import os, time
def price(item: str, task) -> str:
    is_first = not os.path.exists({called!r})
    with open({called!r}, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    if is_first:
        time.sleep(600)
    if task.extra_info["index"] % 3 == 0:
        raise LookupError("sold out")
    return str(task.extra_info["price"])
"""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str == ground_truth)\n"


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    save_calling_model(tmp_path / "policy")
    rows = [
        {
            "prompt": [{"role": "user", "content": "ab?"}],
            "data_source": "prices",
            "reward_model": {"style": "rule", "ground_truth": "42"},
            "extra_info": {"index": index, "price": 42},
        }
        for index in range(12)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[1:3]), tmp_path / "validation.parquet")
    (tmp_path / "tools.py").write_text(TOOLS.format(called=str(tmp_path / "called")))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def test_a_model_with_a_tool_is_trained_on_what_it_wrote_and_no_episode_of_a_killed_process_is_lost(inputs: Path) -> None:
    """Generation is a step ahead of training; validation's episodes are generated between."""
    called, killed = inputs / "called", list[int]()

    def kill_who_hangs(step: int, roles: PPORoles) -> None:
        assert isinstance(roles.rollout, EpisodeRollout)
        environments = roles.rollout.environments
        turn = environments.turn

        def killing(wait_s: float) -> Any:
            if not killed and called.exists() and (pids := called.read_text().split()):
                killed.append(int(pids[0]))
                os.kill(killed[0], signal.SIGKILL)
            return turn(wait_s)

        environments.turn = killing  # type: ignore[method-assign]

    config = tiny_config(
        inputs,
        inputs / "run",
        algorithm=AlgorithmConfig(
            advantage=AdvantageConfig(estimator=AdvantageEstimator.grpo),
            kl=KLConfig(where=KLWhere.none),
            rollout_correction=RolloutCorrectionConfig(level=CorrectionLevel.token),
        ),
        data={"max_prompt_length": 16, "max_response_length": 100},
        trainer={"total_steps": 2, "prompts_per_step": 6, "validate_before": False, "validate_every_steps": 1},
        rollout={"n": 4, "temperature": 1.5, "max_staleness": 1, "validation": SamplingConfig(n=1, temperature=0)},
        actor={"micro_batch": MicroBatchConfig(max_tokens=256)},
        agent=AgentConfig(tools=[ToolConfig(path=str(inputs / "tools.py"), name="price")], max_turns=3, num_workers=2),
    )
    finished = run_ppo(config, kill_who_hangs)
    line, second = finished.metrics
    assert (line["rollout/age/max"], second["rollout/age/max"]) == (0, 1)  # what is trained second was begun with the first
    assert second["agent/calls/mean"] > 0
    assert line["agent/num_restarts"] == 1
    assert len(set(called.read_text().split())) == 3  # two, and the one that took the place of the killed
    assert 1 < line["agent/turns/mean"] <= 3
    assert line["agent/calls/mean"] > 0
    assert line["agent/errors/raised"] > 0
    assert line["agent/ended/done"] > 0
    assert line["actor/grad_norm"] > 0
    assert line["val/turns/mean"] == 2
    assert line["val/score/mean"] == 1  # greedily it calls, reads and answers; functions are given the answer alone
    # The engine's log-probs are the trainer's, of each token that the model wrote, behind what tools said too.
    assert line["training/rollout_log_probs_diff_max"] < 1e-3
    samples = read_samples(sample_files(finished.output_dir)[1])
    rows = samples.rows.to_pylist()
    assert len(rows) == 24
    assert any(row["score"] == 1 and row["turn_rewards"] == [0, 0] for row in rows)
    assert sum(len(row["turn_rewards"]) for row in rows) / 24 == pytest.approx(line["agent/turns/mean"])
    assert sum(row["num_calls"] for row in rows) / 24 == pytest.approx(line["agent/calls/mean"])
    for row in rows:
        texts = [samples.tokens[number] for number in row["response_ids"]]
        turns = ["".join(text for _, text in of_it) for _, of_it in groupby(zip(row["is_model"], texts, strict=True), itemgetter(0))]
        assert re.sub("<[a-z]+>", "", turns[-1]) == row["response"]  # that was scored
        assert len(row["turn_rewards"]) == (len(turns) + 1) // 2
        for answer in turns[1::2]:
            assert re.fullmatch(r"(<tool>(42|tool ?error.*)<end>)+<assistant>", answer)
        silent = [place for place, is_model in enumerate(row["is_model"]) if not is_model]
        assert {row[name][place] for name in ("advantages", "log_probs", "rollout_log_probs") for place in silent} <= {0.0}
