"""The sections of `reward.judges`: models that score samples through an OpenAI-compatible API."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.config.schema.keys import MISSING, InputKind, Reader, names, only_with, ranged


@dataclass(frozen=True, kw_only=True)
class JudgeParseConfig:
    """The way to get the score from a judge's reply. Set `regex`, `json` or `path`."""

    # regular expression with one group; the last match in the reply is the score
    regex: str | None = None
    json: str | None = None  # key of the last JSON object in the reply
    # Python file with a function of the reply; null: no function
    path: str | None = field(default=None, metadata=names(InputKind.code))
    name: str = only_with("parse", Reader(".path", example="FILE.py"))  # name of the function in the file


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """A model that scores samples, on any server with OpenAI's chat completions API, or served by the run."""

    name: str = MISSING  # name in metrics and messages
    url: str | None = None  # base URL of the API, such as http://localhost:30000/v1; null: `path` is served
    model: str | None = None  # name of the model on the server at `url`
    # folder of a model that the run serves with SGLang, on devices of its own; null: `url` is used
    path: str | None = field(default=None, metadata=names(InputKind.data))
    num_replicas: int = only_with(
        ranged(1, at_least=1, at_most=10000), Reader(".path", example="FOLDER"), is_refused=True
    )  # servers of `path`
    tensor_parallel_size: int = only_with(
        ranged(1, at_least=1, at_most=1024), Reader(".path", example="FOLDER"), is_refused=True
    )  # devices of each of these servers
    # jinja2 template of the user message; see Judges
    prompt: str = field(default=MISSING, metadata=names(InputKind.code))
    parse: JudgeParseConfig = field(default_factory=JudgeParseConfig)
    weight: float = 1.0  # factor of its score
    # name of the environment variable with the API key; null: no key is sent
    api_key_env: str | None = None
    temperature: float | None = ranged(0.0, at_least=0, at_most=2)  # null: not sent
    seed: int | None = ranged(0, at_least=0)  # null: not sent
    # maximum tokens of a reply, and a longer one is a failure; null: not sent
    max_tokens: int | None = ranged(1024, at_least=1)
    # further fields of the request, such as {chat_template_kwargs: {enable_thinking: false}}
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
