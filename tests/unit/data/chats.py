"""A tiny tokenizer and parquet files for the tests: one token per character, and a ChatML-like template."""

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +=?.\n"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% "
    "endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

# The template of a model that is shown tools and calls them, each call with the argument `item`.
TOOLS_TEMPLATE = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool.function.name }}.{% endfor %}<|end|>\n{% "
    "endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}={{ call.function.name }}?{{ call.function.arguments.item "
    "}}{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Thinking ends with +. The template adds thinking to a last answer without any, and drops it from earlier
# ones.
THINKING_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n"
    "{% if message.role != 'assistant' %}{{ message.content }}{% elif not loop.last %}{{ "
    "message.content.split('+')[-1] }}"
    "{% else %}{{ '' if '+' in message.content else '+' }}{{ message.content }}{% endif %}<|end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def character_tokenizer(template=TEMPLATE, vocabulary_extra="", **special):
    vocabulary = {token: index for index, token in enumerate(["<|unk|>", *CHARACTERS, *vocabulary_extra])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|start|>", "<|end|>", "<|pad|>")]
    )
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>"} | special
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{key: value for key, value in special.items() if value}
    )
    fast.chat_template = template

    return fast


def user(content):
    return [{"role": "user", "content": content}]


def assistant(content, **more):
    return [{"role": "assistant", "content": content} | more]


def prompt_row(content="a", **changes):
    return {
        "prompt": user(content),
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 0},
    } | changes


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)
