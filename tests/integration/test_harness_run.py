"""Test a run on real Ray whose agent is a program with the OpenAI SDK.

The program compacts its history, and some of its episodes fail.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from examples.agent import prepare
from megarl.agents.sandboxes import local
from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.test_agent_run import save_policy
from tests.integration.tiny_run import run_ppo

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("ray_cluster")
NUM_ROWS = 12

# The example's agent. Every episode also asks once without its history, and every sixth one fails. Another sixth
# looks for the run's files in a sandbox first.
AGENT = """
import json, os
from pathlib import Path
from examples.harness import agent
FOLDER = Path(__file__).parent
LOOK = "import os, sys; print([os.path.exists(path) for path in sys.argv[1:]])"
async def run(task, endpoint):
    if task.seed % 6 == 0:
        raise LookupError("no such shop")
    if task.seed % 6 == 1:
        async with endpoint.sandbox() as sandbox:
            looked = await sandbox.exec(["python", "-S", "-c", LOOK, __file__, f"/proc/{os.getpid()}", "file"])
        (FOLDER / "looked").write_text(json.dumps(looked))
    client = agent._CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    other = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "ab"}])
    return {"reward": await agent.run(task, endpoint), "responses": {other.id: 0.25}}
"""


def test_a_model_is_trained_through_the_endpoint(tmp_path: Path) -> None:
    if why := local.why_not():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    chance = random.Random(0)
    rows = [prepare.prompt_row(chance, number % 2 == 0) for number in range(NUM_ROWS)]
    save_policy(tmp_path / "policy", rows)
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "file").write_text("")

    config = load_config(
        PPOConfig,
        ROOT / "examples" / "harness" / "grpo.yaml",
        [
            f"data.train_files=[{tmp_path}/train.jsonl]",
            f"data.val_files=[{tmp_path}/validation.jsonl]",
            f"model.path={tmp_path}/policy",
            f"trainer.output_dir={tmp_path}/run",
            f"agent.harness.function={tmp_path}/agent.py:run",
            f"agent.harness.sandbox={{provider: local, files: [{tmp_path}/file]}}",
            "agent.max_error_rate=0.5",
            "agent.max_turns=5",
            "rollout.engine=hf",
            "rollout.n=4",
            "rollout.temperature=1.5",
            "rollout.max_staleness=1",
            "rollout.validation={n: 1, temperature: 0}",
            "trainer.total_steps=2",
            "trainer.prompts_per_step=6",
            "trainer.updates_per_step=2",
            "trainer.validate_every_steps=2",
            "trainer.validate_before=false",
            "actor.parallel.data_parallel_size=1",
            "checkpoint.at_end=false",
            "tracking.loggers=[jsonl]",
        ],
    )
    finished = run_ppo(config)
    line, second = finished.metrics
    assert (line["rollout/age/max"], second["rollout/age/max"]) == (0, 1)
    assert line["actor/grad_norm"] > 0
    assert line["training/rollout_log_probs_diff_max"] < 1e-4

    assert json.loads((tmp_path / "looked").read_text()) == [0, "[False, False, True]\n"]
    # Of 24 episodes, some failed and have one row; the others have two, for two conversations.
    share = line["agent/failures/raised"]
    assert 0 < share < 0.5
    assert share == line["agent/ended/failed"]
    assert line["agent/branches/mean"] == pytest.approx(2 - share)
    samples = read_samples(sample_files(finished.output_dir)[1]).rows.to_pylist()
    assert len(samples) == round(24 * (2 - share))
    # Each episode that did not fail has 0.25 for its first conversation, and 0 or 1 for the second.
    assert 0.25 * (1 - share) < line["critic/score/mean"] < 1.25 * (1 - share)
    assert second["val/score/mean"] > 0.5

    by_end = {end: [row for row in samples if row["episode_end"] == end] for end in ("failed", "done")}
    assert all(set(row["advantages"]) == {0.0} and row["score"] == 0 for row in by_end["failed"])
    assert all(row["is_model"] == [False] for row in by_end["failed"])
    assert len({row["prompt"] for row in by_end["done"]}) > 2

    # Both conversations of an episode have its score and its advantage.
    for first, last in zip(by_end["done"][::2], by_end["done"][1::2], strict=True):
        assert first["uid"] == last["uid"]
        assert first["score"] == last["score"] == sum(first["turn_rewards"]) + sum(last["turn_rewards"])
        assert first["turn_rewards"] == [0.25]
        assert first["advantage"] == pytest.approx(last["advantage"])
