"""Tiny random Hugging Face models of each family, as the float32 reference of the engine's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

VOCAB_SIZE = 199  # odd, so that every tensor-parallel size pads it
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(tie_word_embeddings=False, rope_theta=1e6, **_SHAPE),
    "qwen2-tied": Qwen2Config(tie_word_embeddings=True, rope_theta=1e6, **_SHAPE),
    "qwen3-tied": Qwen3Config(tie_word_embeddings=True, rope_theta=1e6, head_dim=32, **_SHAPE),
    "llama2": LlamaConfig(tie_word_embeddings=False, **_SHAPE),
    "llama3-tied": LlamaConfig(tie_word_embeddings=True, rope_parameters=_LLAMA_31_ROPE, **_SHAPE),
}


def save_model(family: str, folder: Path, seed: int = 0) -> None:
    """Norms and biases are far from one and zero, and weights large enough for log-probs to differ by several nats."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            else:
                parameter.mul_(3.0)
    model.save_pretrained(folder)


def make_batch(num_rows: int = 7, prompt_length: int = 6, response_length: int = 9, seed: int = 1) -> dict[str, Tensor]:
    """Rows of different lengths: left-padded prompts, right-padded responses, one full row, one response of one token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    prompts = draw(1, prompt_length + 1, (num_rows,))
    responses = draw(1, response_length + 1, (num_rows,))
    prompts[0], responses[0] = prompt_length, response_length
    responses[1] = 1
    column = torch.arange(prompt_length + response_length)
    mask = (column >= prompt_length - prompts[:, None]) & (column < prompt_length + responses[:, None])
    return {
        "input_ids": torch.where(mask, draw(0, VOCAB_SIZE, tuple(mask.shape)), 0),
        "attention_mask": mask.long(),
        "response_mask": mask[:, prompt_length:],
    }


def reference_logits(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(B, R, V) logits that predict each response token, row by row through Hugging Face; zero where there is no token."""
    response_length = batch["response_mask"].shape[1]
    prompt_length = batch["input_ids"].shape[1] - response_length
    rows = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        prompt, response = int(mask[:prompt_length].sum()), int(mask[prompt_length:].sum())
        logits = model(ids[mask][None], use_cache=False).logits[0, prompt - 1 : prompt + response - 1]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, response_length - response)))
    return torch.stack(rows)


def reference_scores(model: torch.nn.Module, batch: dict[str, Tensor], temperature: float = 1.0) -> dict[str, Tensor]:
    """`log_probs` and `entropy` (B, R) of the response tokens, 0 elsewhere."""
    response_length = batch["response_mask"].shape[1]
    log_softmax = (reference_logits(model, batch) / temperature).log_softmax(-1)
    targets = batch["input_ids"][:, -response_length:]
    real = batch["attention_mask"][:, -response_length:]
    return {
        "log_probs": log_softmax.gather(-1, targets[..., None])[..., 0] * real,
        "entropy": -(log_softmax.exp() * log_softmax).sum(-1) * real,
    }
