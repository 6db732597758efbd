"""Environments of `verifiers` (`verifiers.v1`): tasksets, and the harnesses and tools that play them.

The name is that of an installed taskset. The arguments are the fields of its configuration (`EnvConfig`),
such as `{taskset: {split: train}, agent: {harness: {id: bash}}}`. Unless they name a harness, that of the
taskset plays, or else `null`, the chat loop of verifiers. Programs run as processes of this machine
(`subprocess`), unless the arguments name another runtime.

Each episode has its own interception server, because the servers of verifiers keep a client for each key.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf

_DEFAULT_HARNESS = "bash"  # of tasksets without one of their own; it executes commands of the model


class VerifiersEnvironment:
    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        config = vf.resolve_env_config({**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}})
        for role in _roles(config):
            agent = getattr(config, role)
            if "runtime" not in agent.model_fields_set:
                agent.runtime = vf.SubprocessConfig()
            if agent.harness is None and vf.default_harness_id(name) == _DEFAULT_HARNESS:
                agent.harness = vf.harness_config_type("null")(id="null")
        self._name = name
        self._environment = vf.load_environment(config)
        self._numbers = itertools.count()

    async def rows(self, size: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Yield tasks, shuffled if the taskset is finite."""
        tasks = self._environment.taskset
        for task in (tasks.shuffle(seed) if tasks.bounded else tasks).take(size):
            yield {
                "prompt": _messages(task.data),
                "data_source": f"verifiers/{self._name}",
                "reward_model": {"style": "rule", "ground_truth": str(getattr(task.data, "answer", ""))},
                "extra_info": {"task": task.data.model_dump_json()},
            }

    async def play(self, task: dict[str, Any], endpoint: Any) -> tuple[float, dict[str, float]]:
        taskset = self._environment.taskset
        kind = type(taskset).task_type()
        data = kind.data_type().model_validate_json(task["extra_info"]["task"])

        # The client reads its key from a variable.
        variable = f"MEGARL_KEY_{next(self._numbers)}"
        os.environ[variable] = endpoint.api_key
        client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
        environment = copy.copy(self._environment)
        try:
            async with environment.serving():
                context = vf.ModelContext(model="policy", client=client)
                episode = await environment.run_episode(kind(data, taskset.config.task), context)
        finally:
            del os.environ[variable]

        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items()}
        rewards = {
            name: reward.score for trace in episode.traces for name, reward in trace.rewards.items() if reward
        }
        return sum(trace.reward for trace in episode.traces), {**metrics, **rewards}


@asynccontextmanager
async def open_environment(name: str, arguments: dict[str, Any]) -> AsyncGenerator[VerifiersEnvironment]:
    yield VerifiersEnvironment(name, arguments)


def _roles(config: vf.EnvConfig) -> list[str]:
    return [name for name in type(config).model_fields if isinstance(getattr(config, name), vf.AgentConfig)]


def _messages(data: vf.TaskData) -> list[dict[str, Any]]:
    """Return the prompt of a task as messages. A task whose user begins has its name instead."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str) or data.prompt is None:
        return [*system, {"role": "user", "content": data.prompt or data.name or ""}]
    return [*system, *(json.loads(message.model_dump_json(exclude_none=True)) for message in data.prompt)]
