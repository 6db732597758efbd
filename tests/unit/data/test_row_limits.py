"""Test rows that are too long to be tokenized, or nested too deep to be sent to another process."""

from __future__ import annotations

import json
import pickle
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.config.finding import Status
from megarl.config.schema import (
    DataConfig,
    LossyText,
    Overlong,
    PreferenceDataConfig,
    RatedPreferenceDataConfig,
    SFTConfig,
    SFTDataConfig,
)
from megarl.data.files import DataError
from megarl.data.pairs import AnswerEncoder, ConversationPairEncoder, PairDataset
from megarl.data.prompts import PromptDataset
from megarl.data.sft import SFTDataset
from megarl.data.token_bounds import TooManyTokensError, longest_token, refuse_hopeless
from megarl.data.whole_chat import render_whole
from megarl.doctor import texts
from megarl.machine.strict_json import MAX_DEPTH
from tests.unit.data.chats import TEMPLATE, assistant, character_tokenizer, prompt_row, user

SPECIAL = ("<|start|>", "<|end|>", "<|pad|>")
LONGEST = len("<|start|>")


class Recording(PreTrainedTokenizerFast):
    """Records the texts that are tokenized."""

    def encode(self, text: Any, *arguments: Any, **options: Any) -> Any:
        self.asked = [*getattr(self, "asked", []), len(text)]
        return super().encode(text, *arguments, **options)


def byte_tokenizer(normalizer: Any = None, before: Any = None, lstrip: bool = False) -> Recording:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "aa", "aaaa"])}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "aa")]))
    backend.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = byte_level if before is None else pre_tokenizers.Sequence([before, byte_level])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, lstrip=lstrip) for token in SPECIAL])
    made = Recording(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made


def fallback_tokenizer(is_whole: bool = True) -> Recording:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256 if is_whole else 255)), "▁", "a", "aa"]
    backend = Tokenizer(
        models.BPE(
            {each: index for index, each in enumerate(tokens)},
            [("a", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Recording(tokenizer_object=backend, eos_token="<unk>")


BOUNDED: dict[str, tuple[Callable[[], Recording], int]] = {
    "bytes": (byte_tokenizer, LONGEST),
    "composed": (lambda: byte_tokenizer(normalizers.NFC()), LONGEST),
    "split": (lambda: byte_tokenizer(before=pre_tokenizers.Digits(individual_digits=True)), LONGEST),
    "fallback": (fallback_tokenizer, len("<0x00>")),
}
PIECES = [
    "a",
    "aa",
    " ",
    "\n",
    "é",
    "e\u0301",
    "\u1112\u1161\u11ab",
    "😊",
    "α\u0313\u0300\u0345",
    "<|start|>",
    "\u0301",
]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    make, longest = BOUNDED[name]
    tokenizer = make()
    assert longest_token(tokenizer) == longest
    draw = random.Random(3)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 60))) for _ in range(300)]
    for text in [*texts, *(piece * 50 for piece in PIECES)]:
        count = len(tokenizer.encode(text, add_special_tokens=False))
        # A limit of the text's own tokens never refuses it.
        refuse_hopeless(tokenizer, text, count)
        characters = len(unicodedata.normalize("NFC", text) if name == "composed" else text)
        with pytest.raises(TooManyTokensError) as raised:
            refuse_hopeless(tokenizer, text, (characters - 1) // longest)
        assert (characters - 1) // longest < raised.value.at_least <= count


@pytest.mark.parametrize(
    "make",
    [
        character_tokenizer,
        lambda: byte_tokenizer(lstrip=True),
        lambda: byte_tokenizer(normalizers.Strip()),
        lambda: byte_tokenizer(normalizers.Replace("aa", "a")),
        lambda: byte_tokenizer(before=pre_tokenizers.Split(" ", "removed")),
        lambda: fallback_tokenizer(is_whole=False),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    tokenizer = make()
    assert longest_token(tokenizer) is None
    refuse_hopeless(tokenizer, "a" * 1000, 1)


# ---- rows


def lines(folder: Path, *rows: dict[str, Any]) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(file)]


Read = Callable[[list[str], PreTrainedTokenizerFast, int, Overlong], Any]
KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], Read]] = {
    "prompts": (
        lambda text: prompt_row(text),
        lambda files, tokenizer, limit, overlong: PromptDataset(
            files, tokenizer, DataConfig(max_prompt_length=limit, overlong=overlong)
        ),
    ),
    "chats": (
        lambda text: {"messages": user("a") + assistant("b") + user(text) + assistant("b")},
        lambda files, tokenizer, limit, overlong: SFTDataset(
            files, tokenizer, SFTDataConfig(max_length=limit, overlong=overlong)
        ),
    ),
    "pairs": (
        lambda text: {"prompt": "a", "chosen": "b", "rejected": f"c{text}"},
        lambda files, tokenizer, limit, overlong: PairDataset(
            files, AnswerEncoder(tokenizer, PreferenceDataConfig(max_length=limit, overlong=overlong))
        ),
    ),
    "rated pairs": (
        lambda text: {"prompt": text, "chosen": "b", "rejected": "c", "margin": 1.0},
        lambda files, tokenizer, limit, overlong: PairDataset(
            files,
            ConversationPairEncoder(
                tokenizer,
                RatedPreferenceDataConfig(max_length=limit, overlong=overlong),
                tokenizer.pad_token_id,
            ),
        ),
    ),
}
SIZE = 3_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_megabytes_is_refused_or_dropped_without_being_tokenized(tmp_path: Path, kind: str) -> None:
    row, read = KINDS[kind]
    files = lines(tmp_path, row("a"), row("a " * (SIZE // 2)), row("aaa"))
    tokenizer = byte_tokenizer()
    with pytest.raises(
        DataError,
        match=r"rows.jsonl, row 1: at least (\d+) tokens; 1 of 3 rows have more than data\.max\w+=100 tokens, the "
        r"longest at least \1\. Raise data\.max\w+ to at least \1, or set data.overlong=filter",
    ) as raised:
        read(files, tokenizer, 100, Overlong.refuse)
    bound = int(str(raised.value).split("at least ")[1].split()[0])
    assert SIZE / LONGEST < bound < SIZE / LONGEST + 20

    kept = read(files, tokenizer, 100, Overlong.filter)
    assert (len(kept), kept.num_filtered, kept.row_files) == (2, 1, files * 2)
    assert max(tokenizer.asked) < 1000
    with pytest.raises(DataError, match="no row is left after filtering: 1 of 1 rows have more than"):
        read(lines(tmp_path, row("a" * SIZE)), tokenizer, 100, Overlong.filter)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_just_fits_is_kept_and_one_more_token_is_counted_exactly(
    tmp_path: Path, kind: str
) -> None:
    """Long tokens bring characters near to the bound."""
    row, read = KINDS[kind]
    files = lines(tmp_path, row("a" * 4000))
    (length,) = [
        each.length if hasattr(each, "length") else len(each.token_ids)
        for each in read(files, byte_tokenizer(), 5000, Overlong.refuse)
    ]
    assert 1000 < length < 1100
    assert len(read(files, byte_tokenizer(), length, Overlong.refuse)) == 1
    with pytest.raises(
        DataError, match=f"row 0: {length} tokens; 1 of 1 rows .* Raise data.max_.* to {length}, or"
    ):
        read(files, byte_tokenizer(), length - 1, Overlong.refuse)


def test_a_bad_row_is_refused_whatever_its_length(tmp_path: Path) -> None:
    files = lines(tmp_path, prompt_row("a"), prompt_row("a" * SIZE, reward_model={"style": "rule"}))
    with pytest.raises(DataError, match="row 1, column 'reward_model': it has no 'ground_truth'"):
        PromptDataset(files, byte_tokenizer(), DataConfig(max_prompt_length=9, overlong=Overlong.filter))


def test_a_chat_of_very_many_messages_is_not_rendered_turn_by_turn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    read = KINDS["chats"][1]
    turns = [*user("a"), *assistant("b")]
    many = lines(tmp_path, {"messages": turns * 2000}, {"messages": turns})
    for limit in (50, 1000):  # less than a character per message, and less than a token per answer
        kept = read(many, tokenizer, limit, Overlong.filter)
        assert (len(kept), kept.num_filtered) == (1, 1)
    assert max(tokenizer.asked) < 1000

    # Each turn renders the chat again, so turns beyond twice the limit are not measured.
    some = lines(tmp_path, {"messages": turns * 78}, {"messages": turns})
    counts = []
    for limit in (600, 2000):
        tokenizer.asked = []
        assert read(some, tokenizer, limit, Overlong.filter).num_filtered == (limit == 600)
        counts.append(len(tokenizer.asked))
    assert 50 < counts[0] < 0.8 * counts[1]


def test_each_text_of_a_long_chat_needs_its_place() -> None:
    lost = TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.index != 301 else '' }}")
    chat = [{"role": "user", "content": f"{number:04d}"} for number in range(600)]
    render_whole(byte_tokenizer(), chat, LossyText.refuse, for_generation=True)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = lost
    with pytest.raises(ValueError, match="message 300: the chat template does not write its content .'0300'"):
        render_whole(tokenizer, chat, LossyText.refuse, for_generation=True)
    # Texts may be written in another order than that of the messages.
    tokenizer.chat_template = TEMPLATE.replace("in messages", "in messages | reverse")
    render_whole(tokenizer, chat, LossyText.refuse, for_generation=True)


def test_check_names_the_bound(tmp_path: Path) -> None:
    row = KINDS["chats"][0]
    files = lines(tmp_path, row("a"), row("a" * SIZE))
    config = SFTConfig(data=SFTDataConfig(train_files=files))
    results = texts.data(config, byte_tokenizer(), ("data.val_files",), 256)
    (found,) = [each for each in results if each.status is Status.error and "rows.jsonl" in each.message]
    said = "1 of the first 2 rows have more than data.max_length=2048 tokens, the longest at least "
    assert SIZE / LONGEST < int(found.message.split(said)[1]) < SIZE / LONGEST + 20


# ---- nesting


def nested(depth: int) -> Any:
    value: Any = "x"
    for level in range(depth):
        value = {"in": value} if level % 2 else [value]
    return value


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900])
def test_a_value_that_is_nested_too_deep_is_named(tmp_path: Path, depth: int) -> None:
    read = KINDS["prompts"][1]
    said = rf"rows.jsonl, row 1, column 'extra_info': is nested more than {MAX_DEPTH} levels deep"
    row = prompt_row("a", extra_info={"deep": nested(depth - 1)})
    with pytest.raises(DataError, match=said):
        read(lines(tmp_path, prompt_row("a"), row), character_tokenizer(), 100, Overlong.filter)

    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": nested(depth)})}}
    chat = {"messages": [*user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    with pytest.raises(DataError, match=r"row 0, column 'messages': message 1: .* nested more than"):
        KINDS["chats"][1](lines(tmp_path, chat), character_tokenizer(), 100, Overlong.filter)


def test_values_up_to_the_limit_can_be_sent(tmp_path: Path) -> None:
    row = prompt_row("a", extra_info={"deep": nested(MAX_DEPTH - 1)})
    prompts = PromptDataset(lines(tmp_path, row), character_tokenizer(), DataConfig(max_prompt_length=100))
    batch = prompts.batch([0], ["u"])
    assert pickle.loads(pickle.dumps(batch)).non_tensor_batch["extra_info"][0] == row["extra_info"]
