"""Tasks of `harbor`: an instruction, an environment of its own, and tests that score what an agent did.

The name is the folder of a task, or a folder of tasks, such as `harbor download` writes. The arguments are
the fields of harbor's trial (`TrialConfig`), such as `{agent: {name: terminus-2}, environment: {type:
docker}}`. By default, the agent is terminus-2 and the environment is Docker. The agent finds the model by its
`base_url`, or the variable `OPENAI_BASE_URL`, and by `OPENAI_API_KEY`.

The reward is the one that harbor calls `reward`, or else the mean of all.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from harbor.agents.factory import AgentFactory
from harbor.models.task.task import Task
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

_TASK_FILE = "task.toml"


class HarborEnvironment:
    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        folder = Path(name)
        folders = [folder] if (folder / _TASK_FILE).exists() else sorted(folder.iterdir())
        self._tasks = [each for each in folders if (each / _TASK_FILE).exists()]
        if not self._tasks:
            raise ValueError(f"{name} is no folder with {_TASK_FILE}, and neither are the folders in it")
        self._arguments = arguments
        self._config(self._tasks[0], None, "")  # a wrong argument is an error now

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Yield the tasks, shuffled."""
        tasks = list(self._tasks)
        random.Random(seed).shuffle(tasks)
        for folder in tasks[:size]:
            yield {
                "prompt": [{"role": "user", "content": Task(folder).instruction}],
                "data_source": f"harbor/{folder.parent.name}",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"task": str(folder.absolute())},
            }

    async def play(self, task: dict[str, Any], endpoint: Any) -> tuple[float, dict[str, float]]:
        with tempfile.TemporaryDirectory(prefix="megarl-harbor-") as folder:
            trial = await Trial.create(self._config(Path(task["extra_info"]["task"]), endpoint, folder))
            result = await trial.run()
        if result.exception_info is not None:
            raise RuntimeError(
                f"{result.exception_info.exception_type}: {result.exception_info.exception_message}"
            )
        rewards = (result.verifier_result.rewards if result.verifier_result else None) or {}
        if not rewards:
            raise RuntimeError("the verifier of the task has given no reward")
        mean = sum(rewards.values()) / len(rewards)
        return rewards.get("reward", mean), rewards

    def _config(self, task: Path, endpoint: Any, trials: str) -> TrialConfig:
        given = self._arguments.get("agent", {})
        usual = {"model_name": "openai/policy"}
        if "import_path" not in given:
            usual["name"] = "terminus-2"
        values = {"task": {"path": task}, "trials_dir": Path(trials), "agent": {**usual, **given}}
        config = TrialConfig.model_validate({**self._arguments, **values})
        if endpoint is None:
            return config

        config.agent.env |= {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        # Other agents find the address by the variable.
        if AgentFactory.get_agent_class_from_config(config.agent).MODEL_CONNECTION is not None:
            config.agent.base_url = endpoint.base_url
        return config


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncGenerator[HarborEnvironment]:
    yield HarborEnvironment(name, arguments)
