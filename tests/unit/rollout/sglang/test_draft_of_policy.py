"""Test draft models with SGLang's own classes: a weight sync changes the policy only, and a head of EAGLE sees
the policy's new embedding."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.unit.rollout.models import VOCAB, manifest_of, random_model

PROGRAM = Path(__file__).with_name("draft_of_policy.py")
HEAD = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("algorithm", "fields", "shares_head"),
    [
        ("EAGLE", {"architectures": ["LlamaForCausalLMEagle"]}, True),
        ("EAGLE3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}, False),
    ],
)
def test_a_weight_sync_leaves_the_draft_model_alone(
    forked_processes: None, tmp_path: Path, algorithm: str, fields: dict[str, Any], shares_head: bool
) -> None:
    policy = random_model("llama")
    policy.config.architectures = ["LlamaForCausalLM"]
    policy.config.save_pretrained(tmp_path / "policy")
    shapes = {name: meta.shape for name, meta in manifest_of(policy).items()}
    (tmp_path / "policy" / "manifest.json").write_text(json.dumps(shapes))
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps(HEAD | fields))

    command = [*fork_server.PYTHON, "--sglang", str(PROGRAM), algorithm, f"file://{tmp_path / 'meet'}"]
    ended = subprocess.run(
        [*command, str(tmp_path / "policy"), str(tmp_path / "draft")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    result = json.loads(ended.stdout.splitlines()[-1])

    # The embedding is the policy's after each of two syncs; so is the head, unless the draft has its own.
    assert result["embeds"] == [True, shares_head] * 2
    unchanged = result["unchanged"]
    assert all(unchanged.values())
    assert {"model.fc.weight", "model.layers.0.self_attn.qkv_proj.weight"} <= unchanged.keys()
    assert "model.embed_tokens.weight" not in unchanged
    assert ("lm_head.weight" in unchanged) is not shares_head
    assert "1 tensor of the draft model no longer as loaded" in result["failure"]
    assert result["failure"].endswith("on rank 0 of the engine: model.fc.weight")
    # Recorded log-probs are the policy's, at the configured temperature.
    for log_probs in result["log_probs"]:
        assert len(log_probs["recorded"]) == 5
        assert log_probs["recorded"] == pytest.approx(log_probs["expected"], abs=1e-5)
