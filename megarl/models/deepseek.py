"""DeepSeek-V3, R1 and V3.1, and models published as that class: Kimi-K2 and Moonlight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megarl.models.architecture import Architecture, YarnScaling
from megarl.models.config_reader import ConfigReader
from megarl.models.experts import SELECTION_BIAS_ROW, expert_rows, read_sigmoid_experts, shared_expert_rows
from megarl.models.family import Family, SGLangStages
from megarl.models.latent import LATENT_ROWS, read_latent
from megarl.models.trunk import EXAMPLE, read_trunk, trunk_rows

_MODEL_TYPE = "deepseek_v3"

# Fields of the published model code that select variants, with the one that this family computes.
FIXED = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Fields of DeepSeek's own training and serving.
_HARMLESS = ("aux_loss_alpha", "ep_size", "seq_aux")


def read_deepseek(reader: ConfigReader) -> Architecture:
    """Read a model with the layers of DeepSeek-V3."""
    for name, supported in FIXED.items():
        if reader.take(name) not in (None, supported):
            reader.refuse(name, f"only {supported!r} is supported")
    for name in _HARMLESS:
        reader.take(name)

    return read_trunk(reader, read_experts=read_sigmoid_experts, read_latent=read_latent, may_have_mtp=True)


def _read(reader: ConfigReader) -> Architecture:
    # Kimi-K2 has a name of its own.
    return replace(read_deepseek(reader), model_type=_MODEL_TYPE)


def sglang_differs(architecture: Architecture) -> Iterator[str]:
    """Yield what SGLang's class would compute differently."""
    if architecture.tie_word_embeddings:
        yield "a tied embedding"
    if not isinstance(architecture.rope_scaling, YarnScaling | None):
        yield "a RoPE scaling other than yarn"


def _example() -> dict[str, Any]:
    """Return a tiny DeepSeek-V3: YaRN, and experts in two groups, of which a token selects one."""
    rope_scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 32,
    }
    return EXAMPLE | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": _MODEL_TYPE,
        "num_key_value_heads": 8,
        "rope_theta": 1e4,
        "rope_scaling": rope_scaling,
        "rope_interleave": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 2,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    }


DEEPSEEK_ROWS = (
    *trunk_rows(LATENT_ROWS),
    *expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    SELECTION_BIAS_ROW,
    *shared_expert_rows("mlp.shared_experts"),
)

DEEPSEEK_V3 = Family(
    model_type=_MODEL_TYPE,
    class_prefix="DeepseekV3",
    read=_read,
    rows=DEEPSEEK_ROWS,
    example=_example,
    sglang_stages=SGLangStages(),
    sglang_fields=FIXED,
    sglang_differs=sglang_differs,
    models="DeepSeek-V3, R1 and V3.1, Kimi-K2 (`kimi_k2`), Moonlight",
    limits=("layers that predict further tokens are not trained, but [kept](moe.md#multi-token-prediction)",),
)
