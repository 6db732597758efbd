"""The recorded turns of a session as a tree, and its paths as training rows of tokens.

As long as an agent only appends to its conversation, its turns form a path. A history that it has rewritten
(compaction), a request that it repeats, and the conversation of a sub-agent each begin a branch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from megarl.agents.trajectory import Segment, Trajectory


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """A turn of the model, a node of the tree.

    Attributes:
        parent: Number of the turn that it continues. None: it begins a conversation.
        tools: Key of the tools that the model was shown.
        messages: Keys of the messages between the parent's answer, or the beginning, and this turn.
        answer: Key of the message that the client received.
        bridge: The tokens before it: the whole prompt, or those that follow the parent's tokens.
        written: The tokens of the model.
    """

    parent: int | None
    tools: Hashable
    messages: tuple[Hashable, ...]
    answer: Hashable
    bridge: Sequence[int]
    written: Segment


class ConversationTree:
    """The recorded turns of a session. Messages and tools are compared by keys, see message_key."""

    def __init__(self) -> None:
        self.turns: list[RecordedTurn] = []
        self._children: dict[int | None, list[int]] = defaultdict(list)

    def match(self, messages: Sequence[Hashable], tools: Hashable) -> tuple[int | None, int]:
        """Find the longest recorded beginning of `messages` that leaves at least one message.

        Of turns with equal messages, such as two answers with the same text, the last one counts.

        Returns:
            The number of its last turn, or None if nothing is recorded; and the number of messages up to that
            turn's answer, which is included.
        """
        best: tuple[int | None, int] = (None, 0)
        reached = [best]

        # Different turns can have equal messages, so several branches may match. All of them are followed.
        while reached:
            parent, start = reached.pop()
            for number in self._children.get(parent, ()):
                turn = self.turns[number]
                end = start + len(turn.messages) + 1
                if (
                    end < len(messages)
                    and turn.tools == tools
                    and (*turn.messages, turn.answer) == tuple(messages[start:end])
                ):
                    reached.append((number, end))
                    best = max(best, (number, end), key=lambda each: (each[1], each[0] or 0))

        return best

    def add(self, turn: RecordedTurn) -> int:
        """Record a turn and return its number."""
        number = len(self.turns)
        self.turns.append(turn)
        self._children[turn.parent].append(number)
        return number

    def token_ids(self, number: int | None) -> list[int]:
        """Return the tokens from the beginning of the conversation to the end of a turn."""
        path = [self.turns[each] for each in self._path(number)]
        return [token for turn in path for token in (*turn.bridge, *turn.written.token_ids.tolist())]

    def rows(self, rewards: Mapping[int, float] = MappingProxyType({})) -> list[Trajectory]:
        """Return one training row per leaf, ordered by their last turns.

        Each turn has its loss in the first row that contains it. In later rows its tokens belong to the
        prompt, so each sampled token is trained once.

        Args:
            rewards: Rewards of turns by number. The others have 0.
        """
        rows = []
        trained: set[int] = set()

        for leaf in range(len(self.turns)):
            if leaf in self._children:
                continue
            new = [number for number in self._path(leaf) if number not in trained]
            trained.update(new)
            rows.append(self._row(new, rewards))

        return rows

    def _row(self, numbers: Sequence[int], rewards: Mapping[int, float]) -> Trajectory:
        """Return the row that trains these turns, which follow one another."""
        first, *later = (self.turns[number] for number in numbers)
        segments = [first.written]
        for turn in later:
            segments += [Segment.of_environment(turn.bridge), turn.written]

        return Trajectory(
            prompt=[*self.token_ids(first.parent), *first.bridge],
            segments=segments,
            turn_rewards=[rewards.get(number, 0.0) for number in numbers],
        )

    def _path(self, number: int | None) -> Iterator[int]:
        """Yield the turns from the beginning of a conversation to a turn."""
        if number is not None:
            yield from self._path(self.turns[number].parent)
            yield number


# ---- the keys of messages. Clients send a message back in another form than they received it: without its
# ids, with null fields, with content as a list of parts, or with arguments of a call that they have parsed
# and written again.


def message_key(message: Mapping[str, Any]) -> str:
    """Return the key of a message as chat templates read it.

    Two messages have the same key if they have the same role, text, and calls (names and arguments, with
    equal numbers). Ids of calls, reasoning, and all other fields do not count.
    """
    calls = [
        (call["function"]["name"], _arguments_key(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    # The order of arguments does not matter.
    return json.dumps([message["role"], message.get("content") or "", calls], sort_keys=True)


def tools_key(tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return the key of the tools that a model is shown. Their order counts, because templates render it."""
    return json.dumps(tools or [], sort_keys=True)


def _arguments_key(arguments: Any) -> Any:
    """Return arguments as they are compared. Some clients send no arguments as null or ""."""
    return {} if arguments is None or arguments == "" else _with_equal_numbers(arguments)


def _with_equal_numbers(value: Any) -> Any:
    """Return a JSON value with one form of each number: JavaScript writes 1.0 as 1 and 1e3 as 1000."""
    if isinstance(value, float) and value.is_integer():
        # The digits count: int(1e23) is 99999999999999991611392.
        return int(Decimal(repr(value)))
    if isinstance(value, Mapping):
        return {key: _with_equal_numbers(each) for key, each in value.items()}
    return [_with_equal_numbers(each) for each in value] if isinstance(value, list | tuple) else value
