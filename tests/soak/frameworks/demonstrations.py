"""Demonstrations: the framework plays episodes through the endpoint, and a teacher writes the turns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from examples.agent.prepare import conversation, prompt_row
from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, Trajectory, VersionSpan
from megarl.config.schema import AgentConfig, HarnessConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.harness import load_harness
from megarl.endpoint.session import (
    SampleOrder,
    SampleRequest,
    SessionEnd,
    SessionOrder,
    SessionReport,
)
from megarl.endpoint.session_server import SessionServer
from megarl.rollout.tool_calls import call_format
from tests.soak.frameworks.formats import MAX_TOKENS, Format

_NUM_AT_ONCE = 16
_IGNORED = -100  # the label of tokens without a loss


class Demonstration(NamedTuple):
    teacher: str
    ended: SessionEnd


def record(
    harness: HarnessConfig,
    tokenizer: PreTrainedTokenizerFast,
    format_: Format,
    teachers: Sequence[str],
    seed: int = 0,
) -> list[Demonstration]:
    """Play one episode for each of the teachers (see examples/agent/prepare.py)."""
    chance = random.Random(seed)
    rows = [prompt_row(chance, chance.random() < 0.5) for _ in teachers]
    turns = {
        number: [
            format_.written(message)
            for message in conversation(row["extra_info"], teacher, chance)["messages"]
            if message["role"] == "assistant"
        ]
        for number, (row, teacher) in enumerate(zip(rows, teachers, strict=True))
    }
    ended: dict[int, SessionEnd] = {}

    async def play() -> None:
        def report(given: SessionReport) -> None:
            if isinstance(given, SessionEnd):
                ended[given.episode] = given
            elif isinstance(given, SampleRequest):
                asyncio.ensure_future(answer(given))  # noqa: RUF006

        async def answer(asked: SampleRequest) -> None:
            ids = tokenizer.encode(turns[asked.episode].pop(0)) + [tokenizer.eos_token_id]
            sample = Sample(
                np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", (VersionSpan(0, len(ids)),)
            )
            await server.accept(SampleOrder(asked.episode, asked.request, sample))

        server = SessionServer(
            load_harness(harness, _NUM_AT_ONCE),
            ChatTokens(tokenizer, partial(call_format, AgentConfig())),
            EpisodeLimits(max_turns=4, max_tokens=MAX_TOKENS),
            harness,
            _NUM_AT_ONCE,
            report,
        )
        await server.start()
        orders = [
            SessionOrder(
                number,
                Task(
                    messages=row["prompt"],
                    reward_model=row["reward_model"],
                    extra_info=row["extra_info"],
                    seed=number,
                ),
                [0],
            )
            for number, row in enumerate(rows)
        ]
        await asyncio.gather(*map(server.accept, orders))

    asyncio.run(play())
    return [Demonstration(teacher, ended[number]) for number, teacher in enumerate(teachers)]


def fine_tune(folder: Path, rows: Sequence[Trajectory], steps: int, seed: int = 0) -> float:
    """Train the model of a folder on the teachers' tokens, and return the last loss."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    chance = random.Random(seed)
    loss = torch.zeros(())

    for _ in range(steps):
        batch = chance.sample(rows, 48)
        ids = [[*row.prompt, *row.token_ids.tolist()] for row in batch]
        labels = [
            [_IGNORED] * len(row.prompt)
            + [
                token if is_own else _IGNORED
                for token, is_own in zip(row.token_ids.tolist(), row.mask, strict=True)
            ]
            for row in batch
        ]
        loss = model(_padded(ids, 0), labels=_padded(labels, _IGNORED)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    model.save_pretrained(folder)
    return float(loss)


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
