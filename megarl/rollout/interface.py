"""Interface of inference engines, which generate samples from token ids.

Engines receive their weights from trainers, and free memory on request. The states between "has no weights"
and "closed", and when an engine may generate, are the same for every engine (`EngineLifecycle`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample
from megarl.config.schema import Device, ModelConfig, RolloutConfig
from megarl.machine.errors import RunError, counted
from megarl.machine.files import read_json_object
from megarl.models.architecture import LoRA
from megarl.weights.sync.worker import ReceivingEngine
from megarl.weights.tensors import Manifest, WeightReceipt

_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class RolloutEngineSpec:
    """Specification of an engine.

    Attributes:
        model: The policy. No weights are read from its folder.
        device: cpu or cuda.
        release_memory: Whether the engine time-shares its device with other roles.
        returns_routes: Whether samples may request their routes.
        fp32_lm_head: Whether logits of 16-bit weights are computed in float32, as in the trainer.
        lora: Adapters that the engine applies itself. None: there are none, or they are merged.
    """

    model: ModelConfig
    rollout: RolloutConfig
    device: Device
    release_memory: bool = False
    returns_routes: bool = False
    fp32_lm_head: bool = False
    lora: LoRA | None = None


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """Sampling parameters of a request.

    Attributes:
        n: Samples per prompt.
        temperature: 0 is greedy.
        top_k: Keep the k most probable tokens; -1 keeps all.
        top_p: After top_k, keep the smallest set of tokens whose probability reaches top_p.
        min_new_tokens: Before that many tokens, no token that would end the sample is drawn.
        stop_token_ids: Tokens that end a sample, in addition to the model's own end tokens.
        ignore_eos: No token ends a sample (for benchmarks).
        with_routes: Samples have `routed_experts`; requires an engine that returns routes.
        seed: The same seed on the same weights gives the same sample, whatever else is generated at the same
            time.

    Raises:
        ValueError: A value is invalid; the message names the field.
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

        # The negation also refuses NaN.
        if not self.temperature >= 0:
            raise ValueError(
                f"sampling temperature is {self.temperature}; give 0 (greedy) or a positive number"
            )

        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling top_p is {self.top_p}; it must lie in (0, 1], 1 disables it")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"sampling top_k is {self.top_k}; it must be at least 1, or -1 for all tokens")

        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"sampling min_new_tokens is {self.min_new_tokens}; it must lie between 0 and "
                f"max_new_tokens {self.max_new_tokens}"
            )


class GenerationRequest(NamedTuple):
    """A request for one sample.

    Attributes:
        request_id: Unique among the requests in flight.
        sampling: Its `n` is 1.
        uid: The uid of the prompt.
        images: The image files of the prompt, whose tokens it contains.
        task: The task of the episode that it begins. Engines get requests without it.
    """

    request_id: int
    prompt: list[int]
    sampling: SamplingParameters
    uid: str = ""
    images: tuple[bytes, ...] = ()
    task: Task | None = None


class RequestFailedError(RuntimeError):
    """The engine works but cannot write this sample. The message is for the user."""


# The id of a request, and its sample or why there is none.
type EndedRequest = tuple[int, Sample | RequestFailedError]


class EnginePart(ABC):
    """The part of an engine that runs on one node."""

    @abstractmethod
    def process_ids(self) -> list[int]:
        """Return the ids of its processes other than the caller's; empty for an engine in this process."""

    @abstractmethod
    def close(self) -> None:
        """End it and the processes that it started."""


class RolloutEngine(EnginePart, ReceivingEngine):
    """An inference engine, as its callers see it: all of it, or the part on the first of its nodes.

    It is usable from the end of a complete weight update until it sleeps, is updated again, or is closed.

    At other times it raises EngineStateError, so that no sample is written by half-loaded weights. One thread
    calls the methods. Any method may raise EngineDeadError.
    """

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests in order, without blocking. If an error is raised, none of them is queued.

        Raises:
            EngineStateError: The engine has no complete weights.
            ValueError: A prompt is empty, has a token id outside the vocabulary, or leaves no room for
                `max_new_tokens`.
        """

    @abstractmethod
    def collect(self, wait_s: float) -> Sequence[EndedRequest]:
        """Return the requests that ended since the last call, in order.

        Waits at most `wait_s` for the first one.
        """

    @abstractmethod
    def abort(self, request_ids: Collection[int] | None = None) -> None:
        """Cancel these requests, or all, if they are in flight."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the wait of the current `collect`, or else of the next one. Thread-safe.

        An engine whose `collect` does not wait does nothing.
        """

    def generate(self, prompts: Sequence[list[int]], sampling: SamplingParameters) -> list[Sample]:
        """Generate `sampling.n` samples of each prompt, in the order of the prompts.

        Those of prompt i are [i * n, (i + 1) * n). Raises the errors of `submit`.
        """
        requests = plan_requests(prompts, sampling)
        self.submit(requests)
        samples: dict[int, Sample] = {}

        while len(samples) < len(requests):
            for request_id, sample in self.collect(_WAIT_S):
                # All samples are needed, so the first failure ends the wait.
                if isinstance(sample, RequestFailedError):
                    raise sample
                samples[request_id] = sample

        return [samples[request.request_id] for request in requests]

    @abstractmethod
    def sleep(self) -> None:
        """Free the memory of weights and cache.

        Calling it twice is allowed. Requests in flight are dropped.
        """

    @abstractmethod
    def wake(self) -> None:
        """Allocate the memory of the weights again.

        Their contents are lost: the engine is usable after the next update. Calling it twice is allowed.
        """

    @abstractmethod
    def wake_cache(self) -> None:
        """Allocate the memory of the cache again, after an update; before that, the engine does not generate.

        Does nothing if the memory is allocated.
        """


def plan_requests(
    prompts: Sequence[list[int]],
    sampling: SamplingParameters,
    uids: Sequence[str] | np.ndarray | None = None,
    *,
    first: int = 0,
    images: Sequence[tuple[bytes, ...]] | None = None,
) -> list[GenerationRequest]:
    """Plan one request per sample, prompt-major, each with its own seed, which depends only on its position.

    Args:
        uids: The uids of the prompts.
        first: Position of the first prompt, if others come before it.
        images: The image files of each prompt.
    """
    names = [""] * len(prompts) if uids is None else uids

    # A seed depends only on the sample's position: generate from position 0, and skip the earlier ones.
    seeds = np.random.SeedSequence(sampling.seed).generate_state((first + len(prompts)) * sampling.n)[
        first * sampling.n :
    ]

    return [
        GenerationRequest(
            index * sampling.n + sample,
            prompt,
            replace(sampling, n=1, seed=int(seeds[index * sampling.n + sample])),
            names[index],
            () if images is None else images[index],
        )
        for index, prompt in enumerate(prompts)
        for sample in range(sampling.n)
    ]


def check_request(request: GenerationRequest, vocab_size: int, max_length: int) -> None:
    """Validate a request; see `RolloutEngine.submit`. Raises ValueError.

    Args:
        max_length: Limit on the tokens of prompt and sample together.
    """
    prompt = request.prompt
    max_new_tokens = request.sampling.max_new_tokens
    name = f"the prompt of request {request.request_id}"

    if not prompt:
        raise ValueError(f"{name} is empty; a model needs at least one token to continue")

    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ValueError(
            f"{name} has token ids {min(prompt)}..{max(prompt)}, but the model's vocabulary is "
            f"0..{vocab_size - 1}"
        )

    if len(prompt) + max_new_tokens > max_length:
        raise ValueError(
            f"{name} of {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed the model's limit of "
            f"{max_length}; shorten the prompts or max_new_tokens"
        )


def end_token_ids(folder: str | Path) -> frozenset[int]:
    """Return the model's end tokens.

    generation_config.json decides if it exists, because chat models end turns with another token than
    documents; otherwise config.json.

    Raises:
        ValueError: A file cannot be parsed.
        OSError: A file cannot be read.
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
            f"{decides}: eos_token_id is {found!r}, but must be a token id or a list of token ids"
        )

    return frozenset(ids)


class EngineFaultError(RunError):
    """An engine returned something that was not requested, so its samples cannot be trusted."""


def check_sample(replica: int, request: GenerationRequest, sample: Sample) -> None:
    """Raise EngineFaultError if the sample cannot be a result of the request."""
    sampling = request.sampling
    count = len(sample.token_ids)
    faults = []
    if not 1 <= count <= sampling.max_new_tokens:
        faults.append(f"{counted(count, 'token')}, but 1 to {sampling.max_new_tokens} were requested")
    if len(sample.log_probs) != count:
        faults.append(f"{len(sample.log_probs)} log-probs for {counted(count, 'token')}")
    if sample.finish_reason not in ("stop", "length"):
        faults.append(f"finish reason {sample.finish_reason!r}")

    # The spans must cover all tokens without a gap, with increasing versions.
    ends = [0, *(span.end for span in sample.spans)]

    if (
        ends[-1] != count
        or ends != sorted(set(ends))
        or list(sample.weight_versions) != sorted(set(sample.weight_versions))
    ):
        faults.append(
            f"weight versions {[tuple(span) for span in sample.spans]} (version, end) for "
            f"{counted(count, 'token')}"
        )

    if faults:
        raise EngineFaultError(f"rollout replica {replica} returned an invalid sample: {', '.join(faults)}")


# ---- lifecycle


class EngineStateError(RuntimeError):
    """The engine cannot do what it was asked in its state.

    The message names the state and how to leave it.
    """


class LifecycleState(Enum):
    EMPTY = "empty"
    UPDATING = "updating"
    READY = "ready"
    ASLEEP = "asleep"
    CLOSED = "closed"


_HINT = {
    LifecycleState.EMPTY: "it has no complete weights: complete a weight update",
    LifecycleState.UPDATING: "its weights are partially loaded: complete the weight update, or restart it",
    LifecycleState.READY: "it has complete weights: begin a weight update first",
    LifecycleState.ASLEEP: "it has released its memory: wake it, then update its weights",
    LifecycleState.CLOSED: "it is closed: start another engine",
}


class EngineLifecycle:
    """State, version of the weights, and receipt of the update in progress, unless the receiver counts it."""

    def __init__(self) -> None:
        self.state = LifecycleState.EMPTY
        self.weight_version: int | None = None
        self._receipt: WeightReceipt | None = None

    def require_ready(self) -> int:
        """Return the version of the weights. Raises EngineStateError if they are not complete."""
        self.require("generate", LifecycleState.READY)
        assert self.weight_version is not None
        return self.weight_version

    def begin(self, manifest: Manifest, is_partial: bool = False) -> None:
        """Begin an update; a partial one keeps some of the tensors, which must be complete."""
        incomplete = () if is_partial else (LifecycleState.EMPTY, LifecycleState.UPDATING)
        self.require("begin a weight update", *incomplete, LifecycleState.READY)
        # From here on, no sample may be written, whatever the outcome of the update.
        self.state = LifecycleState.UPDATING
        self.weight_version = None
        self._receipt = WeightReceipt(manifest)

    def require_update(self) -> None:
        self.require("load weights", LifecycleState.UPDATING)

    def record(self, tensors: Manifest) -> None:
        """Record tensors before they are copied.

        Raises WeightTransferError if one does not belong to the update.
        """
        self.require_update()
        assert self._receipt is not None
        for name, meta in tensors.items():
            self._receipt.record(name, 0, prod(meta.shape), meta.dtype)

    def complete(self) -> None:
        """Record that everything has arrived, as the receiver has counted."""
        self.require_update()
        self._receipt = None

    def end(self, version: int) -> None:
        self.require("end a weight update", LifecycleState.UPDATING)
        # close() raises for missing tensors and must then leave the engine without weights.
        self.state = LifecycleState.EMPTY
        if self._receipt is not None:
            self._receipt.close()
        self._receipt = None
        self.state = LifecycleState.READY
        self.weight_version = version

    def must_wake(self) -> bool:
        """Return whether it sleeps. Raises EngineStateError if it is closed."""
        self.require(
            "wake", LifecycleState.EMPTY, LifecycleState.UPDATING, LifecycleState.READY, LifecycleState.ASLEEP
        )
        return self.state is LifecycleState.ASLEEP

    def leave(self, state: LifecycleState) -> None:
        """Change to a state without weights: EMPTY, ASLEEP or CLOSED."""
        self.state = state
        self.weight_version = None
        self._receipt = None

    def require(self, action: str, *states: LifecycleState) -> None:
        if self.state not in states:
            raise EngineStateError(
                f"the engine cannot {action} while {self.state.value}: {_HINT[self.state]}"
            )
