"""How the model of each framework writes a call and an answer, and the texts around them that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.agent import prepare
from examples.agent.prepare import DIGITS, END, LETTERS, PAD, PIECES, ROLES, SPECIAL_TOKENS, UNKNOWN

_CALL = ('<tool_call>\n{"name": "', '"}}\n</tool_call>')
_PRICE = 'price", "arguments": {"item": "'
MAX_TOKENS = 160
# The model reads no instructions: it is too small for them, and is trained to follow them anyway.
CHAT_TEMPLATE = prepare.CHAT_TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'system' %}"
)
# A model without this would have to read the ids of calls, which smolagents shows to it.
_IDS = r"Call id: call_\w+\n|'id': 'call_\w+', "


class Format(NamedTuple):
    """A framework.

    Attributes:
        call: What begins the call for a price.
        answer: What begins an answer.
        pieces: Other texts that the framework sends.
    """

    call: str = _PRICE
    answer: str = ""
    pieces: tuple[str, ...] = ()

    def written(self, message: dict[str, Any]) -> str:
        """Return what a teacher writes for a message of the assistant, see examples/agent/prepare.py."""
        for call in message.get("tool_calls", ()):
            return _called(self.call, call["function"]["arguments"]["item"])
        return _called(self.answer, message["content"]) if self.answer else message["content"]


def _called(begin: str, value: str) -> str:
    return f"{_CALL[0]}{begin}{value}{_CALL[1]}"


FORMATS = {
    "pydantic_ai_agent": Format(),
    "langgraph_agent": Format(),
    "anthropic_agent": Format(),
    "smolagents_agent": Format(
        answer='final_answer", "arguments": {"answer": "',
        pieces=(
            "New task:\n",
            "Calling tools:\n[{'type': 'function', 'function': {'name': 'price', 'arguments': {'item': '",
            "'}}}]",
            "Observation:\n",
        ),
    ),
    "mini_swe_agent": Format(
        call='bash", "arguments": {"command": "price ',
        answer='bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo ',
        pieces=("<returncode>0</returncode>\n<output>\n", "\n</output>"),
    ),
}


def save_model(folder: Path, seed: int) -> PreTrainedTokenizerFast:
    """Save the model of examples/agent with random weights, and a tokenizer for all frameworks."""
    prepare.save_model(folder, seed)
    tokenizer = _tokenizer()
    config = AutoConfig.from_pretrained(folder)
    config.update({"vocab_size": len(tokenizer), "max_position_embeddings": MAX_TOKENS})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer in which each text of a framework is one token, and any other character is unknown."""
    pieces = list(
        dict.fromkeys([*PIECES[4:], *_CALL, *(text for each in FORMATS.values() for text in each_text(each))])
    )
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *pieces, *LETTERS, *DIGITS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Replace(Regex(_IDS), "")
    longest_first = sorted(pieces, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(_escaped, longest_first)) + r"|[\s\S]"), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def each_text(format_: Format) -> list[str]:
    return [text for text in (format_.call, format_.answer, *format_.pieces) if text]


def _escaped(piece: str) -> str:
    return "".join(rf"\{character}" if character in "{}[]()+*?.|^$\\" else character for character in piece)
