"""Use an environment of the package `verifiers` (MultiTurnEnv, version 0.1.8) in a run.

    class WordGame(VerifiersEnvironment):          # in a file of your own, which agent.environment names
        make = staticmethod(lambda: verifiers.load_environment("word-game"))

    python -c "import my_file, examples.verifiers_environment as v; v.write_rows(my_file.WordGame.make(), 'train.jsonl')"

    agent: {environment: my_file.py:WordGame, max_turns: 8}
    data: {train_files: [train.jsonl]}
    reward: {functions: [{path: examples/verifiers_environment.py}]}     # adds 0 to the rubric's score

The rubric scores an episode when it ends, as the reward of its last turn. An episode that ends because a turn
was truncated has no reward. Environments with tools are not supported, because the model would not be told
about the tools. Write the tools as functions and name them in `agent.tools`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from megarl.agents.protocol import Message, Reply, Task, Turn


class VerifiersEnvironment:
    """Adapt a `verifiers` environment to megarl's environment protocol.

    Attributes:
        make: Creates the environment. The episodes of a process share it; each episode has its own state.
    """

    make: ClassVar[Callable[[], Any]]

    async def start(self, task: Task) -> None:
        self._environment = _made(type(self).make)
        row = {
            "prompt": list(task.messages),
            "answer": task.reward_model.get("ground_truth", ""),
            "example_id": 0,
            **task.extra_info,
        }
        state = await self._environment.init_state(row, client=None, model="", sampling_args=None)
        self._state = await self._environment.setup_state(state)
        self._messages: list[Message] = list(task.messages)

    async def respond(self, turn: Turn) -> Reply:
        written = [{"role": "assistant", "content": turn.text}]
        step = {
            "prompt": list(self._messages),
            "completion": written,
            "response": None,
            "tokens": None,
            "reward": None,
        }
        self._state["trajectory"].append({**step, "advantage": None, "extras": {}})
        self._messages += written
        if await self._environment.is_completed(self._state):
            return Reply(is_done=True, reward=await self._score())

        if turn.is_last:
            self._state["completion"] = self._messages[len(self._state["prompt"]) :]
            return Reply(reward=await self._score())

        said = await self._environment.env_response(list(self._messages), self._state)
        self._messages += said

        if self._state.get("final_env_response"):
            await self._environment.is_completed(self._state)
            return Reply(is_done=True, reward=await self._score())

        return Reply(messages=said)

    async def close(self) -> None:
        """Do nothing: `is_completed` has already called the environment's cleanup."""

    async def _score(self) -> float:
        await self._environment.rubric.score_rollout(self._state, nullcontext())
        return float(self._state["reward"])


_made = cache(lambda make: make())


def write_rows(environment: Any, path: str) -> None:
    """Write the prompts of the environment's data set to a JSON lines file for `data.train_files`."""
    with Path(path).open("w", encoding="utf-8") as file:
        for row in environment.get_dataset():
            rest = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
            truth = {"style": "rule", "ground_truth": row.get("answer", "")}
            line = {
                "prompt": row["prompt"],
                "data_source": row.get("task", "verifiers"),
                "reward_model": truth,
                "extra_info": rest,
            }
            file.write(json.dumps(line, default=str) + "\n")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    return 0.0
