"""Rollout role of a run with an agent.

A sample is an episode whose turns engines generate and environments answer.
"""

from __future__ import annotations

from megarl.agents.protocol import Task
from megarl.batch.data_proto import DataProto
from megarl.config.schema import SamplingConfig
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

    def drain_spans(self) -> list[Span]:
        with self._replicas.exclusive():
            return [*super().drain_spans(), *self.environments.drain_spans()]

    def shutdown(self) -> None:
        super().shutdown()
        self.environments.shutdown()
