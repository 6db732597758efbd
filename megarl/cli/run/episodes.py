"""`megarl generate` with tools or an environment: prints whole episodes as conversations."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def run(parsed: argparse.Namespace) -> int:
    """Print the episodes of each prompt, and return 0.

    Raises:
        ValueError: The model, prompts or options are invalid. Raised before weights are loaded.
        EnvironmentFailedError: The environment failed.
    """
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
        sample = index % parsed.n
        task = Task(messages=chat, seed=request.sampling.seed)
        responder = Responder(make_environment(), template, parse, task)
        if len(requests) > 1 and not parsed.json:
            print(f"--- {chat[-1]['content']}" + (f" [{sample + 1} of {parsed.n}]" if parsed.n > 1 else ""))
        trajectory, messages = asyncio.run(_play(writer, template, responder, request, agent, parsed))
        if parsed.json:
            values = _values(trajectory, messages, parsed.log_probs)
            print(dump_readable({"messages": chat, "sample": sample, **values}))

    return 0


def _agent(parsed: argparse.Namespace) -> AgentConfig:
    """Return the agent's section from the options. Raises ValueError or its subclass ConfigError."""
    given = [f"--{name}" for name in ("agent", "tool", "environment") if getattr(parsed, name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} exclude each other; give one of them")

    if parsed.agent is None:
        agent = AgentConfig(
            tools=[ToolConfig(path=path, name=name) for path, name in map(_named, parsed.tool)],
            environment=_environment(parsed.environment),
        )
    else:
        agent = load_config(PPOConfig, parsed.agent).agent
        if agent.harness.is_used:
            raise ValueError(
                f"--agent {parsed.agent}: the agent is a program (agent.harness), which runs in a training "
                f"run or in `megarl eval`; start it by hand against a server of the model instead"
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


def _named(text: str) -> tuple[str | None, str]:
    """Split `FILE.py:NAME` into path and name. A built-in tool has no path."""
    path, colon, name = text.rpartition(":")
    return (path if colon else None), name


def _environment(text: str | None) -> EnvironmentConfig:
    if text is None:
        return EnvironmentConfig()
    path, name = _named(text)
    if path is None:
        raise ValueError(f"there is no built-in environment {name!r}; write --environment FILE.py:NAME")
    return EnvironmentConfig(path=path, name=name)


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


def _values(trajectory: Trajectory, messages: Sequence[Message], with_log_probs: bool) -> dict[str, Any]:
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
