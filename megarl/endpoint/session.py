"""A session: the conversation of one episode's agent with the model, and its record as tokens."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from megarl.agents.conversation_tree import ConversationTree, RecordedTurn
from megarl.agents.message_keys import message_key, tools_key
from megarl.agents.protocol import Task
from megarl.agents.trajectory import Author, EpisodeEnd, Segment
from megarl.data.tool_results import order_results
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.chat_tokens import ChatTokens, ReadTurn
from megarl.endpoint.turn_query import SampledChoice, TurnQuery, TurnReply


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """The limits of a session.

    Attributes:
        max_turns: Turns of the model, in all branches together.
        max_tokens: Tokens of a conversation, prompt and turns together.
        max_turn_tokens: Tokens per turn. None: limited by `max_tokens` only.
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int | None = None


class SampledTurn(NamedTuple):
    """A turn as an engine returned it, see Sample."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    token_versions: np.ndarray
    finish_reason: Literal["stop", "length"]


# token ids, maximum number of new tokens, seed
Generate = Callable[[list[int], int, int], Coroutine[Any, Any, SampledTurn]]


class TurnPlan(NamedTuple):
    """A request that was accepted.

    Attributes:
        parent: The turn that it continues.
        keys: Keys of the messages after the parent's answer.
        bridge: The tokens after the parent's tokens.
        token_ids: All tokens before the new turn.
    """

    query: TurnQuery
    parent: int | None
    keys: tuple[str, ...]
    bridge: list[int]
    token_ids: list[int]
    max_new_tokens: int
    seeds: list[int]


class AgentSession:
    """The conversation of one episode.

    Args:
        tokens: Renders and reads turns.
        generate: Samples a turn of the model. If it is cancelled, the sample is not needed.
        limits: Limits of the session.
        task: What the episode is about.

    Attributes:
        key: The secret by which clients name the session.
        reward: The reward of the episode that the agent has set.
        turn_rewards: Rewards of turns that the agent has set, by the turns' numbers in the tree.
        answered: Numbers of the turns of each answer, by its id.
        limit: The first limit that refused a request.
        num_abandoned: Requests whose client disconnected.
        is_abandoned: Whether the client of the last request disconnected.
        is_open: Whether the session accepts requests.
    """

    def __init__(self, tokens: ChatTokens, generate: Generate, limits: SessionLimits, task: Task) -> None:
        self.key = f"sk-megarl-{secrets.token_urlsafe(32)}"
        self.task = task
        self.tree = ConversationTree()
        self.reward: float | None = None
        self.turn_rewards: dict[int, float] = {}
        self.answered: dict[str, list[int]] = {}
        self.limit: EpisodeEnd | None = None
        self.num_calls = 0
        self.is_truncated = False
        self.num_abandoned = 0
        self.is_abandoned = False
        self.is_open = True

        self._tokens = tokens
        self._generate = generate
        self._limits = limits
        self._num_begun = 0
        self._prompts: Counter[bytes] = Counter()

    def plan(self, query: TurnQuery) -> TurnPlan:
        """Accept a request.

        Raises:
            ApiError: The session is over, a limit is reached, or the template refuses the messages.
        """
        if not self.is_open:
            raise ApiError("the episode of this key is over", status=403, code="episode_over")
        self._refuse_more_turns(query.num_choices)

        parent, keys, bridge = self._found(query)
        token_ids = [*self.tree.token_ids(parent), *bridge]
        at_most = [self._room(len(token_ids)), self._limits.max_turn_tokens, query.max_tokens]
        self._num_begun += query.num_choices

        return TurnPlan(
            query,
            parent,
            keys,
            bridge,
            token_ids,
            min(limit for limit in at_most if limit is not None),
            self._seeds(token_ids, query.num_choices),
        )

    def num_tokens(self, query: TurnQuery) -> int:
        """Return the number of tokens before the turn of a request. Raises ApiError, see `plan`."""
        parent, _, bridge = self._found(query)
        return len(self.tree.token_ids(parent)) + len(bridge)

    async def answer(self, plan: TurnPlan) -> TurnReply:
        """Sample the turns of an accepted request and record them."""
        self.is_abandoned = False
        samples = await asyncio.gather(
            *(self._generate(plan.token_ids, plan.max_new_tokens, seed) for seed in plan.seeds)
        )
        first = len(self.tree.turns)
        choices = [self._record(plan, sample) for sample in samples]
        reply = TurnReply(
            uuid.uuid4().hex, choices, len(plan.token_ids), len(plan.token_ids) - len(plan.bridge)
        )
        self.answered[reply.id] = list(range(first, len(self.tree.turns)))
        return reply

    def abandon(self) -> None:
        """Note that the client of a request has disconnected."""
        self.num_abandoned += 1
        self.is_abandoned = True

    def _found(self, query: TurnQuery) -> tuple[int | None, tuple[str, ...], list[int]]:
        """Return the recorded turn that a request continues, the keys of its new messages, and their tokens.

        Recorded tokens are reused, and only what follows them is tokenized.
        """
        try:
            messages = order_results(query.messages)
            keys = [message_key(message) for message in messages]
            found = self.tree.match(keys, tools_key(query.tools))
            new = messages[found.num_messages :]
            if found.turn is None:
                bridge = self._tokens.begin(new, query.tools)
            else:
                written = self.tree.turns[found.turn].written.token_ids.tolist()
                bridge = self._tokens.bridge(written, new, query.tools)
        except ValueError as error:
            raise ApiError(str(error), code="invalid_messages", parameter="messages") from error

        return found.turn, tuple(keys[found.num_messages :]), bridge

    def _record(self, plan: TurnPlan, sample: SampledTurn) -> SampledChoice:
        tools = plan.query.tools
        text = self._tokens.plain(sample.token_ids.tolist(), tools)
        stop, sample, text = self._stopped(plan.query, sample, text)
        read = self._tokens.read(text, tools)
        self.num_calls += len(read.calls)
        self.is_truncated |= sample.finish_reason == "length"

        self.tree.add(
            RecordedTurn(
                parent=plan.parent,
                tools=tools_key(tools),
                messages=plan.keys,
                answer=message_key(_message(read)),
                bridge=plan.bridge,
                written=Segment(
                    author=Author.model,
                    token_ids=sample.token_ids,
                    log_probs=sample.log_probs,
                    token_versions=sample.token_versions,
                ),
            )
        )
        return SampledChoice(
            *read,
            sample.finish_reason,
            stop,
            self._tokens.texts(sample.token_ids.tolist()),
            sample.log_probs.tolist(),
        )

    def _stopped(
        self, query: TurnQuery, sample: SampledTurn, text: str
    ) -> tuple[str | None, SampledTurn, str]:
        """Cut a sample after the token that completes a stop text.

        Engines sample the whole turn. Its beginning is what an engine that stops there would have sampled.
        """
        found = [(place, stop) for stop in query.stop if (place := text.find(stop)) >= 0]
        if not found:
            return None, sample, text
        place, stop = min(found)

        ids = sample.token_ids.tolist()
        # If a prefix contains the text, every longer one does, so the shortest one can be bisected.
        count = 1 + bisect_left(
            range(1, len(ids)), True, key=lambda number: stop in self._tokens.plain(ids[:number], query.tools)
        )
        cut = SampledTurn(
            sample.token_ids[:count], sample.log_probs[:count], sample.token_versions[:count], "stop"
        )
        return stop, cut, text[:place]

    def _refuse_more_turns(self, num_choices: int) -> None:
        most = self._limits.max_turns
        if self._num_begun + num_choices > most:
            self.limit = self.limit or EpisodeEnd.turns
            raise ApiError(
                f"the episode has had {self._num_begun} of agent.max_turns={most} turns of the model, and "
                f"this request asks for {num_choices}",
                code="episode_limit",
            )

    def _room(self, num_tokens: int) -> int:
        """Return how many tokens can follow. Raises ApiError, with the wording that agents look for."""
        most = self._limits.max_tokens
        if num_tokens >= most:
            self.limit = self.limit or EpisodeEnd.length
            raise ApiError(
                f"This model's maximum context length is {most} tokens (data.max_prompt_length + "
                f"data.max_response_length). However, your messages resulted in {num_tokens} tokens. Please "
                "reduce the length of the messages.",
                code="context_length_exceeded",
                parameter="messages",
            )
        return most - num_tokens

    def _seeds(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the seeds of a request, which depend on its tokens and on earlier equal requests.

        Concurrent requests of an agent may arrive in any order.
        """
        digest = hashlib.sha256(np.array(token_ids, dtype=np.int64).tobytes()).digest()
        first = self._prompts[digest]
        self._prompts[digest] += count
        entropy = [self.task.seed, int.from_bytes(digest[:8], "little")]
        return np.random.SeedSequence(entropy).generate_state(first + count)[first:].tolist()


def _message(read: ReadTurn) -> dict[str, Any]:
    """Return the message that a client gets, as chat templates read it."""
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in read.calls]
    return {"role": "assistant", "content": read.text, **({"tool_calls": calls} if calls else {})}
