"""Environments of `reasoning_gym`: its procedural tasks, scored by their own verifiers.

An episode has one turn. The arguments are those of the task's configuration, such as `min_terms`, which set
its difficulty. `composite` is the task that mixes several others.

The file is also a reward function: it scores the rows of `megarl data` without an endpoint, each by the
verifier of its own task.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from reasoning_gym import create_dataset
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset


class ReasoningGym:
    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._arguments = json.dumps(arguments)

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the entries of a data set. Its parameters lead back to each of them."""
        info = {"task": self._name, "arguments": self._arguments, "size": size, "seed": seed}
        for index, entry in enumerate(_dataset(**info)):
            yield {
                "prompt": [{"role": "user", "content": entry["question"]}],
                "data_source": f"reasoning_gym/{self._name}",
                "reward_model": {"style": "rule", "ground_truth": entry["answer"] or ""},
                "extra_info": {**info, "index": index},
            }

    async def play(self, task: dict[str, Any], endpoint: Any) -> tuple[float, dict[str, float]]:
        answer = await endpoint.chat(task["messages"])
        score = _score(answer["content"] or "", task["extra_info"])
        return score, {"is_right": score == 1.0}


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncGenerator[ReasoningGym]:
    environment = ReasoningGym(name, arguments)
    async for _ in environment.rows(1, 0):  # a wrong name or argument is an error now
        pass
    yield environment


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Return the score of the verifier of the row's task, between 0 and 1."""
    return _score(solution_str, extra_info)


def _score(answer: str, info: Mapping[str, Any]) -> float:
    dataset = _dataset(info["task"], info["arguments"], info["size"], info["seed"])
    return float(dataset.score_answer(answer.strip(), dataset[info["index"]]))


@cache
def _dataset(task: str, arguments: str, size: int, seed: int) -> ProceduralDataset:
    values = json.loads(arguments)
    if "datasets" in values:  # of `composite`
        values["datasets"] = [DatasetSpec(**each) for each in values["datasets"]]
    return create_dataset(task, size=size, seed=seed, **values)
