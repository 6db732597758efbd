"""GLM-4.5, 4.6 and 4.7 and their Air models: grouped-query attention and experts as in DeepSeek-V3."""

from __future__ import annotations

from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.experts import SELECTION_BIAS_ROW, expert_rows, read_sigmoid_experts, shared_expert_rows
from megarl.models.family import Family, SGLangStages
from megarl.models.trunk import EXAMPLE, TRUNK_ROWS, read_trunk


def _read(reader: ConfigReader) -> Architecture:
    # In this family, `attention_bias` does not concern the output projection.
    return read_trunk(
        reader,
        qkv_bias=reader.flag("attention_bias"),
        qk_norm=reader.flag("use_qk_norm"),
        read_experts=read_sigmoid_experts,
        may_have_mtp=True,
    )


GLM4_MOE = Family(
    model_type="glm4_moe",
    class_prefix="Glm4Moe",
    read=_read,
    rows=(
        *TRUNK_ROWS,
        *expert_rows("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        SELECTION_BIAS_ROW,
        *shared_expert_rows("mlp.shared_experts"),
    ),
    example_fields=EXAMPLE
    | {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    },
    sglang_stages=SGLangStages.head_on_every,
    sglang_differences={"a tied embedding": lambda architecture: architecture.tie_word_embeddings},
    models="GLM-4.5, 4.6 and 4.7 and their Air models",
    limits=(
        "layers that predict further tokens are not trained, but "
        "[kept](large_models.md#multi-token-prediction)",
    ),
)
