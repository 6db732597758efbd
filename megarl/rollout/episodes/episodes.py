"""Rollout role of a run with an agent.

A sample is an episode whose turns engines generate and environments answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from megarl.agents.protocol import Task
from megarl.agents.trajectory import EpisodeEnd, Trajectory
from megarl.batch.branches import BRANCH, FAILURE
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.schema import SamplingConfig
from megarl.rollout.driver.finished_groups import RolloutOutput
from megarl.rollout.driver.rollout import Rollout, TokenRules
from megarl.rollout.driver.rollout_weights import RolloutWeights
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
        self.runner = runner

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]:
        """Return the requests of Rollout.requests with the tasks of their episodes."""
        planned = super().requests(prompts, sampling, step, generation, first=first)
        columns = {
            name: prompts.non_tensor_batch[name] for name in ("messages", "reward_model", "extra_info")
        }

        def task(place: int, seed: int) -> Task:
            row = place // sampling.n
            return Task(seed=seed, **{name: column[row] for name, column in columns.items()})

        return [
            request._replace(task=task(place, request.sampling.seed)) for place, request in enumerate(planned)
        ]

    def assemble(self, prompts: DataProto, samples: Sequence[RolloutOutput], version: int) -> DataProto:
        return batch_of_trajectories(
            prompts, cast("Sequence[Trajectory]", samples), version, self._rules.pad_token_id
        )

    def drain_spans(self) -> list[Span]:
        with self._replicas.exclusive():
            return [*super().drain_spans(), *self.environments.drain_spans()]

    def shutdown(self) -> None:
        super().shutdown()
        self.environments.shutdown()


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
