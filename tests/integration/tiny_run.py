"""Everything a run reads, made small: a model folder with a tokenizer and chat template, parquet prompts, a reward file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SYMBOLS = ["<pad>", "<end>", "<user>", "<model>", *"0123456789+= "]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<user>' if message.role == 'user' else '<model>' }}{{ message.content }}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return solution_str.count(ground_truth) / 4\n"


def save_policy(folder: Path, seed: int = 0) -> None:
    """A Qwen2 of four layers, so that every layout of up to four ranks can cut it."""
    vocabulary = Tokenizer(models.WordLevel({symbol: index for index, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="<pad>", eos_token="<end>", additional_special_tokens=["<user>", "<model>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


def save_inputs(folder: Path) -> None:
    """`policy/`, `train.parquet`, `validation.parquet`, `sft.parquet` and `reward.py` in `folder`."""
    save_policy(folder / "policy")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number}+{number % 7}="}],
            "data_source": "count",
            "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
            "extra_info": {"index": number},
        }
        for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:32]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[32:]), folder / "validation.parquet")
    chats = [
        {"messages": [{"role": "user", "content": f"{number}="}, {"role": "assistant", "content": f"{number}+1"}]} for number in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(chats), folder / "sft.parquet")
    (folder / "reward.py").write_text(REWARD)
