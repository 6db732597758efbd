"""Rollout role of the training loop, which generates a batch of samples from prompts.

Generation survives the death of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.agents.protocol import Task
from megarl.batch.data_proto import DataProto
from megarl.batch.token_rows import IMAGE_BYTES, with_prompt_rows
from megarl.config.schema import SamplingConfig
from megarl.controller.group import RoleGroup
from megarl.data.images import row_files
from megarl.rollout.driver.replicas import ExclusiveAccess
from megarl.rollout.driver.rollout_weights import RolloutWeights
from megarl.rollout.driver.sample_rows import RolloutOutput, sample_rows, with_prompts
from megarl.rollout.driver.scheduler import RequestScheduler
from megarl.rollout.interface import EngineFaultError, GenerationRequest, SamplingParameters, plan_requests
from megarl.tracking.timeline import Span

if TYPE_CHECKING:
    from megarl.rollout.episodes.episode_runner import EpisodeRunner


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Properties of the tokenizer that generation needs.

    Attributes:
        pad_token_id: Padding of responses.
        stop_token_ids: Tokens that end a response.
        max_response_length: Maximum tokens of a response.
        chat_time: Time that chat templates see in other processes. None: the time of their first use.
    """

    pad_token_id: int
    stop_token_ids: tuple[int, ...]
    max_response_length: int
    chat_time: datetime | None = None


class Rollout:
    """Handle to all replicas. Each request goes to the least loaded replica with room, in order of arrival.

    A replica that dies or hangs is restarted with the current weights. Its unfinished requests are sent again
    with the same seeds, so that they give the same samples.

    In a run with an agent, a sample is an episode whose turns engines generate and environments answer. They
    work concurrently, on different episodes. `response_mask` is True for tokens that the model generated. A
    batch then also has the token columns `answer_mask`, True in the last turn, and `environment_rewards`,
    each on the last token of its turn; and the arrays `num_turns`, `num_calls`, `call_errors` (kind ->
    number), `tool_s` and `episode_end` (B,). Generation also raises ProcessLimitError, RunError for an
    episode that was started too often, and WorkerError if a user's environment failed.

    Attributes:
        scheduler: Runs the requests on the replicas.
        episodes: Runs episodes on top of it; None without an agent.
    """

    def __init__(
        self,
        scheduler: RequestScheduler,
        weights: RolloutWeights,
        rules: TokenRules,
        seed: int,
        routes_of: SamplingConfig | None = None,
        episodes: EpisodeRunner | None = None,
    ) -> None:
        """Create the rollout.

        Args:
            weights: Weight sync of their engines.
            seed: Seed of the run.
            routes_of: Samples drawn with this configuration return the experts of their tokens. The engines
                must support it.
        """
        self._routes_of = routes_of
        self._replicas = scheduler.replicas
        self._weights = weights
        self._rules = rules
        self._seed = seed
        self.scheduler = scheduler
        self.episodes = episodes

    @property
    def runner(self) -> RequestScheduler | EpisodeRunner:
        """The scheduler, or the runner of episodes: it runs the requests that become samples."""
        return self.episodes or self.scheduler

    @property
    def replicas(self) -> Sequence[RoleGroup]:
        """Worker group of each replica, which changes when a replica is restarted."""
        return tuple(self._replicas.groups)

    def share_through(self, exclusive: ExclusiveAccess) -> None:
        """Declare that another thread uses the replicas from now on. Others get access by `exclusive`."""
        self._replicas.exclusive = exclusive

    @property
    def version(self) -> int:
        """Version of the weights that the engines have whenever they generate."""
        return self._weights.version

    # ---- generation

    def generate(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0
    ) -> DataProto:
        """Generate `sampling.n` samples of each prompt.

        The same prompts, weights, seed, step and generation give the same samples for any number of replicas.

        Args:
            sampling: Sampling configuration.
            step: The training step.
            generation: Distinguishes several generations of a step.

        Returns:
            A batch of B = prompts x n rows, with the samples of a prompt in consecutive rows. It has the
            prompts' columns (see with_prompt_rows); as token columns `responses`, `response_mask`,
            `rollout_log_probs` and `token_versions` (int32, the weight version that sampled a token, -1 for
            tokens that the model did not generate); `routed_experts` if the engines are asked for it; and the
            arrays `weight_version` (the oldest of a sample) and `finish_reason` (B,). `weight_version` in its
            meta information is the version of the last weight sync.

        Raises:
            EngineFaultError: An engine returned a sample that cannot be right.
            RequestRoutingError: A replica finished a request that it does not have.
            RestartLimitError: Too many replicas were restarted.
            RunError: An engine cannot generate a sample.
            ValueError: No engine can continue a prompt.
        """
        prompts = DataProto.from_dict(
            with_prompt_rows(prompts.columns), prompts.non_tensor_batch, prompts.meta_info
        )
        requests = self.requests(prompts, sampling, step, generation)

        # Engines that sleep or were restarted need the current weights before they get requests.
        self._weights.bring_in()
        version = self._weights.version
        samples: dict[int, RolloutOutput] = {}

        def deliver(request_id: int, replica: int, sample: RolloutOutput) -> None:
            # No weight sync happens in the meantime: another version means that an engine missed one.
            check_versions(replica, sample, oldest=version, newest=version)
            samples[request_id] = sample

        with self._replicas.exclusive():
            # These requests have priority: the trainer waits for them, but not for those generated ahead.
            delivers = [partial(deliver, request.request_id) for request in requests]
            numbers = self.runner.begin(requests, delivers, first=True)
            try:
                while len(samples) < len(requests):
                    self.runner.poll()
            finally:
                # After a failure, the rest of the samples is not needed.
                self.runner.cancel(numbers)

        rows = sample_rows([samples[request.request_id] for request in requests])
        return self.assemble(prompts, rows, version)

    def requests(
        self, prompts: DataProto, sampling: SamplingConfig, step: int, generation: int = 0, *, first: int = 0
    ) -> list[GenerationRequest]:
        """Plan one request per sample, with those of a prompt consecutive, and the task if it is an episode.

        The seeds are those of `generate` for a batch in which `first` other prompts come before these.
        """
        ids = [row.tolist() for row in prompts.ragged["prompts"].each()]
        arrays = prompts.non_tensor_batch
        planned = plan_requests(
            ids,
            self._parameters(sampling, step, generation),
            arrays.get("uid"),
            first=first,
            images=row_files(prompts.ragged) if IMAGE_BYTES in prompts.ragged else None,
        )
        if self.episodes is None:
            return planned

        columns = {name: arrays[name] for name in ("messages", "reward_model", "extra_info")}

        def with_task(place: int, request: GenerationRequest) -> GenerationRequest:
            of_row = {name: column[place // sampling.n] for name, column in columns.items()}
            return request._replace(task=Task(seed=request.sampling.seed, **of_row))

        return [with_task(place, request) for place, request in enumerate(planned)]

    def _parameters(self, sampling: SamplingConfig, step: int, generation: int) -> SamplingParameters:
        # The seed does not depend on the replica, so any number of replicas gives the same samples.
        return SamplingParameters(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=self._rules.max_response_length,
            stop_token_ids=self._rules.stop_token_ids,
            seed=int(np.random.SeedSequence([self._seed, step, generation]).generate_state(1)[0]),
            with_routes=sampling == self._routes_of,
        )

    def assemble(self, prompts: DataProto, rows: DataProto, version: int) -> DataProto:
        """Build the batch that `generate` returns, see with_prompts."""
        return with_prompts(prompts, rows, version, self._rules.pad_token_id)

    # ---- observation

    def drain_metrics(self) -> dict[str, float]:
        """Return metrics since the last call; see the methods of the runner."""
        with self._replicas.exclusive():
            return self.runner.drain_metrics()

    @property
    def num_restarts(self) -> int:
        """Number of replica restarts in this run."""
        return self._replicas.num_restarts

    def drain_spans(self) -> list[Span]:
        """Return the spans of all replicas and environments; see Replicas.drain_spans."""
        with self._replicas.exclusive():
            spans = self._replicas.drain_spans()
            return spans if self.episodes is None else spans + self.episodes.environments.drain_spans()

    def shutdown(self) -> None:
        """End the replicas and environments immediately."""
        self._replicas.shutdown()
        if self.episodes is not None:
            self.episodes.environments.shutdown()


def check_versions(replica: int, sample: RolloutOutput, *, oldest: int, newest: int) -> None:
    """Check the weight versions of a sample's tokens.

    Raises:
        EngineFaultError: A token's weights are older than `oldest`, the version that started the sample, or
            newer than `newest`, the version of the last weight sync.
    """
    versions = sample.weight_versions
    if not versions:  # an episode whose program failed
        return
    if not oldest <= versions[0] <= versions[-1] <= newest:
        raise EngineFaultError(
            f"rollout replica {replica} wrote a sample with the weight versions {versions}; it was begun "
            f"with version {oldest}, and the current weights are version {newest}"
        )
