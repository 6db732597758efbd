"""Rollout role of a run with an agent.

A sample is an episode whose turns engines generate and environments answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from megarl.agents.protocol import Task
from megarl.agents.trajectory import EpisodeEnd, Trajectory
from megarl.batch.branches import BRANCH, FAILURE
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.rollout.driver.finished_groups import RolloutOutput
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.driver.scheduler import Deliver, OnFailure, ReplicaState, RequestState
from megarl.rollout.episodes.episode_runner import EpisodeRunner
from megarl.rollout.interface import GenerationRequest
from megarl.tracking.timeline import Span


class EpisodeRollout(Rollout):
    """Rollout of episodes. Engines and environments work concurrently, on different episodes.

    `response_mask` is True for tokens that the model generated. A batch also has the token columns
    `answer_mask`, True in the last turn, and `environment_rewards`, each on the last token of its turn; and
    the arrays `num_turns`, `num_calls`, `call_errors` (kind -> number), `tool_s` and `episode_end` (B,).

    Generation also raises ProcessLimitError, RunError for an episode that was started too often, and
    WorkerError if a user's environment failed.
    """

    kind = Trajectory

    def __init__(self, runner: EpisodeRunner, weights: RolloutWeights, rules: TokenRules, seed: int) -> None:
        super().__init__(runner.scheduler, weights, rules, seed)
        self.environments = runner.environments
        self._runner = runner

    @property
    def is_at_work(self) -> bool:
        return self._runner.is_at_work

    def begin(
        self,
        prompts: DataProto,
        rows: Sequence[int],
        requests: Sequence[GenerationRequest],
        delivers: Sequence[Deliver[RolloutOutput]],
        on_failure: OnFailure | None = None,
        *,
        first: bool = False,
    ) -> Callable[[], None]:
        tasks = [_task(prompts, row, request) for row, request in zip(rows, requests, strict=True)]
        numbers = self._runner.begin(requests, tasks, delivers, on_failure=on_failure, first=first)

        return lambda: self._runner.cancel(numbers)

    def poll(self, wait_s: float = math.inf) -> None:
        """Poll engines and environments; see EpisodeRunner.poll."""
        self._runner.poll(wait_s)

    def assemble(self, prompts: DataProto, samples: Sequence[RolloutOutput], version: int) -> DataProto:
        return batch_of_trajectories(
            prompts, cast("Sequence[Trajectory]", samples), version, self._rules.pad_token_id
        )

    def drain_metrics(self) -> dict[str, float]:
        """Return the metrics of Rollout and of the environments.

        `agent/num_restarts` counts the restarted environment processes of this run. `agent/waiting_share` is
        the share of the time of ended episodes in which they waited for tools.
        """
        with self._replicas.exclusive():
            # The generation thread updates the same counters.
            share = self._runner.drain_wait()
        of_waits = {} if share is None else {"agent/waiting_share": share}
        return {
            **super().drain_metrics(),
            "agent/num_restarts": float(self.environments.num_restarts),
            **of_waits,
        }

    def snapshot(self) -> tuple[list[RequestState], list[ReplicaState]]:
        """Return the result of Rollout.snapshot plus the episodes that wait for tools."""
        requests, replicas = super().snapshot()
        return sorted([*requests, *self._runner.waiting()], key=lambda one: -one.seconds), replicas

    def drain_spans(self) -> list[Span]:
        with self._replicas.exclusive():
            return [*super().drain_spans(), *self.environments.drain_spans()]

    def shutdown(self) -> None:
        super().shutdown()
        self.environments.shutdown()


def _task(prompts: DataProto, row: int, request: GenerationRequest) -> Task:
    of_row = {
        name: prompts.non_tensor_batch[name][row] for name in ("messages", "reward_model", "extra_info")
    }
    return Task(seed=request.sampling.seed, **of_row)


def batch_of_trajectories(
    prompts: DataProto, trajectories: Sequence[Trajectory], version: int, pad_token_id: int
) -> DataProto:
    """Build the batch that EpisodeRollout.generate returns. `prompts` has one row per episode.

    The episode of an agent program becomes one row per branch, see batch/branches.py.
    """
    assert len(trajectories) == len(prompts)
    episodes = list(trajectories)
    if any(episode.branches or episode.failure for episode in episodes):
        prompts = _prompts_of_branches(prompts, episodes)
        trajectories = [row for episode in episodes for row in episode.rows]
        episodes = [episode for episode in episodes for _ in episode.rows]
    answers = [_answer_mask(trajectory) for trajectory in trajectories]

    # Token columns. All of them have the lengths of the responses.
    tensors = {
        **prompts.columns,
        "responses": RaggedTensor.of_rows(
            [each.token_ids for each in trajectories], torch.int32, padding=pad_token_id
        ),
        "response_mask": RaggedTensor.of_rows([each.mask for each in trajectories], torch.bool),
        "answer_mask": RaggedTensor.of_rows(answers, torch.bool),
        "rollout_log_probs": RaggedTensor.of_rows([each.log_probs for each in trajectories], torch.float32),
        "token_versions": RaggedTensor.of_rows(
            [each.token_versions for each in trajectories], torch.int32, padding=-1
        ),
        "environment_rewards": RaggedTensor.of_rows([each.rewards for each in trajectories], torch.float32),
    }
    # Arrays describe the whole episode on each of its rows.
    ends = [each.end for each in episodes]
    arrays: dict[str, list] = {
        "weight_version": [min(each.weight_versions, default=version) for each in trajectories],
        "finish_reason": ["length" if end is EpisodeEnd.length else "stop" for end in ends],
        "episode_end": [end.value for end in ends if end is not None],
        "num_turns": [each.num_turns for each in episodes],
        "num_calls": [each.num_calls for each in episodes],
        "call_errors": [{kind.value: count for kind, count in each.call_errors.items()} for each in episodes],
        "tool_s": [each.tool_s for each in episodes],
    }

    return DataProto.from_dict(
        tensors, {**prompts.non_tensor_batch, **arrays}, {**prompts.meta_info, "weight_version": version}
    )


def _prompts_of_branches(prompts: DataProto, episodes: Sequence[Trajectory]) -> DataProto:
    """Return one row per branch, with the branch's own prompt, and the arrays BRANCH and `failure`."""
    index = [number for number, episode in enumerate(episodes) for _ in episode.rows]
    rows = prompts.select_idxs(index)
    own = RaggedTensor.of_rows(
        [row.prompt for episode in episodes for row in episode.rows], torch.int32, on_left=True
    )

    arrays = {
        BRANCH: [place for episode in episodes for place in range(len(episode.rows))],
        FAILURE: [episode.failure for episode in episodes for _ in episode.rows],
    }

    return DataProto.from_dict(
        {**rows.columns, "prompts": own}, {**rows.non_tensor_batch, **arrays}, rows.meta_info
    )


def _answer_mask(trajectory: Trajectory) -> list[bool]:
    # The last segment is the answer: an episode ends with a turn of the model, unless its program failed.
    length = len(trajectory.token_ids)
    last = len(trajectory.segments[-1])
    return [False] * (length - last) + [trajectory.failure is None] * last
