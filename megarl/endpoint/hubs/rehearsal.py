"""Plays one episode of a hub's environment with a scripted model, before a run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Author, Sample, Trajectory, VersionSpan
from megarl.config.schema import AgentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.hubs.process import HubError, HubPlayer
from megarl.endpoint.session import SampleOrder, SampleRequest, SessionEnd, SessionOrder, SessionReport
from megarl.endpoint.session_server import SessionServer


class Rehearsed(NamedTuple):
    """An episode with a scripted model.

    Attributes:
        version: The version of the hub's package.
        written: The tokens that the model wrote, in the order of its turns.
        why: Why the episode failed; empty if it did not.
    """

    version: str
    trajectory: Trajectory
    written: Sequence[list[int]]
    why: str

    @property
    def trained(self) -> list[list[int]]:
        """The tokens with a loss, by turn."""
        return [
            segment.token_ids.tolist()
            for row in self.trajectory.rows
            for segment in row.segments
            if segment.author is Author.model
        ]

    @property
    def reward(self) -> float:
        return float(sum(self.trajectory.turn_rewards))


async def rehearse_episode(
    agent: AgentConfig,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    tokens: ChatTokens,
    answers: Sequence[str],
    max_tokens: int,
) -> Rehearsed:
    """Play an episode in which the model writes the answers one after the other, and the last one again.

    Args:
        max_tokens: The limit of a conversation.

    Raises:
        HubError: The environment cannot be opened, or not within the time limit of an episode.
    """
    player = HubPlayer(agent.environment)
    ended: asyncio.Future[SessionEnd] = asyncio.get_running_loop().create_future()
    written: list[list[int]] = []
    sending = set[asyncio.Future[None]]()

    def report(report: SessionReport) -> None:
        if isinstance(report, SessionEnd):
            ended.set_result(report)
        elif isinstance(report, SampleRequest):
            text = answers[min(len(written), len(answers) - 1)]
            ids = tokenizer.encode(text, add_special_tokens=False)[: report.max_new_tokens - 1]
            written.append([*ids, tokenizer.eos_token_id])
            order = SampleOrder(report.episode, report.request, _sample(written[-1]))
            sending.add(asyncio.ensure_future(server.accept(order)))

    limits = EpisodeLimits(max_turns=agent.max_turns, max_tokens=max_tokens)
    server = SessionServer(player, tokens, limits, agent.harness, 1, report)
    limit_s = agent.harness.time_limit_s
    try:
        version = await asyncio.wait_for(player.start(), limit_s)
        await server.start()
        prompt = tokens.begin(task.messages, None)
        await server.accept(SessionOrder(0, task, prompt))
        end = await ended
    except TimeoutError as error:
        raise HubError(
            f"agent.environment: {agent.environment.name} is not open within {limit_s:g} s "
            "(agent.harness.time_limit_s)"
        ) from error
    finally:
        await player.close()
    return Rehearsed(version, end.trajectory, written, end.why)


def _sample(token_ids: list[int]) -> Sample:
    ids = np.array(token_ids, np.int32)
    return Sample(ids, np.zeros(len(ids), np.float32), "stop", (VersionSpan(0, len(ids)),))
