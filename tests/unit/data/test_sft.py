import json

import pytest
import torch

from megarl.config.schema import Overlong, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.sft import SFTDataset
from tests.unit.data.chats import (
    TEMPLATE,
    THINKING_TEMPLATE,
    TOOLS_TEMPLATE,
    assistant,
    character_tokenizer,
    user,
    write,
)


def chat(question, answer):
    return {"messages": user(question) + assistant(answer)}


def dataset(tmp_path, rows, tokenizer, max_length=60, overlong=Overlong.refuse, **changes):
    data = SFTDataConfig(max_length=max_length, overlong=overlong, **changes)
    return SFTDataset([write(tmp_path / "chats.parquet", rows)], tokenizer, data)


def test_only_the_answer_and_its_end_token_are_trained(tmp_path, tokenizer):
    examples = dataset(tmp_path, [chat("2 + 3", "5"), chat("a", "bcd")], tokenizer)
    batch = examples.batch([0, 1], ["0", "1"]).tensors
    trained = [tokenizer.decode(batch["responses"][row][batch["response_mask"][row]]) for row in range(2)]
    # The line break after the end token is added by the template.
    assert trained == ["5<|end|>", "bcd<|end|>"]
    whole = [
        tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row].bool()]) for row in range(2)
    ]
    assert whole[0] == "<|start|>user\n2 + 3<|end|>\n<|start|>assistant\n5<|end|>"
    assert batch["response_mask"].dtype == torch.bool
    num_prompt = batch["prompts"].shape[1]
    num_response = batch["responses"].shape[1]
    assert num_response == 4
    assert (
        batch["input_ids"].shape
        == batch["attention_mask"].shape
        == batch["position_ids"].shape
        == (2, num_prompt + num_response)
    )
    assert batch["position_ids"][1, num_prompt : num_prompt + 4].tolist() == [
        num_prompt - 4 + k for k in range(4)
    ]


def spelt(tokenizer, example):
    """Return the response, with trained parts in square brackets."""
    text = ""
    for number, (token, is_trained) in enumerate(zip(example.response_ids, example.is_trained, strict=True)):
        before = number > 0 and example.is_trained[number - 1]
        text += (
            "[" * (is_trained and not before) + "]" * (before and not is_trained) + tokenizer.decode([token])
        )

    return text + "]"


TWO_TURNS = user("a") + assistant("b") + user("c") + assistant("d")


def test_every_answer_is_trained_and_nothing_between_them(tmp_path, tokenizer):
    rows = [{"messages": TWO_TURNS}, chat("2", "3")]
    examples = dataset(tmp_path, rows, tokenizer)
    assert tokenizer.decode(examples[0].prompt_ids) == "<|start|>user\na<|end|>\n<|start|>assistant\n"
    assert (
        spelt(tokenizer, examples[0]) == "[b<|end|>]\n<|start|>user\nc<|end|>\n<|start|>assistant\n[d<|end|>]"
    )
    batch = examples.batch([0, 1], ["0", "1"]).tensors
    masked = [tokenizer.decode(batch["responses"][row][batch["response_mask"][row]]) for row in range(2)]
    assert masked == ["b<|end|>d<|end|>", "3<|end|>"]
    lengths = batch["attention_mask"][:, batch["prompts"].shape[1] :].sum(1).tolist()
    assert lengths == [len(examples[0].response_ids), 2]


def test_an_answer_of_weight_zero_is_not_trained(tmp_path, tokenizer):
    def of(*weights):
        chats = [user("a") + assistant("b", weight=weight) for weight in weights]
        return dataset(tmp_path, [{"messages": sum(chats, [])}], tokenizer, 100)[0]

    first = of(0, 1)
    assert tokenizer.decode(first.prompt_ids).count("b<|end|>") == 1
    assert spelt(tokenizer, first) == "[b<|end|>]"
    assert spelt(tokenizer, of(1, 0, 1)).count("[b<|end|>]") == 2
    assert spelt(tokenizer, of(1, 0, 1)).count("b<|end|>") == 3
    assert spelt(tokenizer, of(1, None, 0)).count("b<|end|>") == 2  # nothing follows the last trained answer
    with pytest.raises(DataError, match="a weight of 0, but at least one must"):
        of(0, 0)
    with pytest.raises(DataError, match=r"has the weight 0.5, expected 1 .trained, the default. or 0"):
        of(0.5)


def test_turns_are_trained_as_they_were_written_whatever_the_template_makes_of_them_later(tmp_path, caplog):
    """The template drops earlier thinking.

    The ids are prompt, answer, bridge, answer, and the number of such chats is reported.
    """
    thinking = character_tokenizer(THINKING_TEMPLATE)
    rows = [
        {"messages": user("a") + assistant("t+b") + user("c") + assistant("d")},
        {"messages": TWO_TURNS},
        chat("2", "3"),
    ]
    examples = dataset(tmp_path, rows, thinking)
    assert (
        spelt(thinking, examples[0])
        == "[t+b<|end|>]\n<|start|>user\nc<|end|>\n<|start|>assistant\n[+d<|end|>]"
    )
    assert [example.is_as_rendered for example in examples] == [False, False, True]
    assert "2 of 3 chats would be rendered differently as a whole" in caplog.text


def price_chat(arguments, **more):
    call = {"type": "function", "function": {"name": "price", "arguments": arguments}}
    asked = user("a") + assistant(None, tool_calls=[call])
    return {"messages": asked + [{"role": "tool", "content": "42"}] + assistant("42"), **more}


PRICE = {"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("arguments", [{"item": "xy"}, '{"item": "xy"}'])
@pytest.mark.parametrize("tools", [[PRICE], json.dumps([PRICE])])
def test_calls_are_trained_and_what_the_tools_say_is_not(tmp_path, arguments, tools):
    tokenizer = character_tokenizer(TOOLS_TEMPLATE)
    rows = [price_chat(arguments, tools=tools), {"messages": TWO_TURNS, "tools": None}]
    examples = dataset(tmp_path, rows, tokenizer, 100)
    assert tokenizer.decode(examples[0].prompt_ids).startswith(
        "<|start|>system\nprice.<|end|>\n<|start|>user\na"
    )
    assert (
        spelt(tokenizer, examples[0])
        == "[=price?xy<|end|>]\n<|start|>tool\n42<|end|>\n<|start|>assistant\n[42<|end|>]"
    )
    assert examples[0].is_as_rendered
    assert tokenizer.decode(examples[1].prompt_ids).startswith("<|start|>user\na")


@pytest.mark.parametrize(
    ("arguments", "tools", "said"),
    [
        ("xy", [PRICE], "message 1: found the text str 'xy', which is not JSON"),
        (
            "[1]",
            [PRICE],
            "message 1: a call of 'price' has the arguments list .1., expected an object, or its JSON text",
        ),
        (
            {"item": None, "of": "x"},
            [PRICE],
            "arguments of a tool contains null, because this format adds fields of other rows",
        ),
        (
            {"item": "xy"},
            [{"function": {"title": "price"}}],
            "column 'tools': found the tool dict .*, expected one such as {'type'",
        ),
        (
            {"item": "xy"},
            '{"price": 1}',
            "column 'tools': found dict {'price': 1}, expected a list of tools such as",
        ),
    ],
)
def test_tools_and_calls_of_another_form_are_refused(tmp_path, arguments, tools, said):
    with pytest.raises(DataError, match=f"row 0, .*{said}"):
        dataset(tmp_path, [price_chat(arguments, tools=tools)], character_tokenizer(TOOLS_TEMPLATE))


@pytest.mark.parametrize("more", [{"tools": [PRICE]}, {}])
def test_a_template_that_knows_no_tools_is_refused(tmp_path, more):
    silent = character_tokenizer(TEMPLATE.replace("message.role == 'tool'", "false"))
    with pytest.raises(
        DataError,
        match="row 0, column 'messages': the chat template leaves out 'price': it does not support tools",
    ):
        dataset(tmp_path, [price_chat({"item": "xy"}, **more)], silent)


def test_a_template_that_does_not_close_an_earlier_answer_is_refused(tmp_path):
    """The template writes a space before the end token."""
    blank = character_tokenizer(
        TEMPLATE.replace("{{ message.content }}", "{{ message.content }}{{ '' if loop.last else ' ' }}")
    )
    with pytest.raises(
        DataError,
        match=r"does not write the end token .* immediately after an earlier answer.*; it writes ' <|end|>",
    ):
        dataset(tmp_path, [{"messages": TWO_TURNS}], blank)


def test_overlong_chats(tmp_path, tokenizer):
    rows = [chat("a", "b"), chat("a", "b" * 30)]
    with pytest.raises(
        DataError, match=r"chats.parquet, row 1: 51 tokens; 1 of 2 rows have more than data.max_length=30"
    ):
        dataset(tmp_path, rows, tokenizer, 30)

    kept = dataset(tmp_path, rows, tokenizer, 30, Overlong.filter)
    assert (len(kept), kept.num_filtered) == (1, 1)


def test_a_chat_without_an_answer_is_refused(tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r"row 0, column 'messages': the roles are \['user'\]; .*the assistant's answer"
    ):
        dataset(tmp_path, [{"messages": user("a")}], tokenizer)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path):
    """The template opens thinking for generation and omits it from a finished chat."""
    thinking = character_tokenizer(TEMPLATE.replace("assistant\n{% endif", "assistant\nthink{% endif"))
    with pytest.raises(
        DataError,
        match="not the beginning of the whole chat: from token 22 on it reads 'think' and the chat '5<|end|>",
    ):
        dataset(tmp_path, [chat("2 + 3", "5")], thinking)


def test_an_answer_without_the_end_token_is_refused(tmp_path):
    other_end = character_tokenizer(eos_token="<|pad|>")
    with pytest.raises(
        DataError, match=r"does not contain the end token '<\|pad\|>', so the model would not learn to stop"
    ):
        dataset(tmp_path, [chat("2 + 3", "5")], other_end)
