"""Test tasks of reasoning_gym as environments, as data and as a reward, and what is true of every hub."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample
from megarl.cli.main import main
from megarl.config.kinds import Hub
from megarl.config.schema import AgentConfig, EnvironmentConfig, HarnessConfig
from megarl.endpoint.hubs.process import HubError, HubPlayer
from megarl.endpoint.hubs.reasoning_gym import compute_score
from megarl.endpoint.hubs.rehearsal import rehearse_episode
from megarl.endpoint.session import AgentSession
from tests.unit.endpoint.hubs.played import TOKENIZER, TOKENS, conversation, environment, play, rows_of

SUMS = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "operators": ["+"], "allow_negation": False}


def test_the_verifier_of_a_task_scores_the_episode() -> None:
    config = environment(Hub.reasoning_gym, "basic_arithmetic", **SUMS)
    row = rows_of(config, size=3)[2]
    answer = row["reward_model"]["ground_truth"]
    right = play(config, row, [answer])
    assert (right.reward, right.why, len(right.trained)) == (1.0, "", 1)
    assert right.trajectory.metrics == {"is_right": 1.0}
    assert conversation(right).endswith(f"<|start|>assistant\n{answer}<|end|>")

    wrong = play(config, row, ["no idea"])
    assert wrong.reward < 1
    assert wrong.trajectory.metrics == {"is_right": 0.0}


def test_rows_of_several_tasks_are_scored_by_their_own_verifiers() -> None:
    datasets = [
        {"name": "basic_arithmetic", "weight": 1, "config": {}},
        {"name": "leg_counting", "weight": 1, "config": {"max_animals": 3}},
    ]
    mixed = rows_of(environment(Hub.reasoning_gym, "composite", datasets=datasets), size=8, seed=3)
    alone = rows_of(environment(Hub.reasoning_gym, "basic_arithmetic", **SUMS), size=2, seed=5)
    rows = [*mixed, *alone]
    assert len({row["prompt"][0]["content"] for row in rows}) == 10
    assert any("legs" in row["prompt"][0]["content"] for row in mixed)

    def score(row: dict[str, Any], answer: str) -> float:
        return compute_score(
            row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"]
        )

    assert [score(row, row["reward_model"]["ground_truth"]) for row in rows] == [1.0] * 10
    assert max(score(row, "no idea") for row in rows) < 1


def test_arguments_set_the_difficulty() -> None:
    (easy,) = rows_of(environment(Hub.reasoning_gym, "basic_arithmetic", **SUMS), size=1)
    (hard,) = rows_of(
        environment(Hub.reasoning_gym, "basic_arithmetic", **SUMS | {"min_terms": 9, "max_terms": 9}), size=1
    )
    assert easy["prompt"][0]["content"].count("+") == 1
    assert hard["prompt"][0]["content"].count("+") == 8


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("no_such_task", {}, "no_such_task"),
        ("basic_arithmetic", {"min_legs": 2}, "min_legs"),
    ],
)
def test_a_wrong_name_or_argument_is_an_error_before_an_episode(
    name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(HubError, match=f"reasoning_gym/{name} cannot be opened: .*{said}"):
        rows_of(environment(Hub.reasoning_gym, name, **arguments), size=1)


@pytest.mark.parametrize("hub", list(Hub))
def test_a_missing_package_is_named_with_the_command_that_installs_it(hub: Hub, tmp_path: Path) -> None:
    python = tmp_path / "python"  # without site-packages
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    config = EnvironmentConfig(hub=hub, name="any", python=str(python))
    with pytest.raises(HubError) as refused:
        rows_of(config, size=1)
    assert f"{python} -m pip install '{hub.needs.package}'" in str(refused.value)


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(HubError, match=r"agent.environment.python is '/no/python', which is no program"):
        HubPlayer(EnvironmentConfig(hub=Hub.verifiers, name="any", python="/no/python"))


def test_the_command_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.jsonl"
    command = ["data", "reasoning_gym/basic_arithmetic", "min_terms=2", "operators=['+']"]
    options = ["--size", "3", "--seed", "7", "--output", str(file)]
    assert main([*command, *options]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    given = {"min_terms": 2, "operators": ["+"]}
    assert rows == rows_of(environment(Hub.reasoning_gym, "basic_arithmetic", **given), size=3, seed=7)
    assert "3 rows of reasoning_gym/basic_arithmetic" in capsys.readouterr().out

    assert main([*command, *options]) != 0
    assert "give another name" in capsys.readouterr().err
    other = str(tmp_path / "other.jsonl")
    assert main(["data", "reasoning_gym/no_such_task", "--output", other]) != 0
    assert not Path(other).exists()


def program(folder: Path, script: str) -> str:
    """Return a program that does something else than the player of a hub."""
    file = folder / "program"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


def test_a_process_that_dies_within_a_row_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = program(tmp_path, """printf '{"version": "1"}\\n{"row": {}}\\n{"row": {'""")
    output = str(tmp_path / "rows.jsonl")
    assert main(["data", "verifiers/any", "--python", python, "--output", output]) != 0
    assert "verifiers/any: its process has ended, see its output above" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["program"]


def test_a_file_that_cannot_be_written_is_refused_before_the_environment_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "absent" / "rows.jsonl")
    assert main(["data", "verifiers/any", "--python", "/no/python", "--output", output]) != 0
    assert f"{tmp_path / 'absent'} is no folder in which you can write" in capsys.readouterr().err


def test_an_environment_that_does_not_open_is_given_up_by_the_check(tmp_path: Path) -> None:
    python = program(tmp_path, "while read order; do :; done")
    config = EnvironmentConfig(hub=Hub.verifiers, name="any", python=python)
    agent = AgentConfig(environment=config, harness=HarnessConfig(time_limit_s=0.5))
    with pytest.raises(HubError, match=r"any is not open within 0.5 s \(agent.harness.time_limit_s\)"):
        asyncio.run(rehearse_episode(agent, Task(), TOKENIZER, TOKENS, ["a"], 100))


async def no_sample(token_ids: list[int], max_new_tokens: int, seed: int) -> Sample:
    raise AssertionError("no environment asks for a sample here")


def test_an_episode_that_ends_while_the_environment_opens_leaves_it_to_the_next(tmp_path: Path) -> None:
    go = tmp_path / "go"
    python = program(
        tmp_path,
        f"""read order; while [ ! -e {go} ]; do sleep 0.1; done; echo '{{"version": "1"}}'
        read order; echo '{{"episode": 0, "reward": 0.5, "metrics": {{}}}}'; exec cat > /dev/null""",
    )

    async def play_twice() -> AgentSession:
        player = HubPlayer(EnvironmentConfig(hub=Hub.verifiers, name="any", python=python))
        limits = EpisodeLimits(max_turns=1, max_tokens=100)
        first, second = (AgentSession(TOKENS, no_sample, limits, Task()) for _ in range(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(player(first, "http://127.0.0.1:9"), 0.3)
        go.touch()
        await player(second, "http://127.0.0.1:9")
        await player.close()
        return second

    assert asyncio.run(play_twice()).reward == 0.5


def test_an_episode_of_a_hub_that_reads_nothing_ends_with_its_time_limit(tmp_path: Path) -> None:
    end = tmp_path / "end"
    python = program(tmp_path, f"""echo '{{"version": "1"}}'; while [ ! -e {end} ]; do sleep 0.1; done""")
    long = Task(messages=[{"role": "user", "content": "a" * 2**20}])  # more than a pipe takes

    async def end_by_time() -> bool:
        player = HubPlayer(EnvironmentConfig(hub=Hub.verifiers, name="any", python=python))
        session = AgentSession(TOKENS, no_sample, EpisodeLimits(max_turns=1, max_tokens=100), long)
        running = asyncio.ensure_future(player(session, "http://127.0.0.1:9"))
        await asyncio.wait({running}, timeout=1.0)
        running.cancel()
        await asyncio.wait({running}, timeout=10.0)
        has_ended = running.cancelled()

        end.touch()
        await player.close()
        return has_ended

    assert asyncio.run(end_by_time())
