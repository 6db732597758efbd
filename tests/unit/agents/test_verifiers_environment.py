"""examples/verifiers_environment.py, with a stub for an environment of that package, which is not one of the
pinned packages."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from examples.verifiers_environment import VerifiersEnvironment, write_rows
from megarl.agents.protocol import Reply, Task, Turn
from megarl.agents.user_tools import load_agent
from megarl.config.schema import AgentConfig, EnvironmentConfig

FILE = """
from examples.verifiers_environment import VerifiersEnvironment
class Guess(VerifiersEnvironment):
    make = staticmethod(lambda: None)
"""


class MultiTurn:
    """A stub with the methods of MultiTurnEnv of verifiers 0.1.8 and the state that they read and write."""

    def __init__(self) -> None:
        self.rubric = SimpleNamespace(score_rollout=self._score)

    def get_dataset(self) -> list[dict[str, Any]]:
        return [
            {
                "prompt": [{"role": "user", "content": "guess"}],
                "answer": "7",
                "info": {"hint": 6},
                "task": "guessing",
                "example_id": 4,
            }
        ]

    async def init_state(
        self, row: dict[str, Any], client: None, model: str, sampling_args: None
    ) -> dict[str, Any]:
        return {**row, "trajectory": [], "reward": None}

    async def setup_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"tries": 0}

    async def is_completed(self, state: dict[str, Any]) -> bool:
        last = state["trajectory"][-1]
        is_over: bool = last["completion"][0]["content"] == state["answer"] or "final_env_response" in state
        if is_over:
            state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]) :]
        return is_over

    async def env_response(
        self, messages: list[dict[str, Any]], state: dict[str, Any]
    ) -> list[dict[str, Any]]:
        state["tries"] += 1
        said = [
            {
                "role": "user",
                "content": f"no, {state['info']['hint']} is nearer than {messages[-1]['content']}",
            }
        ]
        if state["tries"] == 3:
            state["final_env_response"] = said

        return said

    async def _score(self, state: dict[str, Any], semaphore: Any) -> None:
        async with semaphore:
            state["reward"] = (
                float(state["completion"][-1]["content"] == state["answer"]) - 0.1 * state["tries"]
            )


class Guess(VerifiersEnvironment):
    make = MultiTurn


def play(row: dict[str, Any], *words: str, max_turns: int = 9) -> list[Reply]:
    async def turns() -> list[Reply]:
        environment = Guess()
        await environment.start(
            Task(messages=row["prompt"], reward_model=row["reward_model"], extra_info=row["extra_info"])
        )
        replies = [
            await environment.respond(Turn(number, word, [], number + 1 == max_turns))
            for number, word in enumerate(words)
        ]
        await environment.close()

        return replies

    return asyncio.run(turns())


def test_turns_are_answered_and_the_episode_is_scored_with_its_last(tmp_path: Path) -> None:
    write_rows(MultiTurn(), str(tmp_path / "rows.jsonl"))
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("guessing", "7")
    no = [{"role": "user", "content": "no, 6 is nearer than 3"}]
    assert play(row, "3", "7") == [Reply(messages=no), Reply(is_done=True, reward=0.9)]

    # The last allowed turn.
    assert play(row, "3", "4", max_turns=2) == [Reply(messages=no), Reply(reward=-0.1)]
    assert [(reply.is_done, reply.reward) for reply in play(row, "1", "2", "3")] == [
        (False, 0),
        (False, 0),
        (True, -0.30000000000000004),
    ]


def test_such_a_class_is_an_environment_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    make, tools = load_agent(AgentConfig(environment=EnvironmentConfig(path=f"{tmp_path / 'mine.py'}:Guess")))
    assert tools is None
    assert isinstance(make(), VerifiersEnvironment)
