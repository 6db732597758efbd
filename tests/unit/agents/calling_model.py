"""A tiny model trained to call tools: asked for an item, it calls `price`, even if the tool is named `cost`,
and answers with the result, or with ? for an error."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

_ERROR = "tool error (unknown tool): there is no tool 'price'; there are: cost"
CALL = '<tool_call>{"name": "price", "arguments": {"item": "ab"}}</tool_call>'
_ROLES = ["system", "user", "assistant", "tool"]
_SPECIAL = ["<pad>", "<end>", *(f"<{role}>" for role in _ROLES)]
TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }};{% endfor %}<end>{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_calling_model(folder: Path) -> None:
    """Train and save the model, which takes about a second.

    A call is one token, so that episodes are short.
    """
    pieces = [*_SPECIAL, CALL, *string.printable]
    vocabulary = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<pad>")
    )
    vocabulary.pre_tokenizer = pre_tokenizers.Split(
        Regex("<tool_call>.*</tool_call>|<[a-z]+>|[\\s\\S]"), "isolated"
    )
    vocabulary.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        pad_token="<pad>",
        unk_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=_SPECIAL[2:],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(pieces),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    chats = [
        tokenizer.encode(
            f"<system>{tool};<end><user>ab?<end><assistant>{CALL}<end><tool>{result}<end><assistant>{answer}<end>"
        )
        for tool, result, answer in (("price", "42", "42"), ("cost", _ERROR, "?"))
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    for _ in range(80):
        optimizer.zero_grad()
        for chat in map(torch.tensor, chats):
            model(chat[None], labels=chat[None]).loss.backward()
        optimizer.step()

    model.save_pretrained(folder)
