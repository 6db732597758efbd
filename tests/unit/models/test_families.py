"""Properties of every registered family: it reads what transformers writes, and refuses unknown fields.

The tests of parity, conversion and weight transfer also take their cases from the registry, which the last
test checks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from megarl.machine.errors import ConfigError
from megarl.models.families import FAMILIES, read_architecture
from tests.families import example_architecture, example_config, example_fields
from tests.unit.checkpoints.convert import test_writers
from tests.unit.engine import models as parity_models
from tests.unit.rollout.sglang import test_plans_of_models

# Fields of an example that no architecture depends on.
BOOKKEEPING = {
    *("architectures", "bos_token_id", "eos_token_id", "hidden_act", "initializer_range", "model_type"),
    "pad_token_id",
}


def written(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def problems_of(folder: Path, fields: dict[str, Any]) -> Sequence[str]:
    """Return what is refused in a `config.json` with these fields."""
    try:
        read_architecture(written(folder, fields))
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_architecture_can_be_written_as_json(model_type: str) -> None:
    """`megarl convert inspect --json` writes it."""
    fields = json.loads(json.dumps(asdict(example_architecture(model_type))))
    assert fields["model_type"] == model_type


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_registered_by_its_own_name(model_type: str) -> None:
    family = FAMILIES[model_type]
    assert family.model_type == model_type
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    assert family.class_prefix + family.lm_class == classes[model_type]
    assert family.example()["model_type"] == model_type


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_example_means_the_same_as_transformers_writes_it(tmp_path: Path, model_type: str) -> None:
    expected = example_architecture(model_type)
    assert read_architecture(written(tmp_path, FAMILIES[model_type].example())) == expected
    example_config(model_type).save_pretrained(tmp_path)
    assert read_architecture(str(tmp_path)) == expected


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes_are_those_that_transformers_reads(tmp_path: Path, model_type: str) -> None:
    architecture = example_architecture(model_type)
    whole = AutoConfig.from_pretrained(written(tmp_path, FAMILIES[model_type].example()))
    reference = whole.get_text_config()

    for name in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ):
        assert getattr(architecture, name) == getattr(reference, name), name

    eps = reference.layer_norm_epsilon if model_type == "nemotron_h" else reference.rms_norm_eps
    assert architecture.rms_norm_eps == eps
    if hasattr(reference, "rope_parameters"):
        rope = reference.rope_parameters
        assert architecture.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    else:
        assert len(architecture.layers_without_rope) == architecture.num_hidden_layers
    if architecture.local_rope is not None:
        assert architecture.local_rope[0] == rope["sliding_attention"]["rope_theta"]
    assert architecture.tie_word_embeddings == whole.tie_word_embeddings
    assert architecture.num_experts == getattr(
        reference, "num_local_experts", getattr(reference, "num_experts", 0)
    )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_that_nobody_knows_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    path = written(tmp_path, FAMILIES[model_type].example() | {"logit_scale": 0.25})
    with pytest.raises(ConfigError) as refusal:
        read_architecture(path)
    assert refusal.value.problems == (
        "field 'logit_scale' is 0.25; megarl does not know whether it changes the model",
    )


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        (model_type, name)
        for model_type, family in FAMILIES.items()
        for name in sorted(family.example().keys() - BOOKKEEPING)
    ],
)
def test_a_field_that_means_nothing_is_refused_by_name(tmp_path: Path, model_type: str, name: str) -> None:
    """A family that reads a field also checks its value."""
    path = written(tmp_path, FAMILIES[model_type].example() | {name: "many"})
    with pytest.raises(ConfigError) as refusal:
        read_architecture(path)
    assert any(f"'{name}'" in problem and "many" in problem for problem in refusal.value.problems)


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v3",
        "deepseek_v32",
        "gemma3_text",
        "glm4_moe",
        "gpt_oss",
        "mixtral",
        "olmo3",
        "qwen3_next",
        "smollm3",
    ],
)
def test_an_invalid_number_is_one_error(tmp_path: Path, model_type: str) -> None:
    """Other fields, such as `layer_types`, are not compared with a number that could not be read."""
    example_config(model_type).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())

    for name, value in fields.items():
        if type(value) in (int, float):
            for invalid in (-1, 0, "x", None):
                problems = problems_of(tmp_path, fields | {name: invalid})
                assert len(problems) <= 1, (name, invalid)

    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        (problem,) = problems_of(tmp_path, fields | {name: -1})
        assert problem == f"field {name!r} is -1, but must be a positive integer"


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl_moe"])
def test_an_invalid_number_of_a_vision_tower_is_one_error(tmp_path: Path, model_type: str) -> None:
    fields = FAMILIES[model_type].example()
    tower = fields["vision_config"]
    for name in (name for name, value in tower.items() if type(value) is int):
        for invalid in (-1, "x"):
            problems = problems_of(tmp_path, fields | {"vision_config": tower | {name: invalid}})
            assert len(problems) == 1, (name, invalid, problems)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_field_of_another_type_is_an_error_of_the_file(tmp_path: Path, model_type: str) -> None:
    """What no architecture depends on may have any type."""
    fields = FAMILIES[model_type].example()
    each_layer = fields.get("num_hidden_layers", 2)
    for name in fields:
        for odd in ("x", {"a": [1]}, [{}] * each_layer):
            with contextlib.suppress(ConfigError):
                read_architecture(written(tmp_path, fields | {name: odd}))
    for odd in ("Qwen2ForCausalLM", 7, [{}]):
        assert problems_of(tmp_path, fields | {"architectures": odd}) == (
            f"field 'architectures' is {odd!r}, but must be a list of class names",
        )


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_class_of_another_family_is_refused(tmp_path: Path, model_type: str) -> None:
    path = written(tmp_path, FAMILIES[model_type].example() | {"architectures": ["GPT2LMHeadModel"]})
    family = FAMILIES[model_type]
    with pytest.raises(
        ConfigError,
        match=rf"names 'GPT2LMHeadModel'; supported: .*{family.class_prefix}{family.lm_class}",
    ):
        read_architecture(path)


def test_an_example_fits_the_class_of_sglang() -> None:
    """The weight sync to SGLang's class is tested with the example."""
    assert {
        name: list(family.sglang_differs(example_architecture(name))) for name, family in FAMILIES.items()
    } == {name: [] for name in FAMILIES}


def test_parity_conversion_and_push_are_tested_for_every_family() -> None:
    every = set(FAMILIES)
    parity = {**parity_models.FAMILIES, **parity_models.EXPERT_FAMILIES}
    assert {config.model_type for config in parity.values()} == every
    assert {family for family, _ in test_writers.FAMILIES} == every
    assert {family for family, _, _ in test_plans_of_models.MODELS.values()} == {
        name for name in every if FAMILIES[name].sglang_class
    }


def test_changes_of_an_example_are_those_of_fields_that_it_has() -> None:
    assert "num_experts" not in example_fields("llama", num_experts=4)
    assert example_fields("qwen3_moe", num_experts=4)["num_experts"] == 4
