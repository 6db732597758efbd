"""`read_architecture` on JSON written by transformers, and on fields that would change the computation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture, Experts, Llama3Scaling
from megarl.models.counts import num_active_parameters, num_parameters
from megarl.models.families import FAMILIES, family_of, read_architecture
from megarl.models.unsupported import MISSING_PARTS, UNSUPPORTED

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 199,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Published files: Qwen/Qwen2.5-0.5B and Llama-3.1-8B, written by transformers v4.
QWEN25_V4 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA31_V4 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
# A published file: Qwen/Qwen3-30B-A3B.
QWEN3_MOE_V4 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
EXPERT_SIZES = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def saved(folder: Path, config: PretrainedConfig) -> str:
    config.save_pretrained(folder)
    return str(folder)


def written(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def test_qwen2_written_by_transformers(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        Qwen2Config(
            **SIZES, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        ),
    )
    assert read_architecture(path) == Architecture(
        model_type="qwen2",
        num_hidden_layers=3,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=199,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        tie_word_embeddings=True,
        qkv_bias=True,
        qk_norm=False,
    )


def test_qwen3_head_dim_differs_from_hidden_over_heads(tmp_path: Path) -> None:
    architecture = read_architecture(saved(tmp_path, Qwen3Config(**SIZES, head_dim=16)))
    assert (architecture.head_dim, architecture.qk_norm, architecture.qkv_bias) == (16, True, False)
    assert architecture.rope_theta == Qwen3Config().rope_parameters["rope_theta"]


def test_llama_with_llama3_rope_written_by_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}
    architecture = read_architecture(saved(tmp_path, LlamaConfig(**SIZES, rope_parameters=rope)))
    assert (architecture.rope_theta, architecture.rope_scaling) == (5e5, Llama3Scaling(**LLAMA3_ROPE))
    assert (architecture.qkv_bias, architecture.qk_norm, architecture.tie_word_embeddings) == (
        False,
        False,
        False,
    )


def test_families_with_experts_written_by_transformers(tmp_path: Path) -> None:
    """Dense layers are given by their numbers, or by the step between sparse ones."""
    qwen3 = read_architecture(
        saved(tmp_path, Qwen3MoeConfig(**SIZES, **EXPERT_SIZES, norm_topk_prob=True, mlp_only_layers=[1]))
    )
    assert qwen3.experts == Experts(
        num_experts=6,
        num_experts_per_tok=2,
        intermediate_size=24,
        shared_intermediate_size=0,
        norm_topk_prob=True,
        layers=(0, 2),
    )
    assert (qwen3.head_dim, qwen3.qk_norm, qwen3.qkv_bias) == (12, True, False)
    qwen2 = read_architecture(
        saved(
            tmp_path,
            Qwen2MoeConfig(
                **SIZES, **EXPERT_SIZES, shared_expert_intermediate_size=40, decoder_sparse_step=2
            ),
        )
    )
    assert qwen2.experts == dataclasses.replace(
        qwen3.experts,
        shared_intermediate_size=40,
        norm_topk_prob=False,
        layers=(1,),
        has_shared_gate=True,
    )
    assert (qwen2.qkv_bias, qwen2.intermediate_size) == (True, 80)
    mixtral = read_architecture(saved(tmp_path, MixtralConfig(**SIZES, num_local_experts=6)))
    assert mixtral.experts == dataclasses.replace(qwen3.experts, intermediate_size=80, layers=(0, 1, 2))
    assert mixtral.rope_theta == MixtralConfig().rope_parameters["rope_theta"]


def test_experts_by_their_published_and_their_newer_name(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, whose authors count 30.5 billion parameters, 3.3 of them active."""
    published = read_architecture(written(tmp_path, QWEN3_MOE_V4))
    newer = {
        name: value
        for name, value in QWEN3_MOE_V4.items()
        if name not in ("num_experts", "intermediate_size")
    }
    renamed = read_architecture(written(tmp_path, newer | {"num_local_experts": 128}))
    assert dataclasses.replace(renamed, intermediate_size=published.intermediate_size) == published
    assert num_parameters(published) // 10**8 == 305
    assert num_active_parameters(published) // 10**8 == 33


@pytest.mark.parametrize("fields", [QWEN25_V4, LLAMA31_V4], ids=["qwen2.5", "llama3.1"])
def test_v4_files_mean_what_transformers_reads_from_them(tmp_path: Path, fields: dict[str, Any]) -> None:
    architecture = read_architecture(written(tmp_path, fields))
    reference = {"qwen2": Qwen2Config, "llama": LlamaConfig}[fields["model_type"]].from_pretrained(tmp_path)
    for name in (*SIZES, "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(architecture, name) == getattr(reference, name), name
    assert architecture.rope_theta == reference.rope_parameters["rope_theta"]
    assert architecture.head_dim == fields["hidden_size"] // fields["num_attention_heads"]
    if isinstance(architecture.rope_scaling, Llama3Scaling):
        assert architecture.rope_scaling.factor == reference.rope_parameters["factor"]


def test_first_llama_files_leave_out_heads_and_rope(tmp_path: Path) -> None:
    left_out = {"num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings"}
    architecture = read_architecture(
        written(tmp_path, {name: value for name, value in LLAMA31_V4.items() if name not in left_out})
    )
    assert (architecture.num_key_value_heads, architecture.rope_theta, architecture.tie_word_embeddings) == (
        32,
        10000.0,
        False,
    )


@pytest.mark.parametrize(
    ("base", "change", "said"),
    [
        (
            QWEN25_V4,
            {"use_sliding_window": True, "max_window_layers": 20, "sliding_window": 4096},
            "'use_sliding_window' is true with 'sliding_window' 4096",
        ),
        (QWEN25_V4, {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "sliding_attention"),
        (LLAMA31_V4, {"sliding_window": 4096}, "'sliding_window' 4096"),
        (QWEN25_V4, {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; only \"silu\""),
        (QWEN25_V4, {"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
        (QWEN25_V4, {"attention_dropout": 0.1}, "'attention_dropout' is 0.1"),
        (QWEN25_V4, {"use_mrope": True}, "'use_mrope' is True"),
        (LLAMA31_V4, {"attention_bias": True}, "'attention_bias' is True"),
        (LLAMA31_V4, {"mlp_bias": True}, "'mlp_bias' is True"),
        (LLAMA31_V4, {"quantization_config": {"bits": 4}}, "'quant_method' is None, but only 'fp8'"),
        (LLAMA31_V4, {"logit_scale": 0.25}, "'logit_scale' is 0.25"),
        (LLAMA31_V4, {"rope_scaling": LLAMA31_V4["rope_scaling"] | {"mscale": 1.0}}, "'mscale' is 1.0"),
        (
            LLAMA31_V4,
            {"rope_scaling": LLAMA31_V4["rope_scaling"] | {"partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' is 0.5",
        ),
        (
            LLAMA31_V4,
            {"rope_scaling": LLAMA31_V4["rope_scaling"] | {"rope_theta": 1e4}},
            "'rope_theta' is 10000.0 here and 500000.0",
        ),
        (LLAMA31_V4, {"rope_scaling": LLAMA31_V4["rope_scaling"] | {"factor": None}}, "'factor' is missing"),
        (
            LLAMA31_V4,
            {"rope_scaling": LLAMA31_V4["rope_scaling"] | {"high_freq_factor": 1.0}},
            "must be above",
        ),
        (LLAMA31_V4, {"rope_parameters": {"rope_type": "default"}}, "both given and differ"),
        (LLAMA31_V4, {"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM'"),
        (LLAMA31_V4, {"auto_map": {"AutoModel": "model.Mine"}}, "'auto_map'"),
        (
            LLAMA31_V4,
            {"model_type": "mamba"},
            "'model_type' is 'mamba'; megarl does not support Mamba layers; the supported families are llama, qwen2",
        ),
        (
            LLAMA31_V4,
            {"model_type": "olmo_hybrid"},
            "does not support gated delta net layers with negative eigenvalues; the supported families are",
        ),
        (LLAMA31_V4, {"model_type": ["llama"]}, "'model_type' is ['llama']; the supported families are"),
        (
            LLAMA31_V4,
            {"num_key_value_heads": 5},
            "'num_attention_heads' 32 is not a multiple of 'num_key_value_heads' 5",
        ),
        (
            LLAMA31_V4,
            {"num_attention_heads": 24, "num_key_value_heads": 8},
            "'hidden_size' 4096 is not a multiple",
        ),
        (LLAMA31_V4, {"head_dim": 33}, "'head_dim' is 33"),
        (LLAMA31_V4, {"vocab_size": None}, "'vocab_size' is missing"),
        (LLAMA31_V4, {"vocab_size": "many"}, "'vocab_size' is 'many'"),
        (LLAMA31_V4, {"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'"),
        (LLAMA31_V4, {"num_experts": 8}, "'num_experts' is 8"),
        (QWEN3_MOE_V4, {"num_local_experts": 64}, "'num_experts' 128 and 'num_local_experts' 64 differ"),
        (
            QWEN3_MOE_V4,
            {"num_experts_per_tok": 129},
            "'num_experts_per_tok' 129 is greater than 'num_experts' 128",
        ),
        (QWEN3_MOE_V4, {"num_experts_per_tok": 1}, "the router would have no gradient"),
        (QWEN3_MOE_V4, {"num_experts": None}, "'num_experts' is missing"),
        (QWEN3_MOE_V4, {"mlp_only_layers": "all"}, "'mlp_only_layers' is 'all'"),
        (QWEN3_MOE_V4, {"decoder_sparse_step": 49}, "leave no layer with experts"),
        (QWEN3_MOE_V4, {"use_sliding_window": True, "sliding_window": 9}, "'use_sliding_window' is true"),
    ],
)
def test_a_field_that_changes_the_maths_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    path = written(tmp_path, base | change)
    with pytest.raises(ConfigError) as refusal:
        read_architecture(path)
    assert said in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert len(refusal.value.problems) == 1


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 problems") as refusal:
        read_architecture(
            written(
                tmp_path, LLAMA31_V4 | {"mlp_bias": True, "hidden_act": "relu", "final_logit_softcapping": 30}
            )
        )
    assert all(name in str(refusal.value) for name in ("mlp_bias", "hidden_act", "final_logit_softcapping"))


def test_mistral_without_the_field_has_a_window(tmp_path: Path) -> None:
    """transformers gives it 4,096 tokens. Ministral 8B publishes a window of its whole context."""
    fields = {
        **{name: value for name, value in LLAMA31_V4.items() if name != "rope_scaling"},
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "max_position_embeddings": 32768,
    }
    read_architecture(written(tmp_path, fields | {"sliding_window": None}))
    read_architecture(written(tmp_path, fields | {"sliding_window": 32768}))
    with pytest.raises(ConfigError, match="'sliding_window' 4096"):
        read_architecture(written(tmp_path, fields))


def test_windows_that_no_layer_uses_are_accepted(tmp_path: Path) -> None:
    read_architecture(written(tmp_path, QWEN25_V4 | {"use_sliding_window": True, "max_window_layers": 24}))
    read_architecture(
        written(tmp_path, QWEN25_V4 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 24})
    )


def test_remote_code_and_reward_model_heads(tmp_path: Path) -> None:
    reward_model = LLAMA31_V4 | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "score"},
    }
    assert read_architecture(written(tmp_path, reward_model)).num_hidden_layers == 32
    own_code = LLAMA31_V4 | {
        "auto_map": {"AutoModelForCausalLM": "model.Mine"},
        "architectures": ["MineForCausalLM"],
    }
    assert read_architecture(written(tmp_path, own_code), trust_remote_code=True).num_hidden_layers == 32


def test_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_architecture(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="the folder has no such file"):
        read_architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("{'not': json}")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_architecture(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="a JSON object, not list"):
        read_architecture(str(tmp_path))


def test_every_type_of_transformers_is_trained_or_refused_with_what_is_missing() -> None:
    assert UNSUPPORTED.keys() <= CONFIG_MAPPING_NAMES.keys()
    assert [name for name in UNSUPPORTED if family_of(name) is not None] == []
    assert sum(map(len, MISSING_PARTS.values())) == len(UNSUPPORTED)
    of_text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    assert sorted(of_text - FAMILIES.keys() - UNSUPPORTED.keys()) == []


def test_a_refused_type_says_what_is_missing(tmp_path: Path) -> None:
    for model_type, said in (
        ("granite", "megarl does not support factors of embeddings, residuals and logits; the supported"),
        ("bert", "megarl does not support encoders: it trains models that write from left to right; the"),
        ("own_model", "is 'own_model'; the supported families are llama"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        with pytest.raises(ConfigError, match=said):
            read_architecture(str(tmp_path))
