"""The section `agent`: tools, an environment or an agent program, and the limits of an episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megarl.config.kinds import Hub
from megarl.config.schema.keys import PathKind, Reader, names, only_with, ranged


class CallsInThinking(str, Enum):
    # treat them as drafts: only calls after the thinking are executed, as with a server's reasoning parser
    ignore = "ignore"
    execute = "execute"  # also execute calls inside the thinking that can be parsed


_PROGRAMS = (
    Reader(".command", example="[python, agent.py, '{prompt}']"),
    Reader(".function", example="FILE.py:NAME"),
    Reader(".external", example="true"),
)
_HUB = Reader("agent.environment.hub", example="verifiers")
# The environment of a hub plays its episodes as the program of a harness does.
_HARNESS = (*(reader._replace(key=f".harness{reader.key}") for reader in _PROGRAMS), _HUB)
_EPISODES = (
    Reader(".tools", example="[FILE.py:NAME]"),
    Reader(".environment.path", example="FILE.py:NAME"),
    *_HARNESS,
)


class SandboxProvider(str, Enum):
    local = "local"  # namespaces of this machine, with bubblewrap
    container = "container"  # containers of Docker or podman


def _in_sandbox[Value](default: Value) -> Value:
    """Declare a key that needs a provider, without which commands run with the rights of the run."""
    return only_with(
        default,
        Reader(".provider", tuple(SandboxProvider)),
        is_refused=True,
        why="commands run with the rights of the run",
    )


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox of an episode, in which the command of a harness runs, and which a function can start."""

    # provider of sandboxes; null: no sandbox, a command runs with the rights of the run
    provider: SandboxProvider | None = None
    # container: image of rows without one of their own (extra_info.sandbox_image); local: absolute path of a
    # folder that becomes the file system, null: system and Python of the machine
    image: str | None = _in_sandbox(None)
    # files and folders that are copied into the working folder
    files: list[str] = _in_sandbox(field(default_factory=list, metadata=names(PathKind.code)))
    # allow the network of the machine; false: only the endpoint of the episode can be reached
    network: bool = _in_sandbox(False)
    memory_mb: int = _in_sandbox(ranged(4096, at_least=16))  # limit of memory; with local, files count too
    max_processes: int = _in_sandbox(ranged(256, at_least=1))  # limit of processes and threads together
    # limit of CPUs; null: no limit
    cpus: float | None = _in_sandbox(
        only_with(ranged(None, above=0), Reader(".provider", (SandboxProvider.container,)), is_refused=True)
    )
    # time limit for starting a sandbox, which includes pulling an image
    start_limit_s: float = _in_sandbox(ranged(300.0, above=0))


@dataclass(frozen=True, kw_only=True)
class HarnessConfig:
    """An agent program that calls the model over HTTP, by the APIs of OpenAI or Anthropic.

    Set `command`, `function` or `external`; see Train your own agent.
    """

    # command that is started once per episode; {prompt} becomes the text of the row's last message
    command: list[str] = field(default_factory=list)
    # FILE.py:NAME of a function `run(task, endpoint)`, plain or async, that is called once per episode
    function: str | None = field(default=None, metadata=names(PathKind.function))
    sandbox: SandboxConfig = only_with(field(default_factory=SandboxConfig), *_PROGRAMS)
    # let clients elsewhere claim and play the episodes, with the key in MEGARL_ENDPOINT_KEY
    external: bool = False
    # address of the server; clients on other nodes need an address of the cluster's network
    host: str = only_with("127.0.0.1", *_PROGRAMS, _HUB)
    # port of the server; null: a free one
    port: int | None = only_with(ranged(None, at_least=1, at_most=65535), *_PROGRAMS, _HUB)
    # time limit of an episode, including generation; exceeding it is a failure
    time_limit_s: float = only_with(ranged(600.0, above=0), *_PROGRAMS, _HUB)
    # parameters of requests that are accepted without effect, because the run decides how it samples
    ignored_parameters: list[str] = only_with(
        field(default_factory=lambda: ["temperature", "top_p", "top_k", "seed"]), *_PROGRAMS, _HUB
    )

    @property
    def is_used(self) -> bool:
        return bool(self.command) or self.function is not None or self.external


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """A class of your own that answers the model's turns, or an environment of a hub.

    A text instead of the section is `path`; see Agents.
    """

    # FILE.py:NAME of a class whose instances answer the model's turns, one instance per episode
    path: str | None = field(default=None, metadata=names(PathKind.function))
    hub: Hub | None = None  # collection that has the environment; see Environments of hubs
    name: str | None = only_with(None, Reader(".hub", tuple(Hub)), is_refused=True)  # its name there
    # arguments of the hub's own function that creates it
    arguments: dict[str, Any] = only_with(
        field(default_factory=dict), Reader(".hub", tuple(Hub)), is_refused=True
    )
    # Python program of the virtual environment in which the hub's package is installed; null: that of the run
    python: str | None = only_with(None, Reader(".hub", tuple(Hub)), is_refused=True)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Multi-turn episodes. Without tools, an environment or a harness, this section has no effect."""

    # tools that the model may call: FILE.py:NAME of an annotated function or of an object with a schema, or a
    # built-in tool, such as calculator; see Agents
    tools: list[str] = field(default_factory=list, metadata=names(PathKind.function))
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)  # answers instead of tools
    harness: HarnessConfig = field(default_factory=HarnessConfig)
    # format of tool calls; null: <tool_call> JSON, as written by Qwen2.5, Qwen3 and Hermes; otherwise the
    # name of one of SGLang's parsers, such as llama3, mistral or pythonic
    parser: str | None = only_with(
        None,
        _EPISODES[0],
        *_HARNESS,
        is_refused=True,
        why="there are no tools whose calls it could parse (an environment receives the text of a turn)",
    )
    # what to do with calls between <think> and </think>
    calls_in_thinking: CallsInThinking = only_with(CallsInThinking.ignore, _EPISODES[0], *_HARNESS)
    # maximum model turns in an episode
    max_turns: int = only_with(ranged(8, at_least=1, at_most=10000), *_EPISODES)
    # maximum tokens of one turn; null: the remainder of data.max_response_length
    max_turn_tokens: int | None = only_with(ranged(None, at_least=1), *_EPISODES)
    # maximum tokens of one tool result; the middle of longer results is removed
    max_result_tokens: int = only_with(ranged(512, at_least=16), *_EPISODES)
    # maximum calls in one turn; further calls are refused
    max_parallel_calls: int = only_with(ranged(4, at_least=1, at_most=1000), _EPISODES[0])
    # time limit of one tool call, and of one answer from an environment (exceeding it ends the episode)
    time_limit_s: float = only_with(ranged(30.0, above=0), *_EPISODES)
    # processes that run tools and environments
    num_workers: int = only_with(ranged(1, at_least=1, at_most=10000), *_EPISODES)
    # turns that one process handles concurrently
    max_concurrency: int = only_with(ranged(64, at_least=1), *_EPISODES)
    # attempts at an episode whose process is lost
    max_attempts: int = only_with(ranged(2, at_least=1), *_EPISODES)
    # fraction of a step's episodes in which the program of a harness may fail; they are counted, not trained
    max_error_rate: float = only_with(
        ranged(0.0, at_least=0, at_most=1),
        *_HARNESS,
        is_refused=True,
        why="only the program of a harness may fail",
    )

    @property
    def is_used(self) -> bool:
        return bool(self.tools) or self.environment.path is not None or self.has_program

    @property
    def has_program(self) -> bool:
        """Whether a program plays the episodes through the endpoint, instead of answering turns."""
        return self.environment.hub is not None or self.harness.is_used
