"""The section `reward`: functions in files, judges, and a reward model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.schema.keys import MISSING, PathKind, Reader, matters, names, only_with, ranged, split_code
from megarl.config.schema.models import FrozenMegatronConfig, MicroBatchConfig, ParallelConfig, of_folder


@dataclass(frozen=True, kw_only=True)
class JudgeParseConfig:
    """The way to get the score from a judge's reply. Set `regex`, `json` or `path`."""

    # regular expression with one group; the last match in the reply is the score
    regex: str | None = None
    json: str | None = None  # key of the last JSON object in the reply
    # FILE.py, or FILE.py:NAME if the function of the reply is not called parse; null: no function
    path: str | None = field(default=None, metadata=names(PathKind.code))

    @property
    def file(self) -> str | None:
        return None if self.path is None else split_code(self.path)[0]

    @property
    def name(self) -> str:
        return split_code(self.path or "")[1] or "parse"


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A model that scores samples, on any server with OpenAI's chat completions API, or served by the run."""

    name: str = MISSING  # name in metrics and messages
    url: str | None = None  # base URL of the API, such as http://localhost:30000/v1; null: `path` is served
    model: str | None = None  # name of the model on the server at `url`
    # folder of a model that the run serves with SGLang, on devices of its own; null: `url` is used
    path: str | None = field(default=None, metadata=names(PathKind.data))
    num_replicas: int = of_folder(ranged(1, at_least=1, at_most=10000))  # servers of `path`
    # devices of each of these servers
    tensor_parallel_size: int = of_folder(ranged(1, at_least=1, at_most=1024))
    # jinja2 template of the user message; see Judges
    prompt: str = field(default=MISSING, metadata=names(PathKind.code))
    parse: JudgeParseConfig = field(default_factory=JudgeParseConfig)
    weight: float = 1.0  # factor of its score
    # name of the environment variable with the API key; null: no key is sent
    api_key_env: str | None = None
    # fields of the request, such as {chat_template_kwargs: {enable_thinking: false}}, which replace
    # {temperature: 0, seed: 0, max_tokens: 1024}; a field that is null is not sent
    request: dict[str, Any] = field(default_factory=dict)
    max_concurrency: int = ranged(32, at_least=1, at_most=10000)  # requests at the same time
    time_limit_s: float = ranged(60.0, above=0)  # time limit of each attempt
    # attempts after status 408, 429 or 5xx, a lost connection, or the time limit, with growing pauses
    max_attempts: int = ranged(5, at_least=1, at_most=100)

    @property
    def served_by(self) -> str:
        """Describe the model and its servers."""
        if self.path is None:
            return f"{self.model} at {self.url}"
        servers = "1 server" if self.num_replicas == 1 else f"{self.num_replicas} servers"
        return f"{self.path} on {servers} of the run"


class OverlongConversation(str, Enum):
    """How to handle a conversation that exceeds the reward model's maximum length.

    A metric counts truncated conversations.
    """

    refuse = "refuse"  # scoring the sample fails
    truncate = "truncate"  # the oldest tokens are removed


@dataclass(frozen=True, kw_only=True)
class RewardFunctionConfig:
    """A Python function `(data_source, solution_str, ground_truth, extra_info) -> float` in a file."""

    # FILE.py, or FILE.py:NAME if the function is not called compute_score
    path: str = field(default=MISSING, metadata=names(PathKind.code))
    weight: float = 1.0  # factor of its score
    # score each sample in its own sandboxed process, without access to files, the network or other processes;
    # for functions that execute model-written code; see Sandbox
    sandbox: bool = False

    @property
    def file(self) -> str:
        return split_code(self.path)[0]

    @property
    def name(self) -> str:
        return split_code(self.path)[1] or "compute_score"


_SANDBOXED = Reader("reward.functions[].sandbox", example="true")
_FUNCTIONS = Reader("reward.functions", example="[{path: FILE.py}]")


@dataclass(frozen=True, kw_only=True)
class RewardSandboxConfig:
    """Limits of functions with `sandbox: true`.

    If there is such a function, only the environment variables listed here are passed to any function.
    """

    # memory limit of a sample, in 2**20 bytes, in addition to what the functions' files have loaded
    memory_mb: int = only_with(ranged(512, at_least=1), _SANDBOXED)
    # names of the environment variables to pass on
    environment: list[str] = only_with(field(default_factory=list), _SANDBOXED)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A frozen model with a sequence-classification head of one output, of any family, tokenizer and layout.

    It reads the conversation with its own chat template. A sample's score is the sum of the functions' scores
    plus `weight` times the model's score.
    """

    # model folder; null: no reward model
    path: str | None = field(default=None, metadata=names(PathKind.data))
    parallel: ParallelConfig = of_folder(field(default_factory=ParallelConfig))
    micro_batch: MicroBatchConfig = of_folder(
        field(default_factory=lambda: MicroBatchConfig(max_tokens=16384))
    )
    weight: float = of_folder(1.0)  # factor of its score
    # maximum length in the reward model's tokens; null: limited by its positions and by a micro-batch
    max_length: int | None = of_folder(ranged(None, at_least=1))
    # how to handle longer conversations
    overlong: OverlongConversation = of_folder(OverlongConversation.refuse)
    megatron: FrozenMegatronConfig = of_folder(field(default_factory=FrozenMegatronConfig))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    # reward functions, whose weighted scores are added; see Rewards
    functions: list[RewardFunctionConfig] = matters(
        field(default_factory=list), "always, unless a judge or a model scores: your score of a response"
    )
    # models that score through an OpenAI-compatible API, whose weighted scores are added; see Rewards
    judges: list[JudgeConfig] = field(default_factory=list)
    sandbox: RewardSandboxConfig = field(default_factory=RewardSandboxConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    # minimum score of a sample that passes, for the metric pass@k; null: no pass@k
    pass_score: float | None = 1.0
    # time limit of one sample, from the start of its scoring
    time_limit_s: float = only_with(ranged(10.0, above=0), _FUNCTIONS, is_usual=True)
    # fraction of a batch's samples whose scoring may fail. They score 0, are excluded from comparisons with
    # other samples, and are counted
    max_error_rate: float = ranged(0.0, at_least=0, at_most=1)
    # processes that score in parallel
    num_processes: int = only_with(ranged(2, at_least=1, at_most=10000), _FUNCTIONS, is_usual=True)
