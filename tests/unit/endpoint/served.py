"""A session of the real server, with a tiny model that samples greedily."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import AgentConfig
from megarl.data.tokenizer import load_tokenizer
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.server import EndpointServer, RequestBodies, build_app
from megarl.endpoint.session import AgentSession
from megarl.rollout.tool_calls import call_format

LIMITS = EpisodeLimits(max_turns=20, max_tokens=200)


@dataclass
class GreedyModel:
    """Continues prompts greedily, as an engine does.

    Attributes:
        prompts: The prompts so far.
        is_held: Requests wait while this is set.
        num_cancelled: Number of requests that were cancelled.
    """

    model: PreTrainedModel
    end_token: int
    prompts: list[list[int]] = field(default_factory=list)
    is_held: bool = False
    num_cancelled: int = 0

    async def generate(self, token_ids: list[int], max_new_tokens: int, seed: int) -> Sample:
        self.prompts.append(token_ids)
        try:
            while self.is_held:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        ids = list(token_ids)
        values = []
        while len(values) < max_new_tokens and (not values or ids[-1] != self.end_token):
            log_probs = self.log_probs(ids)[-1]
            ids.append(int(log_probs.argmax()))
            values.append(float(log_probs.max()))
        new = np.array(ids[len(token_ids) :], dtype=np.int32)
        reason = "stop" if new[-1] == self.end_token else "length"
        return Sample(new, np.array(values, dtype=np.float32), reason, (VersionSpan(7, len(new)),))

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the log-probs (S, V) of the tokens that follow each prefix."""
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0].log_softmax(-1)


@dataclass
class Served:
    """A server with sessions. The event loop of the server runs in its own thread."""

    url: str
    sessions: dict[str, AgentSession]
    model: GreedyModel
    tokens: ChatTokens

    def open(self, limits: EpisodeLimits = LIMITS, task: Task | None = None) -> AgentSession:
        session = AgentSession(self.tokens, self.model.generate, limits, task or Task(seed=3))
        self.sessions[session.key] = session
        return session


@contextmanager
def serving(folder: Path, ignored: Sequence[str] = ("temperature",)) -> Generator[Served]:
    """Serve the model and the tokenizer of a folder."""
    tokenizer = load_tokenizer(str(folder))
    model = GreedyModel(AutoModelForCausalLM.from_pretrained(folder), tokenizer.eos_token_id)
    sessions: dict[str, AgentSession] = {}
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(what: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(what, loop).result(30)

    server = EndpointServer(build_app(sessions, ignored, RequestBodies(1 << 20)), "127.0.0.1")
    run(server.start())
    try:
        yield Served(server.url, sessions, model, ChatTokens(tokenizer, partial(call_format, AgentConfig())))
    finally:
        run(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
