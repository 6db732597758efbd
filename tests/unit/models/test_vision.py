"""Models that read images: nested and flat configurations, position axes, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.machine.errors import ConfigError
from megarl.models.architecture import Architecture
from megarl.models.config_reader import ConfigReader
from megarl.models.families import FAMILIES, read_architecture

# As the first folders of Qwen2.5-VL have it: the language model's fields at the top level, and older names.
FLAT: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}


def read(folder: Path, fields: dict[str, Any]) -> Architecture:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_architecture(str(folder))


def test_a_flat_configuration(tmp_path: Path) -> None:
    architecture = read(tmp_path, FLAT)
    assert architecture.model_type == "qwen2_5_vl"
    assert (architecture.num_hidden_layers, architecture.qkv_bias, architecture.rope_scaling) == (
        28,
        True,
        None,
    )
    vision = architecture.vision
    assert vision is not None
    assert vision.position_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert (vision.depth, vision.window_size, vision.patch_elements) == (32, 112, 3 * 2 * 14 * 14)
    with pytest.raises(ConfigError, match="field 'logit_scale' is 2; megarl does not know"):
        read(tmp_path, FLAT | {"logit_scale": 2})


@pytest.mark.parametrize(
    ("part", "changes", "problem"),
    [
        ("text_config", {"hidden_act": "gelu"}, "text_config: field 'hidden_act' is 'gelu'; only \"silu\""),
        ("text_config", {"logit_scale": 2}, "text_config: field 'logit_scale' is 2; megarl does not know"),
        (
            "vision_config",
            {"num_queries": 8},
            "vision_config: field 'num_queries' is 8; megarl does not know",
        ),
        ("vision_config", {"hidden_act": "gelu"}, "vision_config: field 'hidden_act' is 'gelu'; only"),
        ("vision_config", {"in_chans": 1}, "vision_config: field 'in_chans' is 1; transformers .* uses 3"),
        (
            "vision_config",
            {"num_heads": 3},
            "vision_config: 'hidden_size' 32 is not a multiple of four times",
        ),
        (
            "vision_config",
            {"out_hidden_size": 32},
            "'out_hidden_size' is 32, but must be the 'hidden_size' 64",
        ),
        (
            "vision_config",
            {"num_position_embeddings": 15},
            "'num_position_embeddings' is 15, but must be a sq",
        ),
        ("vision_config", {"deepstack_visual_indexes": [2, 0]}, "distinct blocks from 0 to 2 in ascending"),
        ("vision_config", {"deepstack_visual_indexes": [3]}, "distinct blocks from 0 to 2 in ascending"),
    ],
)
def test_a_part_that_is_not_supported_is_named(
    tmp_path: Path, part: str, changes: dict[str, Any], problem: str
) -> None:
    fields = FAMILIES["qwen3_vl"].example()
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, fields | {part: fields[part] | changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"norm_topk_prob": False}, "text_config: field 'norm_topk_prob' is False; transformers does not"),
        ({"num_experts_per_tok": 9}, "text_config: 'num_experts_per_tok' 9 is greater than 'num_experts' 8"),
        ({"moe_intermediate_size": 32}, "'moe_intermediate_size' is 32, but must be neither .* 64 nor half"),
        ({"moe_intermediate_size": 64}, "'moe_intermediate_size' is 64, but must be neither .* 64 nor half"),
    ],
)
def test_experts_that_are_not_supported(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    fields = FAMILIES["qwen3_vl_moe"].example()
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, fields | {"text_config": fields["text_config"] | changes})


def test_experts_without_defaults_of_transformers(tmp_path: Path) -> None:
    """transformers v5 writes neither `norm_topk_prob` nor `num_experts`."""
    fields = FAMILIES["qwen3_vl_moe"].example()
    expected = read(tmp_path, fields)
    text = {name: value for name, value in fields["text_config"].items() if name != "norm_topk_prob"}
    text["num_local_experts"] = text.pop("num_experts")
    assert read(tmp_path, fields | {"text_config": text}) == expected


def test_features_for_other_layers_than_in_sglang() -> None:
    fields = FAMILIES["qwen3_vl_moe"].example()
    fields["vision_config"]["deepstack_visual_indexes"] = [0, 2]
    architecture = FAMILIES["qwen3_vl_moe"].read(ConfigReader(fields))
    assert list(FAMILIES["qwen3_vl_moe"].sglang_differs(architecture)) == [
        "features of images added to a number of layers other than 3"
    ]


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"mrope_section": [6, 5, 4]}, r"'mrope_section' is \[6, 5, 4\], whose sum must be half of .* 32"),
        ({"mrope_section": "many"}, "'mrope_section' is 'many', but must be a list of three integers"),
        ({"mrope_interleaved": False}, "'mrope_interleaved' is False; only True is supported by this family"),
    ],
)
def test_positions_in_other_axes_are_refused(tmp_path: Path, rope: dict[str, Any], problem: str) -> None:
    fields = FAMILIES["qwen3_vl"].example()
    text = fields["text_config"]
    text["rope_parameters"] |= rope
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, fields | {"text_config": text})


def test_more_blocks_than_layers_and_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    fields = FAMILIES["qwen3_vl"].example()
    text = fields["text_config"] | {"num_hidden_layers": 2, "vocab_size": 100}
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, fields | {"text_config": text})
    assert [problem.partition(";")[0] for problem in refusal.value.problems] == [
        "vision_config: field 'deepstack_visual_indexes' lists 2 blocks for 2 layers",
        "field 'image_token_id' is 190, outside the vocabulary of 100",
    ]
