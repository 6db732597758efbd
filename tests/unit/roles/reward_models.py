"""Tiny reward model of another family than the tests' policies, with its own byte-pair tokenizer and chat
template."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.unit.engine.models import FAMILIES

FAMILY = "llama-tied"
TEMPLATE = (
    "<s>{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
)


def byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with tokens of one or several letters. The end token is the pad token, as in many
    published models."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["[user] [assistant] [system] one two three and answer", "1 + 1 = 2", "12 345 67 890"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(text, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = TEMPLATE

    return fast


def save_reward_model(folder: Path, seed: int = 0, num_labels: int = 1) -> None:
    """Save a reward model whose scores differ by about one between conversations."""
    tokenizer = byte_pair_tokenizer()
    tokenizer.save_pretrained(folder)
    config = copy.deepcopy(FAMILIES[FAMILY])
    config.vocab_size = len(tokenizer)
    config.num_labels = num_labels
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(10.0 if name == "score.weight" else 3.0)

    model.save_pretrained(folder)
