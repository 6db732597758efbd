"""Test runs on real Ray whose episodes the environments of hubs play. MEGARL_HUB_STEPS=20 trains for 20 steps."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.sandboxes import local
from megarl.config.kinds import Hub, RolloutEngineKind
from megarl.config.schema import (
    AgentConfig,
    DataConfig,
    EnvironmentConfig,
    LossyText,
    RewardConfig,
    RolloutConfig,
)
from megarl.tracking.samples import read_samples, sample_files
from tests.integration.tiny_run import run_ppo, save_inputs, tiny_config
from tests.unit.endpoint.hubs.played import python_of, rows_of

ROOT = Path(__file__).parents[2]
HUBS = ROOT / "tests" / "unit" / "endpoint" / "hubs"
STEPS = int(os.environ.get("MEGARL_HUB_STEPS", "2"))
pytestmark = pytest.mark.usefixtures("ray_cluster")


def of_reasoning_gym(folder: Path) -> tuple[str, dict[str, Any]]:
    return "basic_arithmetic", {"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+"]}


def of_verifiers(folder: Path) -> tuple[str, dict[str, Any]]:
    return "sums_taskset", {}


def of_openenv(folder: Path) -> tuple[str, dict[str, Any]]:
    return f"{HUBS}/guess_server.py:game", {"num_sessions": 8}


def of_nemo_gym(folder: Path) -> tuple[str, dict[str, Any]]:
    data = folder / "nemo.jsonl"
    lines = [{"responses_create_params": {"input": f"{number}="}} for number in range(8)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "tests.unit.endpoint.hubs.sevens_server", {"data": str(data)}


def of_harbor(folder: Path) -> tuple[str, dict[str, Any]]:
    if why := local.why_not():
        pytest.skip(why)
    for number in range(4):
        files = {
            "task.toml": 'schema_version = "1.4"\n[environment]\n[agent]\n[verifier]\n',
            "instruction.md": f"{number}=",
            "environment/Dockerfile": "FROM scratch\n",
            "tests/test.sh": "#!/bin/bash\ncount=$(grep -o 7 /app/out | wc -l)\n"
            "echo $((count * 25))e-2 > /logs/verifier/reward.txt\n",
        }
        for name, text in files.items():
            file = folder / "tasks" / f"task{number}" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    parts = {"agent": "local_harbor:Writer", "environment": "local_harbor:LocalEnvironment"}
    return str(folder / "tasks"), {name: {"import_path": path} for name, path in parts.items()}


OF_HUBS: dict[Hub, tuple[Callable[[Path], tuple[str, dict[str, Any]]], str]] = {
    Hub.reasoning_gym: (of_reasoning_gym, "is_right"),
    Hub.verifiers: (of_verifiers, "length"),
    Hub.openenv: (of_openenv, "steps"),
    Hub.nemo_gym: (of_nemo_gym, "length"),
    Hub.harbor: (of_harbor, "reward"),
}


def python_with_these_modules(hub: Hub, folder: Path) -> str:
    """Return a program that finds the tests' own environments, as packages that are installed beside the hub."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={HUBS}:{ROOT} exec {python_of(hub)} "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("hub", list(OF_HUBS))
def test_a_model_is_trained_on_the_environment_of_a_hub(hub: Hub, tmp_path: Path) -> None:
    describe, metric = OF_HUBS[hub]
    python = python_with_these_modules(hub, tmp_path)
    name, arguments = describe(tmp_path)
    environment = EnvironmentConfig(hub=hub, name=name, arguments=arguments, python=python)
    save_inputs(tmp_path, num_layers=2)
    train = tmp_path / "train.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows_of(environment, size=16)))

    agent = AgentConfig(environment=environment, max_turns=3, max_turn_tokens=4)
    config = tiny_config(
        tmp_path,
        tmp_path / "run",
        agent=replace(agent, harness=replace(agent.harness, time_limit_s=120)),
        data=DataConfig(
            train_files=[str(train)], max_prompt_length=24, max_response_length=38, lossy=LossyText.allow
        ),
        reward=RewardConfig(),
        rollout=RolloutConfig(n=4, engine=RolloutEngineKind.hf),
        trainer={"total_steps": STEPS},
    )
    finished = run_ppo(config)

    first, *_, last = finished.metrics
    print(hub.value, *(round(line["critic/score/mean"], 3) for line in finished.metrics))
    assert first[f"agent/metrics/{metric}/mean"] >= 0
    assert last["training/rollout_log_probs_diff_max"] < 1e-4  # the tokens are those of the engine
    samples = read_samples(sample_files(finished.output_dir)[1]).rows.to_pylist()
    assert {row["data_source"] for row in samples} == {
        json.loads(train.read_text().split("\n")[0])["data_source"]
    }
    assert all(row["score"] == pytest.approx(sum(row["turn_rewards"])) for row in samples)
