"""Test the tree of a session's turns against trees built by hand: which tokens are reused, and in which row each
sampled token has its loss."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from megarl.agents.trajectory import Author, Segment, Trajectory
from megarl.endpoint.conversation_tree import ConversationTree, RecordedTurn, message_key, tools_key


def written(*ids: int) -> Segment:
    return Segment(
        author=Author.model,
        token_ids=np.array(ids, dtype=np.int32),
        log_probs=-np.array(ids, dtype=np.float32),
        token_versions=np.full(len(ids), 3, dtype=np.int32),
    )


def record(tree: ConversationTree, messages: str, bridge: list[int], answer: str, *ids: int) -> int:
    """Record the answer to a request whose messages are the letters of `messages`, as a session does."""
    parent, num_recorded = tree.match(messages, "")
    return tree.add(
        RecordedTurn(
            parent=parent,
            tools="",
            messages=tuple(messages[num_recorded:]),
            answer=answer,
            bridge=bridge,
            written=written(*ids),
        )
    )


def rows_of(tree: ConversationTree) -> list[tuple[list[int], list[int], list[bool]]]:
    return [(list(row.prompt), row.token_ids.tolist(), row.mask.tolist()) for row in tree.rows()]


YES = True
NO = False


def test_an_agent_that_appends_has_one_row() -> None:
    tree = ConversationTree()
    record(tree, "u", [1, 2], "a", 10, 11)
    record(tree, "uat", [3], "b", 12)
    record(tree, "uatbv", [4, 5], "c", 13, 14)

    assert [turn.parent for turn in tree.turns] == [None, 0, 1]
    assert tree.token_ids(2) == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert rows_of(tree) == [
        ([1, 2], [10, 11, 3, 12, 4, 5, 13, 14], [YES, YES, NO, YES, NO, NO, YES, YES]),
    ]
    (row,) = tree.rows()
    assert row.num_turns == 3
    assert row.log_probs.tolist() == [-10, -11, 0, -12, 0, 0, -13, -14]
    assert row.weight_versions == (3,)


def test_a_repeated_request_is_a_branch_that_shares_the_tokens_before_it() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    record(tree, "uat", [2], "b", 11)
    record(tree, "uat", [2], "c", 12)  # the client gave up, and asked again
    record(tree, "uatcv", [3], "d", 13)

    assert [turn.parent for turn in tree.turns] == [None, 0, 0, 2]
    assert rows_of(tree) == [
        ([1], [10, 2, 11], [YES, NO, YES]),
        ([1, 10, 2], [12, 3, 13], [YES, NO, YES]),
    ]


def test_compaction_begins_a_conversation_of_its_own() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    record(tree, "uat", [2], "b", 11)
    record(tree, "sw", [7, 8], "c", 12)  # a summary replaces the history
    record(tree, "swct", [9], "d", 13)

    assert [turn.parent for turn in tree.turns] == [None, 0, None, 2]
    assert rows_of(tree) == [
        ([1], [10, 2, 11], [YES, NO, YES]),
        ([7, 8], [12, 9, 13], [YES, NO, YES]),
    ]


def test_the_row_of_the_main_agent_follows_those_of_its_sub_agents() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    record(tree, "x", [5], "y", 20)  # two sub-agents, at the same time
    record(tree, "z", [6], "w", 30)
    record(tree, "xyt", [7], "k", 21)
    record(tree, "uar", [2], "b", 11)

    assert rows_of(tree) == [
        ([6], [30], [YES]),
        ([5], [20, 7, 21], [YES, NO, YES]),
        ([1], [10, 2, 11], [YES, NO, YES]),
    ]


def test_a_rewritten_answer_is_no_recorded_one() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    record(tree, "uBt", [1, 99, 2], "c", 11)  # the client edited the answer, so all of it is a prompt
    assert rows_of(tree) == [([1], [10], [YES]), ([1, 99, 2], [11], [YES])]


def test_of_equal_answers_the_last_one_is_continued() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    record(tree, "u", [1], "a", 11)  # two choices (n=2) with the same text
    assert tree.match("uat", "") == (1, 2)
    record(tree, "uat", [2], "b", 12)
    assert rows_of(tree) == [([1], [10], [YES]), ([1], [11, 2, 12], [YES, NO, YES])]


def test_other_tools_are_another_prompt() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    assert tree.match("uat", tools_key([{"type": "function"}])) == (None, 0)


def test_a_match_leaves_a_message_to_answer() -> None:
    tree = ConversationTree()
    record(tree, "u", [1], "a", 10)
    assert tree.match("ua", "") == (None, 0)
    assert tree.match("u", "") == (None, 0)


def test_each_sampled_token_has_its_loss_once_and_its_own_past() -> None:
    """Random sessions: the loss tokens of all rows are the sampled tokens, each after the tokens that it was
    sampled after."""
    for seed in range(20):
        chance = random.Random(seed)
        tree = ConversationTree()
        for number in range(30):
            parent = chance.choice([None, *range(number)])
            bridge = [1000 + number] * chance.randint(1, 3)
            ids = [10 * number + place for place in range(chance.randint(1, 4))]
            tree.add(
                RecordedTurn(
                    parent=parent,
                    tools="",
                    messages=(number,),
                    answer=-number,
                    bridge=bridge,
                    written=written(*ids),
                )
            )

        pasts = {
            token: tuple(tree.token_ids(turn.parent))
            + tuple(turn.bridge)
            + tuple(turn.written.token_ids[:place])
            for turn in tree.turns
            for place, token in enumerate(turn.written.token_ids.tolist())
        }
        found = [past for row in tree.rows() for past in trained_with_past(row)]
        assert Counter(token for token, _ in found) == Counter(dict.fromkeys(pasts, 1))
        assert dict(found) == pasts


def trained_with_past(row: Trajectory) -> list[tuple[int, tuple[int, ...]]]:
    ids = [*row.prompt, *row.token_ids.tolist()]
    offset = len(row.prompt)
    return [
        (ids[offset + place], tuple(ids[: offset + place])) for place, is_own in enumerate(row.mask) if is_own
    ]


def test_keys_do_not_depend_on_the_form_in_which_a_client_sends_a_message() -> None:
    call = {"function": {"name": "price", "arguments": {"a": 1, "b": 2}}}
    received = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", **call}],
    }
    sent = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    assert message_key(received) == message_key(sent)
    assert message_key({"role": "user", "content": "a"}) != message_key({"role": "tool", "content": "a"})
    other = {"function": {"name": "price", "arguments": {"a": 1, "b": 3}}}
    assert message_key(received) != message_key({"role": "assistant", "content": "", "tool_calls": [other]})
