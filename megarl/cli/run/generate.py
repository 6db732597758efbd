"""`megarl generate MODEL`: generates from prompts without Ray.

The prompts come from the command line, standard input or a chat. With tools or an environment, whole episodes
are printed as conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.agents.episode import Episode, EpisodeLimits, WriteTurn
from megarl.agents.protocol import Message, Task
from megarl.agents.responder import Responder
from megarl.agents.trajectory import Sample, Trajectory
from megarl.agents.user_tools import load_agent
from megarl.cli.run.named_model import NamedModel, find_model, hugging_face_folder
from megarl.config.load import load_config
from megarl.config.schema import (
    AgentConfig,
    Device,
    DType,
    EnvironmentConfig,
    LossyText,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
)
from megarl.data.tokenizer import Tools, load_tokenizer
from megarl.data.turns import TurnTemplate
from megarl.data.whole_chat import render_whole
from megarl.machine.strict_json import dump_readable
from megarl.models.layers import routes_tokens
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import (
    GenerationRequest,
    RolloutEngineSpec,
    SamplingParameters,
    check_request,
    plan_requests,
)
from megarl.rollout.tool_calls import call_parser
from megarl.weights.manifest import manifest_of_folder

_Messages = list[dict[str, Any]]
_MAX_TOKENS = 256  # default limit of an answer


def run(**options: Any) -> None:
    """Print the model's answers, or episodes with tools or an environment.

    Raises:
        ValueError: The model, prompts or options are invalid. Raised before weights are loaded.
        EnvironmentFailedError: The environment failed.
    """
    parsed = argparse.Namespace(**options)
    if parsed.tool or parsed.environment or parsed.agent:
        _print_episodes(parsed)
        return
    is_chat = not parsed.prompts and sys.stdin.isatty()
    if is_chat and (parsed.n > 1 or parsed.json):
        raise ValueError("--n and --json require prompts; a chat has one text answer at a time")
    chats = [] if is_chat else read_chats(parsed)
    writer = Writer(find_model(Path(parsed.model), parsed.step), parsed)
    prompts = [writer.render(chat) for chat in chats]
    writer.load()

    if is_chat:
        _chat(writer, parsed)
    else:
        _print(writer, chats, writer.write(prompts), parsed)


def read_chats(parsed: argparse.Namespace) -> list[_Messages]:
    """Return each prompt as a conversation.

    Raises ValueError if there are none, or if all `n` samples of a prompt would be identical.
    """
    if parsed.n > 1 and parsed.temperature == 0:
        raise ValueError(
            f"--n is {parsed.n}, but greedy samples of a prompt are identical; set --temperature above 0, "
            "such as 1"
        )
    return [_opened(parsed.system, prompt) for prompt in parsed.prompts or _read_input(parsed.lines)]


def _opened(system: str | None, prompt: str) -> _Messages:
    return [
        *([] if system is None else [{"role": "system", "content": system}]),
        {"role": "user", "content": prompt},
    ]


def _read_input(by_lines: bool) -> list[str]:
    """Read prompts from standard input. Raises ValueError if it is empty."""
    text = sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()] if by_lines else [text.rstrip("\n")]

    if not any(prompt.strip() for prompt in prompts):
        raise ValueError(
            "no prompt is given, and standard input is empty; use `megarl generate MODEL 'a prompt'`"
        )

    return prompts


class Writer:
    """A model in this process, in float32 on CPU and in bfloat16 on a GPU.

    Raises ValueError for invalid options.
    """

    def __init__(self, model: NamedModel, parsed: argparse.Namespace) -> None:
        if routes_tokens(model.source.architecture):
            raise ValueError(
                f"{model.source.folder}: is a mixture-of-experts model, which `megarl generate` does not "
                f"support; use `megarl eval {parsed.model} --data FILE rollout.engine=sglang`"
            )
        self._model = model
        self.tokenizer = load_tokenizer(str(model.source.companions), key="MODEL")
        self._stop_texts: Sequence[str] = parsed.stop
        self._is_limit_given = parsed.max_tokens is not None
        self._sampling = SamplingParameters(
            n=parsed.n,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            max_new_tokens=_MAX_TOKENS if parsed.max_tokens is None else parsed.max_tokens,
            stop_token_ids=(self.tokenizer.eos_token_id,),
            seed=parsed.seed,
        )

    def render(self, chat: _Messages, tools: Tools = None) -> list[int]:
        """Return the token ids of a conversation with the generation prompt.

        Raises ValueError if it does not fit the model's context or the chat template cannot render it.
        """
        ids = render_whole(self.tokenizer, chat, LossyText.refuse, for_generation=True, tools=tools)
        architecture = self._model.source.architecture
        (request, *_) = self.requests([ids])
        check_request(request, architecture.vocab_size, architecture.max_position_embeddings)

        return ids

    def _fitting(self, prompts: Sequence[list[int]]) -> SamplingParameters:
        room = self._model.source.architecture.max_position_embeddings - max(map(len, prompts))
        return (
            self._sampling
            if self._is_limit_given or room >= _MAX_TOKENS
            else replace(self._sampling, max_new_tokens=max(1, room))
        )

    def requests(self, prompts: Sequence[list[int]]) -> list[GenerationRequest]:
        """Return `n` results per prompt, those of a prompt in sequence."""
        return plan_requests(prompts, self._fitting(prompts))

    def sample(self, request: GenerationRequest) -> Sample:
        self._engine.submit([request])
        ((_, sample),) = self._engine.collect(wait_s=0.0)
        return sample

    def load(self) -> None:
        """Load the weights, and print the device and the time to standard error."""
        start_s = time.monotonic()
        device, dtype = (
            (Device.cuda, DType.bfloat16) if torch.cuda.is_available() else (Device.cpu, DType.float32)
        )
        config = ModelConfig(path=str(self._model.source.companions), dtype=dtype)
        is_ended = self._has_stop_text if self._stop_texts else None
        self._engine = HFEngine(
            RolloutEngineSpec(model=config, rollout=RolloutConfig(), device=device), is_ended
        )

        # Convert a Megatron checkpoint to a temporary Hugging Face folder.
        with hugging_face_folder(self._model, getattr(torch, dtype.value)) as folder:
            self._engine.begin_weight_update(manifest_of_folder(folder))
            self._engine.load_folder(folder)
            self._engine.end_weight_update(1)

        seconds = time.monotonic() - start_s
        print(
            f"{self._model.source.folder}: {dtype.value} on {device.value}, loaded in {seconds:.1f} s",
            file=sys.stderr,
        )

    def write(self, prompts: Sequence[list[int]]) -> list[tuple[str, Sample]]:
        """Return `n` results per prompt, those of a prompt in sequence.

        The text of each ends before a stop string, and has no special tokens; the sample has all tokens.
        """
        written = []
        for sample in self._engine.generate(prompts, self._fitting(prompts)):
            text = self._text(sample.token_ids.tolist())
            # The earliest stop string ends the answer; it may start inside a token.
            end = min(
                (start for stop in self._stop_texts if (start := text.find(stop)) >= 0), default=len(text)
            )
            written.append((text[:end], sample))

        return written

    def show(self, text: str, sample: Sample, with_log_probs: bool) -> None:
        """Print the text of a sample, and the log-prob of each of its tokens if that is asked for."""
        print(text, flush=True)
        if with_log_probs:
            self.show_tokens(sample, [True] * len(sample.token_ids))

    def show_tokens(self, written: Sample | Trajectory, mask: Sequence[bool]) -> None:
        """Print each token, with the log-prob of those that the model has written."""
        rows = zip(written.token_ids.tolist(), written.log_probs.tolist(), mask, strict=True)
        for token_id, log_prob, is_models in rows:
            shown = f"{log_prob:10.4f}" if is_models else " " * 10
            print(f"{shown}  {self.tokenizer.decode([token_id])!r}")

    def _has_stop_text(self, token_ids: list[int]) -> bool:
        text = self._text(token_ids)
        return any(stop in text for stop in self._stop_texts)

    def _text(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))


def _print(
    writer: Writer,
    chats: Sequence[_Messages],
    written: Sequence[tuple[str, Sample]],
    parsed: argparse.Namespace,
) -> None:
    for index, (text, sample) in enumerate(written):
        chat = chats[index // parsed.n]
        if parsed.json:
            values: dict[str, Any] = {
                "messages": chat,
                "sample": index % parsed.n,
                "text": text,
                "finish_reason": sample.finish_reason,
            }
            if parsed.log_probs:
                values["token_ids"] = sample.token_ids.tolist()
                values["log_probs"] = sample.log_probs.tolist()
            print(dump_readable(values))
            continue
        if len(written) > 1:
            _print_title(chat, index, parsed.n)
        writer.show(text, sample, parsed.log_probs)


def _print_title(chat: _Messages, index: int, num_samples: int) -> None:
    of_samples = f" [{index % num_samples + 1} of {num_samples}]" if num_samples > 1 else ""
    print(f"--- {chat[-1]['content']}{of_samples}")


def _chat(writer: Writer, parsed: argparse.Namespace) -> None:
    """Chat until the end of the input."""
    import readline  # noqa: F401, PLC0415  (enables line editing and history in `input`)

    print("an empty line starts a new chat, Ctrl-D exits", file=sys.stderr)
    chat: _Messages = []

    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        if not line.strip():
            chat = []
            continue
        # The whole conversation is rendered again for each turn.
        chat = [*chat, {"role": "user", "content": line}] if chat else _opened(parsed.system, line)
        ((text, sample),) = writer.write([writer.render(chat)])
        writer.show(text, sample, parsed.log_probs)
        chat.append({"role": "assistant", "content": text})


# ---- episodes


def _print_episodes(parsed: argparse.Namespace) -> None:
    """Print the episodes of each prompt. Raises the errors of `run`."""
    if parsed.stop:
        raise ValueError(
            "--stop cannot be used in an episode, whose turns end with the model's end token; remove it"
        )

    if not parsed.prompts and sys.stdin.isatty():
        raise ValueError("chat is not supported with tools or an environment; give a prompt")
    chats = read_chats(parsed)
    agent = _agent(parsed)
    make_environment, tools = load_agent(agent)
    writer = Writer(find_model(Path(parsed.model), parsed.step), parsed)
    template = TurnTemplate(writer.tokenizer, tools, agent.max_result_tokens)
    # Check everything that can be refused before the weights are loaded.
    template.check()
    parse = call_parser(agent, tools, opens_thinking=template.opens_thinking)
    requests = writer.requests([writer.render(chat, tools) for chat in chats])
    writer.load()

    # Each sample has its own environment, because environments keep state.
    for index, request in enumerate(requests):
        chat = chats[index // parsed.n]
        responder = Responder(
            make_environment(), template, parse, Task(messages=chat, seed=request.sampling.seed)
        )
        if len(requests) > 1 and not parsed.json:
            _print_title(chat, index, parsed.n)
        trajectory, messages = asyncio.run(_play(writer, template, responder, request, agent, parsed))
        if parsed.json:
            values = _values(trajectory, messages, parsed.log_probs)
            print(dump_readable({"messages": chat, "sample": index % parsed.n, **values}))


def _agent(parsed: argparse.Namespace) -> AgentConfig:
    """Return the agent's section from the options. Raises ValueError or its subclass ConfigError."""
    given = [f"--{name}" for name in ("agent", "tool", "environment") if getattr(parsed, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")

    if parsed.agent is None:
        if parsed.environment is not None and ":" not in parsed.environment:
            raise ValueError(
                f"there is no built-in environment {parsed.environment!r}; write --environment FILE.py:NAME"
            )
        agent = AgentConfig(tools=parsed.tool, environment=EnvironmentConfig(path=parsed.environment))
    else:
        agent = load_config(PPOConfig, parsed.agent).agent
        if agent.has_program:
            raise ValueError(
                f"--agent {parsed.agent}: the agent is a program (agent.harness or a hub), which runs in a "
                f"training run or in `megarl eval`; start it by hand against a server of the model instead"
            )
        if not agent.is_used:
            raise ValueError(
                f"--agent {parsed.agent}: its section agent has neither tools nor an environment; give a "
                f"configuration that has"
            )

    # Options of the command override the run's section.
    changes = {
        name: getattr(parsed, name) for name in ("parser", "max_turns") if getattr(parsed, name) is not None
    }
    return replace(agent, **changes)


async def _play(
    writer: Writer,
    template: TurnTemplate,
    responder: Responder,
    request: GenerationRequest,
    agent: AgentConfig,
    parsed: argparse.Namespace,
) -> tuple[Trajectory, list[Message]]:
    """Run one episode, and print each message as it arrives unless the output is JSON.

    Returns:
        The episode, and the messages of the model and the environment, in order.
    """
    limits = EpisodeLimits(
        max_turns=agent.max_turns,
        max_tokens=request.sampling.max_new_tokens,
        max_turn_tokens=agent.max_turn_tokens,
    )
    episode = Episode(request.prompt, request.sampling.seed, limits)
    messages: list[Message] = []

    def say(said: Sequence[Message]) -> None:
        messages.extend(said)
        for message in said if not parsed.json else ():
            print(f"{message['role']}: {message['content']}", flush=True)

    try:
        await responder.start()
        # Alternate the model's turns with the answers of the tools or the environment.
        while (step := episode.next) is not None:
            if isinstance(step, WriteTurn):
                sampling = replace(request.sampling, max_new_tokens=step.max_new_tokens, seed=step.seed)
                sample = writer.sample(request._replace(prompt=step.token_ids, sampling=sampling))
                say([{"role": "assistant", "content": template.read(sample.token_ids.tolist())}])
                episode.wrote(step.place, sample)
            else:
                token_ids, reply = await responder.answer(step)
                say(reply.messages)
                episode.answered(step.place, token_ids, reply)
    finally:
        # Close after an error too, because the environment may hold resources.
        await responder.close()

    if not parsed.json:
        _print_end(writer, episode.trajectory, parsed.log_probs)
    return episode.trajectory, messages


def _print_end(writer: Writer, trajectory: Trajectory, with_log_probs: bool) -> None:
    assert trajectory.end is not None
    counts = [
        f"turns {trajectory.num_turns}",
        f"calls {trajectory.num_calls}",
        *(f"{count} {kind.value}" for kind, count in trajectory.call_errors.items()),
        f"tokens {len(trajectory.token_ids)}",
    ]
    print(f"[{trajectory.end.value}: {', '.join(counts)}]")

    if with_log_probs:
        writer.show_tokens(trajectory, trajectory.mask.tolist())


def _values(trajectory: Trajectory, messages: Sequence[Message], with_log_probs: bool) -> dict[str, Any]:
    assert trajectory.end is not None
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    values: dict[str, Any] = {
        "text": answers[-1],
        "conversation": messages,
        "end": trajectory.end.value,
        "num_turns": trajectory.num_turns,
        "num_calls": trajectory.num_calls,
        "call_errors": {kind.value: count for kind, count in trajectory.call_errors.items()},
        "turn_rewards": trajectory.turn_rewards,
    }
    if with_log_probs:
        values["token_ids"] = trajectory.token_ids.tolist()
        values["log_probs"] = trajectory.log_probs.tolist()
        values["response_mask"] = trajectory.mask.tolist()
    return values
