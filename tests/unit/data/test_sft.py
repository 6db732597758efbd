import pytest
import torch

from megarl.config.schema import Overlong, SFTDataConfig
from megarl.data.files import DataError
from megarl.data.sft import SFTDataset
from tests.unit.data.chats import TEMPLATE, character_tokenizer, user, write


def chat(question, answer):
    return {"messages": user(question) + [{"role": "assistant", "content": answer}]}


def dataset(tmp_path, rows, tokenizer, max_length=60, overlong=Overlong.refuse, **changes):
    data = SFTDataConfig(max_length=max_length, overlong=overlong, **changes)
    return SFTDataset([write(tmp_path / "chats.parquet", rows)], tokenizer, data)


def test_only_the_answer_and_its_end_token_are_trained(tmp_path, tokenizer):
    examples = dataset(tmp_path, [chat("2 + 3", "5"), chat("a", "bcd")], tokenizer)
    batch = examples.batch([0, 1], ["0", "1"]).batch
    trained = [tokenizer.decode(batch["responses"][row][batch["response_mask"][row]]) for row in range(2)]
    assert trained == ["5<|end|>", "bcd<|end|>"]  # the line break after the end token is the template's
    whole = [tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row].bool()]) for row in range(2)]
    assert whole[0] == "<|start|>user\n2 + 3<|end|>\n<|start|>assistant\n5<|end|>"
    assert batch["response_mask"].dtype == torch.bool
    num_prompt, num_response = batch["prompts"].shape[1], batch["responses"].shape[1]
    assert num_response == 4
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["position_ids"].shape == (2, num_prompt + num_response)
    assert batch["position_ids"][1, num_prompt : num_prompt + 4].tolist() == [num_prompt - 4 + k for k in range(4)]


def test_earlier_answers_belong_to_the_prompt(tmp_path, tokenizer):
    row = {"messages": chat("a", "b")["messages"] + chat("c", "d")["messages"]}
    example = dataset(tmp_path, [row], tokenizer)[0]
    assert tokenizer.decode(example.response_ids) == "d<|end|>"
    assert "b<|end|>" in tokenizer.decode(example.prompt_ids)


def test_overlong_chats(tmp_path, tokenizer):
    rows = [chat("a", "b"), chat("a", "b" * 30)]
    with pytest.raises(DataError, match=r"chats.parquet, row 1: 51 tokens; 1 of 2 rows have more than data.max_length=30"):
        dataset(tmp_path, rows, tokenizer, 30)
    kept = dataset(tmp_path, rows, tokenizer, 30, Overlong.filter)
    assert (len(kept), kept.num_filtered) == (1, 1)


def test_a_chat_without_an_answer_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"row 0, column 'messages': the roles are \['user'\]; .*the assistant's answer"):
        dataset(tmp_path, [{"messages": user("a")}], tokenizer)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path):
    """As templates do that open a thinking part for generation and leave it out of a finished chat."""
    thinking = character_tokenizer(TEMPLATE.replace("assistant\n{% endif", "assistant\nthink{% endif"))
    with pytest.raises(DataError, match="not the beginning of the whole chat: from token 22 on it reads 'think' and the chat '5<|end|>"):
        dataset(tmp_path, [chat("2 + 3", "5")], thinking)


def test_an_answer_without_the_end_token_is_refused(tmp_path):
    other_end = character_tokenizer(eos_token="<|pad|>")
    with pytest.raises(DataError, match=r"does not hold the end token '<\|pad\|>', so the model would not learn to stop"):
        dataset(tmp_path, [chat("2 + 3", "5")], other_end)
