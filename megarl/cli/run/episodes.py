"""`megarl generate` with tools or an environment: whole episodes, printed as the conversations that they
are."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megarl.agents.episode import Episode, EpisodeLimits, WriteTurn
from megarl.agents.protocol import Message, Task
from megarl.agents.responder import Responder
from megarl.agents.trajectory import Trajectory
from megarl.agents.user_tools import load_agent
from megarl.cli.run.generate import Writer, read_chats
from megarl.cli.run.named_model import find_model
from megarl.config.load import load_config
from megarl.config.schema import AgentConfig, EnvironmentConfig, PPOConfig, ToolConfig
from megarl.data.turns import TurnTemplate
from megarl.machine.strict_json import dump_readable
from megarl.rollout.interface import GenerationRequest
from megarl.rollout.tool_calls import call_parser


class _Played(NamedTuple):
    """messages: of the model and of its environment, in their order."""

    trajectory: Trajectory
    messages: list[Message]


def run(parsed: argparse.Namespace) -> int:
    """Prints the episodes of each prompt; 0. Raises ValueError for what cannot be, before weights are loaded;
    EnvironmentFailedError."""
    if parsed.stop:
        raise ValueError(
            "--stop ends an answer, but in an episode the model's own end of a turn does; leave it out"
        )

    if not parsed.prompts and sys.stdin.isatty():
        raise ValueError("with tools or an environment there is no chat; give a prompt")
    chats = read_chats(parsed)
    agent = _agent(parsed)
    make_environment, tools = load_agent(agent)
    writer = Writer(find_model(Path(parsed.model), parsed.step), parsed)
    template = TurnTemplate(writer.tokenizer, tools, agent.max_result_tokens)
    # Everything that can be refused is checked before the weights are loaded.
    template.check()
    parse = call_parser(agent, tools, opens_thinking=template.opens_thinking)
    requests = writer.requests([writer.render(chat, tools) for chat in chats])
    writer.load()

    # Each sample has an environment of its own, since environments keep state.
    for index, request in enumerate(requests):
        chat = chats[index // parsed.n]
        sample = index % parsed.n
        task = Task(messages=chat, seed=request.sampling.seed)
        responder = Responder(make_environment(), template, parse, task)
        if len(requests) > 1 and not parsed.json:
            print(f"--- {chat[-1]['content']}" + (f" [{sample + 1} of {parsed.n}]" if parsed.n > 1 else ""))
        played = asyncio.run(_play(writer, template, responder, request, agent, parsed))
        if parsed.json:
            print(dump_readable({"messages": chat, "sample": sample, **_values(played, parsed.log_probs)}))

    return 0


def _agent(parsed: argparse.Namespace) -> AgentConfig:
    """Raises ValueError (ConfigError among them)."""
    given = [f"--{name}" for name in ("agent", "tool", "environment") if getattr(parsed, name)]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} are given, but each says what answers the model; give one of them"
        )

    if parsed.agent is None:
        agent = AgentConfig(
            tools=[ToolConfig(path=path, name=name) for path, name in map(_named, parsed.tool)],
            environment=_environment(parsed.environment),
        )
    else:
        agent = load_config(PPOConfig, parsed.agent).agent
        if not agent.is_used:
            raise ValueError(
                f"--agent {parsed.agent}: its section agent has neither tools nor an environment; give a "
                f"run's that has"
            )

    # Options of the command override the run's section.
    changes = {
        name: getattr(parsed, name) for name in ("parser", "max_turns") if getattr(parsed, name) is not None
    }
    return replace(agent, **changes)


def _named(text: str) -> tuple[str | None, str]:
    """Of `FILE.py:NAME`, or of the name of a tool that ships."""
    path, colon, name = text.rpartition(":")
    return (path if colon else None), name


def _environment(text: str | None) -> EnvironmentConfig:
    if text is None:
        return EnvironmentConfig()
    path, name = _named(text)
    if path is None:
        raise ValueError(f"no environment {name!r} ships; write --environment FILE.py:NAME")
    return EnvironmentConfig(path=path, name=name)


async def _play(
    writer: Writer,
    template: TurnTemplate,
    responder: Responder,
    request: GenerationRequest,
    agent: AgentConfig,
    parsed: argparse.Namespace,
) -> _Played:
    """Prints each message as it comes, but for JSON."""
    max_tokens = request.sampling.max_new_tokens
    limits = EpisodeLimits(
        max_turns=agent.max_turns, max_tokens=max_tokens, max_turn_tokens=agent.max_turn_tokens
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
                episode.wrote(
                    step.place,
                    sample.token_ids,
                    sample.log_probs,
                    sample.token_versions,
                    sample.finish_reason,
                )
            else:
                answer, reply = await responder.answer(step)
                say(reply.messages)
                episode.answered(step.place, answer)
    finally:
        # Closed after an error too, since the environment may hold resources.
        await responder.close()

    if not parsed.json:
        _print_end(writer, episode.trajectory, parsed.log_probs)
    return _Played(episode.trajectory, messages)


def _print_end(writer: Writer, trajectory: Trajectory, with_log_probs: bool) -> None:
    assert trajectory.end is not None
    errors = [f"{count} {kind.value}" for kind, count in trajectory.call_errors.items()]
    counts = [
        f"turns {trajectory.num_turns}",
        f"calls {trajectory.num_calls}",
        *errors,
        f"tokens {len(trajectory.token_ids)}",
    ]
    print(f"[{trajectory.end.value}: {', '.join(counts)}]")

    if with_log_probs:
        rows = zip(
            trajectory.token_ids.tolist(),
            trajectory.log_probs.tolist(),
            trajectory.mask.tolist(),
            strict=True,
        )
        for token_id, log_prob, is_models in rows:
            print(
                f"{f'{log_prob:10.4f}' if is_models else ' ' * 10}  {writer.tokenizer.decode([token_id])!r}"
            )


def _values(played: _Played, with_log_probs: bool) -> dict[str, Any]:
    trajectory, messages = played
    assert trajectory.end is not None
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    values = {
        "text": answers[-1],
        "conversation": messages,
        "end": trajectory.end.value,
        "num_turns": trajectory.num_turns,
        "num_calls": trajectory.num_calls,
        "call_errors": {kind.value: count for kind, count in trajectory.call_errors.items()},
        "turn_rewards": trajectory.turn_rewards,
    }
    if not with_log_probs:
        return values
    tokens = {
        "token_ids": trajectory.token_ids,
        "log_probs": trajectory.log_probs,
        "response_mask": trajectory.mask,
    }

    return values | {name: row.tolist() for name, row in tokens.items()}
