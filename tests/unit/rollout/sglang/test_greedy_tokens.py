"""Test latent attention and gated shared experts in SGLang on a CPU.

Latent attention stores products of weights that each sync must update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megarl.config.schema import SGLangMode
from megarl.rollout.interface import SamplingParameters
from megarl.rollout.sglang.engine import SGLangEngine
from tests.families import example_config
from tests.unit.rollout import models
from tests.unit.rollout.models import push, random_model
from tests.unit.rollout.sglang_engines import spec_for

PROMPTS = [[5, 6, 14, 8], [9], [20, 21, 22, 23, 24, 25]]
GREEDY = SamplingParameters(max_new_tokens=16, seed=0, temperature=0, ignore_eos=True)
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 8,
}


def best_tokens(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the tokens that transformers selects after a prompt, and their log-probs."""
    tokens = list(prompt)
    log_probs = []
    for _ in range(GREEDY.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens.append(int(logits.argmax()))
        log_probs.append(logits.log_softmax(-1).max())
    return tokens[len(prompt) :], torch.stack(log_probs)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
def test_tokens_are_those_of_transformers_after_each_sync(
    forked_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Two ranks share heads and experts. Latent attention has a scaled rotary embedding and softmax."""

    def scaled_config(family: str, **fields: Any) -> Any:
        return example_config(family, **fields | {"rope_scaling": YARN})

    if family == "deepseek_v3":
        monkeypatch.setattr(models, "example_config", scaled_config)
    policies = [random_model(family, seed=seed) for seed in range(2)]
    spec = spec_for(
        policies[0], tmp_path, mode=SGLangMode.server, tensor_parallel_size=2, expert_parallel_size=2
    )
    engine = SGLangEngine(spec)

    try:
        for version, policy in enumerate(policies, start=1):
            push(policy, engine, version)
            samples = engine.generate(PROMPTS, GREEDY)
            for prompt, sample in zip(PROMPTS, samples, strict=True):
                tokens, log_probs = best_tokens(policy, prompt)
                assert sample.token_ids.tolist() == tokens
                torch.testing.assert_close(torch.as_tensor(sample.log_probs), log_probs, atol=1e-4, rtol=0)
    finally:
        engine.close()
