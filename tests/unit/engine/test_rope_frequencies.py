"""Rotary frequencies and factors of cosine and sine, against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

from megarl.engine.rotary import attention_factor, inverse_frequencies
from megarl.models.architecture import Llama3Scaling
from megarl.models.config_reader import ConfigReader
from megarl.models.rope import read_rope

# The numbers of published models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3 at 128k": {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "OLMo 3": {
        "rope_theta": 5e5,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "gpt-oss": {
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "DeepSeek-V3": {
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "one coefficient": {
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "bounds that coincide": {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8},
}


def compare(rope_parameters: dict[str, Any]) -> torch.Tensor:
    """Compare with transformers, and return the frequencies."""
    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131072,
        rope_parameters=dict(rope_parameters),
    )
    theta, scaling, _ = read_rope(ConfigReader({"rope_parameters": rope_parameters}), 131072)
    want, factor = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](config, torch.device("cpu"))
    got = inverse_frequencies(128, theta, scaling)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)

    return got


@pytest.mark.parametrize("name", PUBLISHED)
def test_yarn_of_published_models(name: str) -> None:
    compare({"rope_type": "yarn"} | PUBLISHED[name])


def test_linear() -> None:
    compare({"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0})


@pytest.mark.parametrize("factor", [8.0, 32.0], ids=["Llama 3.1", "Llama 3.2"])
def test_llama3_with_published_numbers(factor: float) -> None:
    scaling = Llama3Scaling(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    got = compare({"rope_type": "llama3", "rope_theta": 500000.0, **vars(scaling)})
    plain = inverse_frequencies(128, 500000.0, None)
    kept = int((got == plain).sum())
    slowed = int(torch.isclose(got, plain / factor).sum())
    assert kept > 20
    assert slowed > 20
    assert kept + slowed < 64  # the band between is blended


def test_partial_rotation() -> None:
    """GLM-4.5 rotates half of each head."""
    config = Glm4MoeConfig(head_dim=128)
    want = Glm4MoeRotaryEmbedding(config).inv_freq
    assert len(want) == 32
    theta = config.rope_parameters["rope_theta"]
    torch.testing.assert_close(inverse_frequencies(64, theta, None), want, rtol=1e-6, atol=0.0)
