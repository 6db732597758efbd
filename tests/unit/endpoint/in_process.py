"""The application of the endpoint without sockets, with a stub of an engine that answers every request at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Sample, VersionSpan
from megarl.config.schema import AgentConfig
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.external import ExternalHarness
from megarl.endpoint.server import RequestBodies, build_app
from megarl.endpoint.session import AgentSession
from megarl.rollout.tool_calls import call_format

RUN_KEY = "the-key-of-the-run"
_SPECIAL = ["<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>"]
_TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }};{% endfor %}<end>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte, as byte-level BPE without merges."""
    vocabulary = {
        piece: index for index, piece in enumerate([*_SPECIAL, *pre_tokenizers.ByteLevel.alphabet()])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=_SPECIAL[2:],
        chat_template=_TEMPLATE,
    )


class InProcess:
    """A session whose model writes `turns`, one after the other and again from the beginning.

    Args:
        has_external: Also serve the paths of agents elsewhere. Their key, RUN_KEY, must be in the environment.

    Attributes:
        client: A client with the key of the session.
        seeds: The seeds of the requests to the engine so far.
        is_held: Requests to the engine wait while this is set.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: Sequence[str],
        *,
        max_turns: int = 1 << 30,
        max_tokens: int = 1 << 16,
        max_bytes: int = 1 << 20,
        has_external: bool = False,
        tokens: ChatTokens | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.seeds: list[int] = []
        self.is_held = False
        self._turns = turns
        self.session = AgentSession(
            tokens or ChatTokens(tokenizer, partial(call_format, AgentConfig())),
            self._generate,
            EpisodeLimits(max_turns=max_turns, max_tokens=max_tokens),
            Task(seed=3),
        )
        app = build_app({self.session.key: self.session}, (), bodies := RequestBodies(max_bytes))
        self.harness = ExternalHarness() if has_external else None
        if self.harness is not None:
            self.harness.add_routes(app, bodies)
        self.app = app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://endpoint",
            headers={"x-api-key": self.session.key},
        )

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> httpx.Response:
        """Send a request. An exception of the application is raised here."""
        if isinstance(body, bytes):
            return await self.client.post(path, content=body, headers=headers)
        return await self.client.post(path, json=body, headers=headers)

    async def _generate(self, token_ids: list[int], max_new_tokens: int, seed: int) -> Sample:
        self.seeds.append(seed)
        while self.is_held:
            await asyncio.sleep(0)
        text = self._turns[(len(self.seeds) - 1) % len(self._turns)]
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: max_new_tokens - 1]
        ids = np.array([*ids, self.tokenizer.eos_token_id], np.int32)
        return Sample(ids, np.zeros(len(ids), np.float32), "stop", (VersionSpan(0, len(ids)),))
