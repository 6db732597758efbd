"""What every inference engine offers: token ids in, samples out, weights from buckets, and memory given back on request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megarl.protocol.weights import Manifest, WeightBucket


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """How to continue each prompt.

    n: samples per prompt. temperature: 0 is greedy. top_k: the k most probable tokens, -1 for all; then top_p: of these the
    fewest whose probability reaches top_p. stop_token_ids: end a sample, beside the model's own end tokens. ignore_eos:
    no token ends a sample (for benchmarks). seed: the same call on the same weights gives the same samples.
    Raises ValueError that names the field.
    """

    max_new_tokens: int
    seed: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("max_new_tokens", self.max_new_tokens)):
            if value < 1:
                raise ValueError(f"sampling {name} is {value}; it must be at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"sampling temperature is {self.temperature}; give 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling top_p is {self.top_p}; it must lie in (0, 1], 1 switches it off")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"sampling top_k is {self.top_k}; it must be at least 1, or -1 for all tokens")


class Sample(NamedTuple):
    """One continuation. `token_ids` are what the model wrote, the end token included where it wrote one.

    log_probs: one per token, THE contract of every engine: log_softmax(logits / temperature) of the token over the whole
    vocabulary, before top-k and top-p; with temperature 0, log_softmax(logits). Float32.
    finish_reason: "stop" where the last token ended it, "length" where max_new_tokens did.
    weight_version: of the weights that wrote it.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Literal["stop", "length"]
    weight_version: int


class RolloutEngine(ABC):
    """An engine is usable from the end of a complete weight update until it sleeps, is updated again, or is closed.

    In between, `generate` raises EngineStateError: no sample is ever written by half-loaded weights.
    """

    @abstractmethod
    def generate(self, prompts: list[list[int]], sampling: SamplingParameters) -> list[Sample]:
        """`sampling.n` samples of each prompt, prompt-major: those of prompt i are [i * n, (i + 1) * n).

        Raises EngineStateError where the engine has no complete weights, ValueError for an empty prompt, a token id
        outside the vocabulary, or a prompt that leaves no room for `max_new_tokens`.
        """

    @abstractmethod
    def begin_weight_update(self, manifest: Manifest) -> None:
        """Announces all tensors to come; from here to `end_weight_update` the engine refuses to generate.

        An update that was begun and not ended is given up. Raises WeightTransferError where the manifest is not that of
        the engine's model, and then leaves the engine as it was; EngineStateError while asleep or closed.
        """

    @abstractmethod
    def load_weights(self, bucket: WeightBucket) -> None:
        """Raises WeightTransferError for a chunk that the manifest does not have; EngineStateError outside an update."""

    @abstractmethod
    def end_weight_update(self, version: int) -> None:
        """The engine is usable. Raises WeightTransferError that names tensors missing or doubled: then it stays unusable."""

    @abstractmethod
    def sleep(self) -> None:
        """Gives back the memory of weights and cache. Sleeping twice is sleeping."""

    @abstractmethod
    def wake(self) -> None:
        """Takes the memory again. The weights are gone: the engine is usable after the next update."""

    @property
    @abstractmethod
    def weight_version(self) -> int | None:
        """Of the complete weights at hand, None where there are none."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and what it started."""
