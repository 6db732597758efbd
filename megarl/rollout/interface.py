"""What every inference engine offers: token ids in, samples out, weights from trainers, and memory given back
on request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megarl.config.schema import Device, ModelConfig, RolloutConfig
from megarl.machine.errors import RunError
from megarl.machine.files import read_json_object
from megarl.weights.plan import TensorSlices
from megarl.weights.receiver import EngineLink
from megarl.weights.tensors import Manifest

_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RolloutEngineSpec:
    """What an engine is made from. model: the policy; no weights are read from its folder. device: cpu or
    cuda.
    release_memory: the engine takes turns with others. returns_routes: samples may ask for their routes."""

    model: ModelConfig
    rollout: RolloutConfig
    device: Device
    release_memory: bool = False
    returns_routes: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How to continue each prompt.

    n: samples per prompt. temperature: 0 is greedy. top_k: the k most probable tokens, -1 for all; then
    top_p: of these the fewest whose probability reaches top_p. min_new_tokens: until then no token that would
    end the sample is drawn.
    stop_token_ids: end a sample, beside the model's own end tokens. ignore_eos: no token ends a sample (for
    benchmarks).
    with_routes: samples have `routed_experts`; of an engine that returns routes.
    seed: the same seed on the same weights gives the same sample, whatever else is generated at the same
    time. Raises ValueError that names the field.
    """

    max_new_tokens: int
    seed: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    with_routes: bool = False

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("max_new_tokens", self.max_new_tokens)):
            if value < 1:
                raise ValueError(f"sampling {name} is {value}; it must be at least 1")

        if not self.temperature >= 0:
            raise ValueError(
                f"sampling temperature is {self.temperature}; give 0 (greedy) or a positive number"
            )

        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling top_p is {self.top_p}; it must lie in (0, 1], 1 switches it off")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"sampling top_k is {self.top_k}; it must be at least 1, or -1 for all tokens")

        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"sampling min_new_tokens is {self.min_new_tokens}; it must lie between 0 and "
                f"max_new_tokens {self.max_new_tokens}"
            )


class GenerationRequest(NamedTuple):
    """One sample to be written. `request_id` is unique among those in flight; `sampling.n` is 1. uid: of the
    prompt."""

    request_id: int
    prompt: list[int]
    sampling: SamplingParameters
    uid: str = ""


class VersionSpan(NamedTuple):
    """The tokens of a sample from the end of the span before, or its beginning, up to `end` were drawn by the
    weights of `version`."""

    version: int
    end: int


class Sample(NamedTuple):
    """One continuation. `token_ids` (N,) int32 are what the model wrote, the end token included where it
    wrote one.

    log_probs: (N,) float32, THE contract of every engine (docs/logprobs.md): log_softmax(logits /
    temperature) of the token over the whole vocabulary, before top-k and top-p; with temperature 0,
    log_softmax(logits).
    finish_reason: "stop" where the last token ended it, "length" where max_new_tokens did.
    spans: which weights drew which tokens, in order; the last ends at N. More than one where weights were
    updated in the middle.
    routed_experts: a row of ROUTED_EXPERTS, of prompt and sample, where that was asked for.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    finish_reason: Literal["stop", "length"]
    spans: tuple[VersionSpan, ...]
    routed_experts: np.ndarray | None = None

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Of the weights that wrote it, in order."""
        return tuple(span.version for span in self.spans)

    @property
    def token_versions(self) -> np.ndarray:
        """(N,) int32: of the weights that drew each token."""
        lengths = np.diff([span.end for span in self.spans], prepend=0)
        return np.repeat(np.array(self.weight_versions, dtype=np.int32), lengths)


class FinishedRequest(NamedTuple):
    request_id: int
    sample: Sample


class FailedRequest(NamedTuple):
    """The engine works, and cannot write this sample; why is for who reads it."""

    request_id: int
    why: str


class RequestFailedError(RuntimeError):
    """As FailedRequest, where somebody waits for all samples."""


# What a run can change when the memory of an engine's device is full.
LESS_ENGINE_MEMORY = (
    "sequences at a time: {rollout.max_concurrency}; try half",
    "the engine's share of the device: {engine_share}; try 0.1 less",
    "more devices a replica: {rollout.tensor_parallel_size}",
    "weights on their way: {resharding.bucket_mb}",
    "roles that share its devices: {placement.strategy}",
)
ENGINE_ENDED = (
    "the engine's last words are above; if it ran out of memory:",
    *(f"  {line}" for line in LESS_ENGINE_MEMORY),
    "where it comes and goes, allow more restarts: {rollout.restart_limit, rollout.health_limit_s}",
)


class EngineDeadError(RunError):
    """The engine's processes ended, or make no progress. Start another; what was in flight is to be sent
    again."""

    hint = ENGINE_ENDED
    role = "rollout"


class RolloutEngine(ABC):
    """An engine is usable from the end of a complete weight update until it sleeps, is updated again, or is
    closed.

    In between it raises EngineStateError: no sample is ever written by half-loaded weights. Methods are
    called by one thread. Any method may raise EngineDeadError.
    """

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, in order; returns at once.

        Raises EngineStateError where the engine has no complete weights, ValueError for an empty prompt, a
        token id outside the vocabulary, or a prompt that leaves no room for `max_new_tokens`; then none of
        `requests` is queued.
        """

    @abstractmethod
    def collect(self, wait_s: float) -> list[FinishedRequest]:
        """What has finished since the last time, in the order of finishing; waits at most `wait_s` for the
        first to finish."""

    def failed(self) -> list[FailedRequest]:
        """Requests that have failed since the last time; `collect` ends its wait for them."""
        return []

    @abstractmethod
    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Forgets these requests, or all, where they are in flight."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ends the wait of the `collect` under way, or else that of the next one. Any thread may call it.

        An engine whose `collect` does not wait does nothing.
        """

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParameters) -> list[Sample]:
        """`sampling.n` samples of each prompt, prompt-major: those of prompt i are [i * n, (i + 1) * n).
        Raises as `submit`."""
        requests = plan_requests(prompts, sampling)
        self.submit(requests)
        samples: dict[int, Sample] = {}

        while len(samples) < len(requests):
            samples |= dict(self.collect(_WAIT_S))
            # All samples are wanted, so the first failure ends the wait.
            if failed := self.failed():
                raise RequestFailedError(failed[0].why)

        return [samples[request.request_id] for request in requests]

    @abstractmethod
    def needed_slices(self, manifest: Manifest) -> list[TensorSlices]:
        """Of a model with these tensors, what each of its ranks keeps.

        Raises WeightTransferError where the manifest is not that of the engine's model; EngineStateError
        while asleep or closed.
        """

    @abstractmethod
    def join_weights(self, links: Sequence[EngineLink]) -> None:
        """Where its ranks get their weights from, of each rank, in the place of what was joined before;
        returns when all are there."""

    @abstractmethod
    def leave_weights(self) -> None:
        """Lets go of the trainers, whatever is under way."""

    @abstractmethod
    def begin_weight_update(self, manifest: Manifest) -> None:
        """From here to `end_weight_update` the engine refuses to generate.

        Pauses generation: requests in flight continue after the update. An update that was begun and not
        ended is dropped. Raises as `needed_slices`, and then leaves the engine as it was.
        """

    @abstractmethod
    def receive_weights(self) -> None:
        """Takes all weights from the trainers that it joined, while they send them; returns when all are
        there.

        Raises WeightTransferError where a trainer is gone or none was joined; EngineStateError outside an
        update.
        """

    @abstractmethod
    def load_folder(self, folder: Path) -> None:
        """All weights from a Hugging Face folder with safetensors. Raises WeightTransferError for tensors
        that are not the manifest's; EngineStateError outside an update."""

    @abstractmethod
    def end_weight_update(self, version: int) -> None:
        """Stamps the version, flushes the prefix cache, resumes generation: the engine is usable.

        Raises WeightTransferError that names tensors missing or doubled: then it stays unusable.
        """

    @abstractmethod
    def checksums(self) -> dict[str, int]:
        """Hugging Face name -> checksum (weights/checksum.py) of the weights as the engine holds them, read
        back from its model.

        Raises EngineStateError without complete weights.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Gives back the memory of weights and cache. Sleeping twice is sleeping. Requests in flight are
        forgotten."""

    @abstractmethod
    def wake(self) -> None:
        """Takes the memory of the weights again. They are gone: the engine is usable after the next update.
        Waking twice is waking."""

    @abstractmethod
    def wake_cache(self) -> None:
        """Takes the memory of the cache again, after an update; until then it does not generate. Nothing
        where it has it."""

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """Of the complete weights at hand, None where there are none."""

    @abstractmethod
    def process_ids(self) -> list[int]:
        """Of the processes that it consists of beside the caller's; empty for an engine inside it."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and what it started."""


def plan_requests(
    prompts: Sequence[list[int]],
    sampling: SamplingParameters,
    uids: Sequence[str] | np.ndarray | None = None,
    *,
    first: int = 0,
) -> list[GenerationRequest]:
    """One request per sample, prompt-major, each with a seed of its own that depends on its place alone.
    uids: of the prompts. first: place of the first prompt, where others come before it."""
    names = [""] * len(prompts) if uids is None else uids
    # A seed depends on the sample's place alone: generate from place 0 on, and skip the earlier ones.
    seeds = np.random.SeedSequence(sampling.seed).generate_state((first + len(prompts)) * sampling.n)[
        first * sampling.n :
    ]
    return [
        GenerationRequest(
            index * sampling.n + sample,
            prompt,
            replace(sampling, n=1, seed=int(seeds[index * sampling.n + sample])),
            names[index],
        )
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]


def check_request(request: GenerationRequest, vocab_size: int, max_length: int) -> None:
    """max_length: tokens of prompt and sample together. Raises ValueError, see `RolloutEngine.submit`."""
    prompt = request.prompt
    max_new_tokens = request.sampling.max_new_tokens
    name = f"the prompt of request {request.request_id}"
    if not prompt:
        raise ValueError(f"{name} is empty; a model needs at least one token to continue")

    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(
            f"{name} has token ids {min(prompt)}..{max(prompt)}, the model's vocabulary is "
            f"0..{vocab_size - 1}"
        )

    if len(prompt) + max_new_tokens > max_length:
        raise ValueError(
            f"{name} of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's "
            f"max_position_embeddings {max_length}; shorten the prompts or max_new_tokens"
        )


def end_token_ids(folder: str | Path) -> frozenset[int]:
    """generation_config.json decides where it is there: chat models end turns with another token than
    documents; else config.json.

    Raises ValueError for a file that cannot be read, OSError.
    """
    decides = next(
        file for name in ("generation_config.json", "config.json") if (file := Path(folder) / name).is_file()
    )
    try:
        found = read_json_object(decides).get("eos_token_id")
    except ValueError as error:
        raise ValueError(f"{decides}: {error}") from error

    # The field may be missing, null, a number or a list.
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(index, int) and index >= 0 for index in ids):
        raise ValueError(
            f"{decides}: eos_token_id is {found!r}, but must be a token's number or a list of such"
        )

    return frozenset(ids)
