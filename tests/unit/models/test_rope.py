"""Rotary embeddings as `config.json` describes them, in the forms of transformers v4 and v5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.models.architecture import LinearScaling, YarnScaling
from megarl.models.config_reader import ConfigReader
from megarl.models.rope import read_rope, sglang_rope_differs
from tests.families import example_architecture

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
YARN_FACTOR = 1.1386294361119891  # 0.1 ln 4 + 1
QWEN_README = YarnScaling(**YARN, attention_factor=YARN_FACTOR)  # Qwen's own advice for 128k tokens


def read(fields: dict[str, Any], **of_class: Any) -> tuple[Any, list[str]]:
    """Read the fields of a model whose class has a base frequency of 10,000 and these defaults."""
    rope_of_class = {"rope_type": "default", "rope_theta": 10000.0, **of_class}
    reader = ConfigReader(fields, defaults={"rope_parameters": rope_of_class})
    rope = read_rope(reader, 131072)
    reader.check_neutral()
    reader.check_left_over()
    return rope, reader.problems


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (10000.0, None, 1.0)),
        ({"rope_theta": 1e6, "rope_scaling": None}, (1e6, None, 1.0)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (1e6, None, 1.0)),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, (10000.0, LinearScaling(factor=4.0), 1.0)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
            (1e6, QWEN_README, 1.0),
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}}, (1e6, QWEN_README, 1.0)),
        # The original length of a scaling that does not name one is the model's.
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            (10000.0, replace(QWEN_README, original_max_position_embeddings=131072), 1.0),
        ),
    ],
)
def test_both_forms_of_the_file(fields: dict[str, Any], expected: Any) -> None:
    assert read(fields) == (expected, [])


@pytest.mark.parametrize(
    ("given", "factor"),
    [
        ({}, YARN_FACTOR),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772588722239782 / YARN_FACTOR),
        ({"mscale": 2.0}, YARN_FACTOR),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_factor_of_cosine_and_sine(given: dict[str, float], factor: float) -> None:
    (_, scaling, _), problems = read({"rope_scaling": {"rope_type": "yarn", **YARN, **given}})
    assert problems == []
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}]
)
def test_partial_rotation(fields: dict[str, Any]) -> None:
    assert read(fields, partial_rotary_factor=1.0) == ((10000.0, None, 0.5), [])
    assert read({}, partial_rotary_factor=0.25) == ((10000.0, None, 0.25), [])
    assert "only 1 is supported by this family" in read(fields)[1][0]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "depend on the longest row of a batch"),
        ({"rope_scaling": {"type": "longrope"}}, "depend on the length of a row"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "a model of images"),
        ({"rope_scaling": {"type": "su"}}, "'rope_type' is 'su'; supported: default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: field 'factor' is missing"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 1, "beta_slow": 2}}, "must be at least"),
        ({"rope_scaling": {"type": "yarn", **YARN, "attn_factor": 2.0}}, "'attn_factor' is 2.0"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": "no"}}, "'truncate' is 'no'"),
        ({"rope_scaling": {"type": "yarn", **YARN, "llama_4_scaling_beta": 0.1}}, "'llama_4_scaling_beta'"),
        ({"rope_parameters": {"mrope_section": [16, 24, 24]}}, "'mrope_section' is [16, 24, 24]"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "differ; keep one"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    _, problems = read(fields)
    assert len(problems) == 1
    assert said in problems[0]


def test_yarn_that_sglang_computes_differently() -> None:
    dense = example_architecture("qwen3")
    sparse = example_architecture("qwen3_moe")

    def said(scaling: YarnScaling, architecture: Any = dense) -> list[str]:
        return list(
            sglang_rope_differs(replace(architecture, rope_scaling=scaling, max_position_embeddings=40960))
        )

    assert list(sglang_rope_differs(sparse)) == []
    assert said(QWEN_README) == []
    assert said(replace(QWEN_README, attention_factor=1.5)) == [
        "a YaRN attention_factor of 1.5, for which it uses 1.13863"
    ]
    assert said(QWEN_README, sparse) == [
        "a YaRN factor of 4, for which it uses the ratio of the contexts 1.25"
    ]
