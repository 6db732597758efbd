"""The rollout role of a run with an agent: a sample is an episode, whose turns engines write and environments answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from megarl.agents.episode import AnswerTurn, Episode, EpisodeGivenUpError, EpisodeLimits, TurnPlace, WriteTurn
from megarl.agents.protocol import Task
from megarl.agents.trajectory import EpisodeEnd, Trajectory
from megarl.batch.data_proto import DataProto
from megarl.batch.ragged import RaggedTensor
from megarl.config.errors import RunError
from megarl.config.schema import SamplingConfig
from megarl.roles.environments import Environments
from megarl.roles.pump import EngineFaultError, RolloutLimits
from megarl.roles.replicas import Replicas
from megarl.roles.rollout import Rollout, Scoring, TokenRules
from megarl.roles.weights import RolloutWeights
from megarl.rollout.interface import FinishedRequest, GenerationRequest
from megarl.tracking.timeline import Span
from megarl.workers.environment import TurnOrder

_TURN_S = 0.02  # that engines are waited for while environments work, and the other way round


class EpisodeRollout(Rollout):
    """Engines and environments work at the same time, on different episodes."""

    def __init__(
        self,
        replicas: Replicas,
        weights: RolloutWeights,
        rules: TokenRules,
        limits: RolloutLimits,
        seed: int,
        environments: Environments,
        of_episodes: EpisodeLimits,
    ) -> None:
        super().__init__(replicas, weights, rules, limits, seed)
        self.environments, self._of_episodes = environments, of_episodes
        self._numbers = itertools.count()  # of episodes, never used twice, so that what comes late is known

    def generate(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, scoring: Scoring | None = None
    ) -> DataProto:
        """As Rollout.generate, where `response_mask` is True for what the model wrote. Beside it, of the same tokens: `answer_mask`, True
        in the last turn, and `environment_rewards`, each on the last token of its turn; and the arrays `num_turns`, `num_calls`,
        `call_errors` (kind -> number), `tool_s` and `episode_end` (B,).

        Raises also EnvironmentLimitError, RunError for an episode that was begun too often, and WorkerError where a user's environment
        failed.
        """
        requests = self.requests(prompts, sampling, step, generation)
        rows = prompts.repeat(sampling.n)
        arrays = rows.non_tensor_batch
        tasks = [
            Task(
                messages=arrays["messages"][row],
                reward_model=arrays["reward_model"][row],
                extra_info=arrays["extra_info"][row],
                seed=request.sampling.seed,
            )
            for row, request in enumerate(requests)
        ]
        self._weights.bring_in()
        version, n, padding = self._weights.version, sampling.n, self._rules.pad_token_id
        ended: dict[int, Trajectory] = {}
        missing, whole = [n] * len(prompts), list[int]()  # samples of each prompt, and the prompts that wait to be scored

        def end(row: int, trajectory: Trajectory) -> None:
            ended[row] = trajectory
            missing[row // n] -= 1
            whole.extend([] if missing[row // n] else [row // n])
            if scoring is not None and whole and len(ended) < len(requests) and scoring.may_begin:
                of_whole = [ended[prompt * n + place] for prompt in whole for place in range(n)]
                scoring.begin(batch_of_trajectories(prompts.select_idxs(whole).repeat(n), of_whole, version, padding))
                whole.clear()

        with self._replicas.alone():
            self._play(requests, tasks, version, end)
        return batch_of_trajectories(rows, [ended[row] for row in range(len(requests))], version, padding)

    def _play(
        self, requests: Sequence[GenerationRequest], tasks: Sequence[Task], version: int, end: Callable[[int, Trajectory], None]
    ) -> None:
        """end: gets each trajectory with the place of its request."""
        episodes = {next(self._numbers): Episode(each.prompt, each.sampling.seed, self._of_episodes) for each in requests}
        given = dict(zip(episodes, zip(requests, tasks, strict=True), strict=True))
        row_of = {number: row for row, number in enumerate(episodes)}
        going, asked = set(episodes), list[int]()

        def deliver_to(number: int, place: TurnPlace) -> Callable[[int, FinishedRequest], None]:
            def deliver(replica: int, finished: FinishedRequest) -> None:
                sample = finished.sample
                if sample.weight_versions != (version,):
                    raise EngineFaultError(
                        f"rollout replica {replica} wrote a turn with the weight versions {sample.weight_versions}; the weights at hand "
                        f"are version {version}"
                    )
                if episodes[number].wrote(place, sample.token_ids, sample.log_probs, sample.token_versions, sample.finish_reason):
                    advance(number)

            return deliver

        def advance(number: int) -> None:
            (request, task), step = given[number], episodes[number].next
            if isinstance(step, WriteTurn):
                sampling = replace(request.sampling, max_new_tokens=step.max_new_tokens, seed=step.seed)
                turn = request._replace(prompt=step.token_ids, sampling=sampling)
                asked.extend(self.pump.add([turn], deliver_to(number, step.place), first=step.place.turn > 0))
            elif isinstance(step, AnswerTurn):
                self.environments.order(TurnOrder(number, task, step))
            else:
                self.environments.end(number)
                going.remove(number)
                end(row_of[number], episodes[number].trajectory)

        try:
            for number in episodes:
                advance(number)
            while going or self.environments.is_busy:
                self.pump.turn(_TURN_S if self.environments.is_busy else float("inf"))
                reports, lost = self.environments.turn(0.0 if self.pump.num_unfinished else _TURN_S)
                for report in reports:
                    episode = episodes[report.episode]
                    if episode.timed_out(report.place) if report.answer is None else episode.answered(report.place, report.answer):
                        advance(report.episode)
                for number in lost:
                    self._begin_again(episodes[number], given[number][0])
                    advance(number)
        finally:
            self.pump.take_back(asked)
            for number in going:
                self.environments.end(number)

    def _begin_again(self, episode: Episode, request: GenerationRequest) -> None:
        try:
            episode.lost_environment(episode.attempt)
        except EpisodeGivenUpError as error:
            raise RunError(f"the episode of prompt {request.uid}: {error}; see the words of its process above") from error

    def drain_metrics(self) -> dict[str, float]:
        """Also `agent/num_restarts`, of processes of environments in this run."""
        return {**super().drain_metrics(), "agent/num_restarts": float(self.environments.num_restarts)}

    def drain_spans(self) -> list[Span]:
        return [*super().drain_spans(), *self.environments.drain_spans()]

    def shutdown(self) -> None:
        super().shutdown()
        self.environments.shutdown()


def batch_of_trajectories(prompts: DataProto, trajectories: Sequence[Trajectory], version: int, pad_token_id: int) -> DataProto:
    """What EpisodeRollout.generate gives; `prompts` has a row for each episode."""
    assert len(trajectories) == len(prompts)
    answers = [_answer_mask(trajectory) for trajectory in trajectories]
    tensors = {
        **prompts.columns,
        "responses": RaggedTensor.of_rows([each.token_ids for each in trajectories], torch.int32, padding=pad_token_id),
        "response_mask": RaggedTensor.of_rows([each.mask for each in trajectories], torch.bool),
        "answer_mask": RaggedTensor.of_rows(answers, torch.bool),
        "rollout_log_probs": RaggedTensor.of_rows([each.log_probs for each in trajectories], torch.float32),
        "token_versions": RaggedTensor.of_rows([each.token_versions for each in trajectories], torch.int32, padding=-1),
        "environment_rewards": RaggedTensor.of_rows([each.rewards for each in trajectories], torch.float32),
    }
    ends = [each.end for each in trajectories]
    arrays: dict[str, list] = {
        "weight_version": [version] * len(trajectories),
        "finish_reason": ["length" if end is EpisodeEnd.length else "stop" for end in ends],
        "episode_end": [end.value for end in ends if end is not None],
        "num_turns": [each.num_turns for each in trajectories],
        "num_calls": [each.num_calls for each in trajectories],
        "call_errors": [{kind.value: count for kind, count in each.call_errors.items()} for each in trajectories],
        "tool_s": [each.tool_s for each in trajectories],
    }
    return DataProto.from_dict(tensors, {**prompts.non_tensor_batch, **arrays}, {**prompts.meta_info, "weight_version": version})


def _answer_mask(trajectory: Trajectory) -> list[bool]:
    length, last = len(trajectory.token_ids), len(trajectory.segments[-1])
    return [False] * (length - last) + [True] * last
