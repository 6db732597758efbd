"""Missing and null fields of `config.json`: refused, or read as transformers reads them.

Of the published files, a few fields are removed here; tests/soak/test_more_cases.py removes all of them.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from megarl.machine.errors import ConfigError
from megarl.models.architecture import YarnScaling
from megarl.models.families import read_architecture
from tests.missing_fields import difference, examples, paths, published, with_null, without
from tests.unit.models.test_families import problems_of, written

EXAMPLES = examples()
PUBLISHED = published()


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_a_field_that_is_missing_has_the_default_of_its_class(tmp_path: Path, model_type: str) -> None:
    fields = EXAMPLES[model_type]
    assert difference(tmp_path, fields) is None
    differing = {path: difference(tmp_path, without(fields, [path])) for path in paths(fields)}
    assert {path: found for path, found in differing.items() if found is not None} == {}


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_a_field_that_is_null(tmp_path: Path, model_type: str) -> None:
    fields = EXAMPLES[model_type]
    differing = {path: difference(tmp_path, with_null(fields, path)) for path in paths(fields)}
    assert {path: found for path, found in differing.items() if found is not None} == {}


@pytest.mark.parametrize("model_type", EXAMPLES)
def test_several_fields_are_missing(tmp_path: Path, model_type: str) -> None:
    fields = EXAMPLES[model_type]
    every = list(paths(fields))
    chosen = random.Random(model_type)
    for _ in range(6):
        removed = chosen.sample(every, chosen.randint(2, 6))
        assert difference(tmp_path, without(fields, removed)) is None, removed


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_without_a_field(tmp_path: Path, name: str) -> None:
    fields = PUBLISHED[name]
    every = list(paths(fields))
    for path in every if "MEGARL_SOAK" in os.environ else random.Random(name).sample(every, 2):
        assert difference(tmp_path, without(fields, [path])) is None, path
        assert difference(tmp_path, with_null(fields, path)) is None, path


@pytest.mark.parametrize(
    ("model", "missing", "expected"),
    [
        ("Kimi-K2-Instruct-BF16", "routed_scaling_factor", {"scaling_factor": 2.5}),
        ("DeepSeek-V3.1-BF16", "first_k_dense_replace", {"layers": tuple(range(3, 61))}),
        ("DeepSeek-V3.2-BF16", "routed_scaling_factor", {"scaling_factor": 2.5}),
        ("GLM-4.5", "routed_scaling_factor", {"scaling_factor": 1.0}),
        ("Qwen3-Next-80B-A3B-Instruct", "norm_topk_prob", {"norm_topk_prob": True}),
        ("Qwen3-30B-A3B", "norm_topk_prob", {"norm_topk_prob": False}),
    ],
)
def test_experts_without_a_field(tmp_path: Path, model: str, missing: str, expected: dict[str, Any]) -> None:
    experts = read_architecture(written(tmp_path, without(PUBLISHED[model], [(missing,)]))).experts
    assert {name: getattr(experts, name) for name in expected} == expected


@pytest.mark.parametrize("absent", [True, False])
def test_gpt_oss_without_rope_has_yarn(tmp_path: Path, absent: bool) -> None:
    fields = EXAMPLES["gpt_oss"]
    path = ("rope_parameters",)
    architecture = read_architecture(
        written(tmp_path, without(fields, [path]) if absent else with_null(fields, path))
    )
    scaling = architecture.rope_scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position_embeddings, scaling.truncate) == (32.0, 4096, False)
    # An empty object is a rotary embedding without scaling.
    plain = read_architecture(written(tmp_path, fields | {"rope_parameters": {}, "rope_theta": 150000.0}))
    assert plain.rope_scaling is None


@pytest.mark.parametrize("model_type", ["smollm3", "deepseek_v3", "qwen3", "gpt_oss"])
def test_a_number_that_fits_only_the_sizes_of_the_class_is_required(tmp_path: Path, model_type: str) -> None:
    fields = without(EXAMPLES[model_type], [("num_key_value_heads",)])
    assert "field 'num_key_value_heads' is missing" in problems_of(tmp_path, fields)


def test_null_is_not_a_default(tmp_path: Path) -> None:
    """transformers would compute with null, or refuse it."""
    fields = EXAMPLES["deepseek_v3"]
    for name in ("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor"):
        assert problems_of(tmp_path, fields | {name: None}) == (f"field {name!r} is missing",)
    (problem,) = problems_of(tmp_path, fields | {"norm_topk_prob": None})
    assert problem == "field 'norm_topk_prob' is None; only true is supported with sigmoid scores"
    (problem,) = problems_of(tmp_path, fields | {"rope_interleave": None})
    assert problem == "field 'rope_interleave' is None; only true is supported"


def test_a_field_of_a_vision_tower_has_the_default_of_its_family(tmp_path: Path) -> None:
    path = ("vision_config", "patch_size")
    sizes = {}
    for name in ("Qwen3-VL-8B-Instruct", "Qwen3-VL-30B-A3B-Instruct"):
        vision = read_architecture(written(tmp_path, without(PUBLISHED[name], [path]))).vision
        assert vision is not None
        sizes[name] = vision.patch_size
    assert set(sizes.values()) == {16}
    vision = read_architecture(written(tmp_path, without(EXAMPLES["qwen2_5_vl"], [path]))).vision
    assert vision is not None
    assert vision.patch_size == 14


def test_the_blocks_of_a_class_must_fit_the_tower(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'fullatt_block_indexes' is \[7, 15, 23, 31\]; it must list"):
        read_architecture(
            written(tmp_path, without(EXAMPLES["qwen2_5_vl"], [("vision_config", "fullatt_block_indexes")]))
        )
