"""Test environments of the hubs with a client of their own or a server, each with the hub's real package.

None of these packages can be in the lock of megarl (docs/agents.md): the tests run where MEGARL_HUBS names a
folder with their virtual environments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.sandboxes import local
from megarl.config.kinds import Hub
from megarl.endpoint.hubs.process import HubError
from tests.unit.endpoint.hubs.played import conversation, environment, play, rows_of

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def these_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ---- verifiers


def test_a_harness_of_verifiers_plays_its_taskset() -> None:
    config = environment(Hub.verifiers, "sums_taskset")
    rows = rows_of(config, size=10, seed=1)
    assert sorted(row["prompt"][0]["content"] for row in rows) == ["0+0", "1+1", "2+2", "3+3"]
    (row,) = [row for row in rows if row["prompt"][0]["content"] == "3+3"]
    assert row["reward_model"]["ground_truth"] == "6"

    right = play(config, row, ["5", "6"])
    assert (right.why, right.reward) == ("", 1.0)
    assert right.trajectory.metrics == {"is_right": 1.0, "length": 1.0}
    assert [len(turn) for turn in right.trained] == [2, 2]
    assert conversation(right) == (
        "<|start|>user\n3+3<|end|>\n<|start|>assistant\n5<|end|>\n"
        "<|start|>user\nsure?<|end|>\n<|start|>assistant\n6<|end|>"
    )
    assert play(config, row, ["6", "5"]).reward == 0


def test_a_limit_of_the_run_ends_an_episode_of_verifiers() -> None:
    config = environment(Hub.verifiers, "sums_taskset")
    (row,) = rows_of(config, size=1)
    played = play(config, row, ["ab" * 20], max_tokens=50)
    assert (played.why, len(played.trained), played.reward) == ("", 1, 0)


def test_a_taskset_that_is_not_installed_is_named() -> None:
    with pytest.raises(HubError, match="verifiers/no_such_tasks cannot be opened: .*no_such_tasks"):
        rows_of(environment(Hub.verifiers, "no_such_tasks"), size=1)


# ---- openenv


def test_the_steps_of_an_openenv_server_are_turns() -> None:
    config = environment(
        Hub.openenv, f"{HERE}/guess_server.py:game", num_sessions=8, reset={"text": "Which digit?"}
    )
    row = rows_of(config, size=2, seed=6)[1]
    assert json.loads(row["extra_info"]["reset"]) == {"text": "Which digit?", "seed": 7}
    played = play(config, row, ["what", "8", '{"number": 7}'])
    assert (played.why, played.reward, len(played.trained)) == ("", 1.0, 3)
    assert played.trajectory.metrics == {"steps": 2.0, "is_done": 1.0}
    assert conversation(played) == (
        "<|start|>user\nWhich digit?<|end|>\n<|start|>assistant\nwhat<|end|>\n"
        "<|start|>user\nthe action is refused: number 'what' is not of type 'integer'<|end|>\n"
        "<|start|>assistant\n8<|end|>\n<|start|>user\nless<|end|>\n"
        '<|start|>assistant\n{"number": 7}<|end|>'
    )


def test_an_episode_of_openenv_that_reaches_a_limit_keeps_its_rewards() -> None:
    config = environment(Hub.openenv, f"{HERE}/guess_server.py:game", num_sessions=8)
    (row,) = rows_of(config, size=1)
    played = play(config, row, ["5"])
    assert (played.why, played.reward, len(played.trained)) == ("", 0, 8)  # agent.max_turns
    assert played.trajectory.metrics == {"steps": 8.0, "is_done": 0.0}


def test_an_openenv_server_of_tools_gives_them_to_the_model() -> None:
    config = environment(Hub.openenv, f"{HERE}/guess_server.py:shop", num_sessions=8)
    (row,) = rows_of(config, size=1)
    played = play(config, row, [called("price", item="abc"), "3"])
    assert (played.why, played.reward, len(played.trained)) == ("", 0.5, 2)
    assert "<|start|>tool\n" in conversation(played)


# ---- nemo_gym


def test_the_agent_of_nemo_gym_uses_the_tools_of_a_resources_server() -> None:
    config = environment(Hub.nemo_gym, "example_session_state_mgmt")
    rows = rows_of(config, size=3, seed=1)
    (row,) = [row for row in rows if "add 7 then add 8" in row["prompt"][0]["content"]] or rows[:1]
    given = json.loads(row["extra_info"]["row"])
    missing = given["expected_count"] - given["initial_count"]
    calls = [called("increment_counter", count=missing - 1), called("increment_counter", count=1)]
    right = play(config, row, [*calls, called("get_counter_value"), "done"])
    assert (right.why, right.reward, len(right.trained)) == ("", 1.0, 4)
    assert f'{{"count":{given["expected_count"]}}}' in conversation(right)

    wrong = play(config, row, ["done"])
    assert (wrong.why, wrong.reward, len(wrong.trained)) == ("", 0.0, 1)


# ---- harbor


def test_tests_of_harbor_score_what_an_agent_did(tmp_path: Path) -> None:
    if why := local.why_not():
        pytest.skip(why)
    task = tmp_path / "tasks" / "greeting"
    for file, text in {
        "task.toml": 'schema_version = "1.4"\n[environment]\n[agent]\n[verifier]\n',
        "instruction.md": "Write hi to the file out.",
        "environment/Dockerfile": "FROM scratch\n",
        "tests/test.sh": "#!/bin/bash\ngrep -q hi /app/out && echo 1 > /logs/verifier/reward.txt || "
        "echo 0 > /logs/verifier/reward.txt\n",
    }.items():
        (task / file).parent.mkdir(parents=True, exist_ok=True)
        (task / file).write_text(text)

    parts = {"agent": "local_harbor:OneCommand", "environment": "local_harbor:LocalEnvironment"}
    arguments = {name: {"import_path": path} for name, path in parts.items()}
    config = environment(Hub.harbor, str(tmp_path / "tasks"), **arguments)
    (row,) = rows_of(config, size=5)
    right = play(config, row, ["echo hi > out"])
    assert (right.why, right.reward, len(right.trained)) == ("", 1.0, 1)
    assert right.trajectory.metrics == {"reward": 1.0}
    wrong = play(config, row, ["echo no > out"])
    assert (wrong.why, wrong.reward) == ("", 0.0)
