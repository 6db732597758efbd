"""A session: the conversation of one episode's agent with the model, and its record as tokens.

An agent sends its whole conversation with each request. What the model wrote is kept as the tokens that it
sampled, in a tree of turns (`conversation_tree.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

from megarl.agents.episode import EpisodeLimits
from megarl.agents.protocol import Task
from megarl.agents.trajectory import EpisodeEnd, Sample, Segment, Trajectory
from megarl.data.tool_columns import order_results
from megarl.endpoint.api_error import ApiError
from megarl.endpoint.chat_tokens import ChatTokens
from megarl.endpoint.conversation_tree import ConversationTree, RecordedTurn, message_key, tools_key
from megarl.endpoint.request_fields import SampledChoice, TurnQuery, TurnReply

# token ids, maximum number of new tokens, seed
Generate = Callable[[list[int], int, int], Coroutine[Any, Any, Sample]]


class TurnPlan(NamedTuple):
    """A request and its place in the conversation.

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


class AgentSession:
    """The conversation of one episode.

    Args:
        tokens: Renders and reads turns.
        generate: Samples a turn of the model. If it is cancelled, the sample is not needed.
        limits: `max_turns` counts the turns of all branches, and `max_tokens` the tokens of a conversation,
            prompt and turns together.
        task: What the episode is about.

    Attributes:
        key: The secret by which clients name the session.
        reward: The reward of the episode that the agent has set.
        turn_rewards: Rewards of turns that the agent has set, by the turns' numbers in the tree.
        metrics: Further numbers about the episode, by name.
        answered: Numbers of the turns of each answer, by its id.
        limit: The first limit that refused a request.
        num_abandoned: Requests whose client disconnected.
        is_abandoned: Whether the client of the last request disconnected.
        has_client: Whether a request with its key has arrived.
        is_open: Whether the session accepts requests.
    """

    def __init__(self, tokens: ChatTokens, generate: Generate, limits: EpisodeLimits, task: Task) -> None:
        self.key = f"sk-megarl-{secrets.token_urlsafe(32)}"
        self.task = task
        self.tree = ConversationTree()
        self.reward: float | None = None
        self.turn_rewards: dict[int, float] = {}
        self.metrics: dict[str, float] = {}
        self.answered: dict[str, list[int]] = {}
        self.limit: EpisodeEnd | None = None
        self.num_calls = 0
        self.is_truncated = False
        self.num_abandoned = 0
        self.is_abandoned = False
        self.has_client = False
        self.is_open = True

        self._tokens = tokens
        self._generate = generate
        self._limits = limits
        self._num_begun = 0  # turns that are recorded or being sampled
        self._seeds: defaultdict[bytes, set[int]] = defaultdict(set)  # of those turns, by their prompts

    def plan(self, query: TurnQuery) -> TurnPlan:
        """Find the recorded turn that a request continues, and tokenize the messages after it.

        This changes nothing, and may run in another thread.

        Raises:
            ApiError: The template refuses the messages.
        """
        try:
            messages = order_results(query.messages)
            keys = [message_key(message) for message in messages]
            parent, num_recorded = self.tree.match(keys, tools_key(query.tools))
            new = messages[num_recorded:]
            if parent is None:
                bridge = self._tokens.begin(new, query.tools)
            else:
                written = self.tree.turns[parent].written.token_ids.tolist()
                bridge = self._tokens.bridge(written, new, query.tools)
        except ValueError as error:
            raise ApiError(str(error), code="invalid_messages", parameter="messages") from error

        token_ids = [*self.tree.token_ids(parent), *bridge]
        return TurnPlan(query, parent, tuple(keys[num_recorded:]), bridge, token_ids)

    def answer(self, plan: TurnPlan) -> asyncio.Task[TurnReply]:
        """Begin to sample the turns of a request. They are recorded when all of them are complete.

        A request that is cancelled or fails counts as if it had never been sent.

        Raises:
            ApiError: The session is over, or a limit is reached.
        """
        if not self.is_open:
            raise ApiError("the episode of this key is over", status=403, code="episode_over")
        num_choices = plan.query.num_choices
        self._refuse_more_turns(num_choices)
        at_most = [self._room(len(plan.token_ids)), self._limits.max_turn_tokens, plan.query.max_tokens]
        max_new_tokens = min(limit for limit in at_most if limit is not None)

        seeds = self._draw_seeds(plan.token_ids, num_choices)
        self._num_begun += num_choices
        self.is_abandoned = False
        answering = asyncio.ensure_future(self._sample(plan, max_new_tokens, seeds))

        def settle(answered: asyncio.Task[TurnReply]) -> None:
            if answered.cancelled() or answered.exception() is not None:
                self._num_begun -= num_choices
                self._seeds[_digest(plan.token_ids)].difference_update(seeds)

        # A task that is cancelled before it has begun never enters a `try` of its own.
        answering.add_done_callback(settle)
        return answering

    def abandon(self) -> None:
        """Note that the client of a request has disconnected."""
        self.num_abandoned += 1
        self.is_abandoned = True

    async def _sample(self, plan: TurnPlan, max_new_tokens: int, seeds: Sequence[int]) -> TurnReply:
        samples = await asyncio.gather(
            *(self._generate(plan.token_ids, max_new_tokens, seed) for seed in seeds)
        )
        first = len(self.tree.turns)
        choices = [self._record(plan, sample) for sample in samples]
        reply = TurnReply(
            uuid.uuid4().hex, choices, len(plan.token_ids), len(plan.token_ids) - len(plan.bridge)
        )
        self.answered[reply.id] = list(range(first, len(self.tree.turns)))
        return reply

    def _record(self, plan: TurnPlan, sample: Sample) -> SampledChoice:
        tools = plan.query.tools
        text = self._tokens.plain(sample.token_ids.tolist(), tools)
        stop, sample, text = self._stopped(plan.query, sample, text)
        text, reasoning, num_reasoning, calls = self._tokens.read(sample.token_ids.tolist(), text, tools)
        self.num_calls += len(calls)
        self.is_truncated |= sample.finish_reason == "length"

        self.tree.add(
            RecordedTurn(
                parent=plan.parent,
                tools=tools_key(tools),
                messages=plan.keys,
                answer=message_key({"role": "assistant", "content": text, "tool_calls": calls}),
                bridge=plan.bridge,
                written=Segment.of_model(sample),
            )
        )
        return SampledChoice(
            text,
            reasoning,
            num_reasoning,
            calls,
            sample.finish_reason,
            stop,
            self._tokens.token_bytes(sample.token_ids.tolist()),
            sample.log_probs.tolist(),
        )

    def _stopped(self, query: TurnQuery, sample: Sample, text: str) -> tuple[str | None, Sample, str]:
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
        return stop, sample.beginning(count), text[:place]

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

    def _draw_seeds(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return seeds that no other turn after these tokens has.

        They depend on the tokens and on earlier equal requests, because concurrent requests of an agent may
        arrive in any order.
        """
        digest = _digest(token_ids)
        used = self._seeds[digest]
        entropy = [self.task.seed, int.from_bytes(digest[:8], "little")]
        drawn = np.random.SeedSequence(entropy).generate_state(len(used) + count).tolist()
        seeds = [seed for seed in drawn if seed not in used][:count]
        used.update(seeds)
        return seeds


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.array(token_ids, dtype=np.int64).tobytes()).digest()


# ---- messages between the driver and the process of a session


class SessionOrder(NamedTuple):
    """An episode to run. `prompt` has the tokens of the row's prompt, for an episode without a turn."""

    episode: int
    task: Task
    prompt: list[int]


class SampleOrder(NamedTuple):
    """The turn for a SampleRequest."""

    episode: int
    request: int
    sample: Sample


class SampleRequest(NamedTuple):
    """A turn that a session needs. `request` is a number that the process uses only once."""

    episode: int
    request: int
    token_ids: list[int]
    max_new_tokens: int
    seed: int

    is_final = False


class DroppedRequest(NamedTuple):
    """A SampleRequest whose turn is not needed any more."""

    episode: int
    request: int

    is_final = False


class SessionEnd(NamedTuple):
    """The episode of a session. `why` explains a failure."""

    episode: int
    trajectory: Trajectory
    why: str = ""

    is_final = True


SessionReport = SampleRequest | DroppedRequest | SessionEnd
