"""SGLang reads the same rotary embedding and the same defaults from a `config.json` as transformers does.

SGLang has configuration classes of its own for some families.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megarl.models.class_defaults import CLASS_DEFAULTS
from megarl.models.families import FAMILIES
from tests import fork_server
from tests.families import example_config
from tests.unit.rollout.sglang.test_plans_of_models import write_pattern

_PROGRAM = """
import json, sys
from megarl.rollout.sglang import environment
environment.prepare("cpu")
from sglang.srt.utils.hf_transformers import get_config

read = {}
for path, added in json.loads(sys.stdin.read()).items():
    config = get_config(path, trust_remote_code=False, model_override_args=added)
    read[path] = config.to_dict()
    text = config.get_text_config()
    for name in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        read[path].setdefault("text", {})[name] = getattr(text, name, None)
print(json.dumps(read, default=str))
"""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_NESTED = ("text_config", "vision_config")
# Their classes leave out windows that `use_sliding_window` does not enable. Heads are required by megarl. The
# pattern of windows is a number for transformers, and letters for SGLang.
_LEFT_OUT = (
    *("sliding_window", "sliding_window_pattern", "max_window_layers", "num_key_value_heads"),
    "rope_parameters",
)


def without_defaults(fields: dict[str, Any], defaults: Any) -> dict[str, Any]:
    """Return the fields without those that have a default, and without a rotary embedding."""
    return {
        name: without_defaults(value, defaults.get(name, {})) if name in _NESTED else value
        for name, value in fields.items()
        if name in _NESTED or (name not in _ROPE and name not in defaults) or name == "num_key_value_heads"
    }


def rotates(model_type: str) -> bool:
    """Return whether the layers of a family rotate queries and keys."""
    defaults = CLASS_DEFAULTS[model_type]
    return "rope_parameters" in defaults.get("text_config", defaults)


def with_thetas(fields: dict[str, Any], theta: float) -> dict[str, Any]:
    """Return the fields that transformers v5 writes, with another base frequency."""
    text = fields.get("text_config", fields)
    rope = text["rope_parameters"]
    for part in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        part["rope_theta"] = theta
    return fields


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what SGLang reads from two files of each family, one without defaults and one of v5."""
    parent = tmp_path_factory.mktemp("configs")
    given = {}
    for model_type, family in FAMILIES.items():
        if family.sglang_class:
            written = json.loads(example_config(model_type).to_json_string())
            files = {"missing": without_defaults(family.example(), CLASS_DEFAULTS[model_type])}
            if rotates(model_type):
                files["v5"] = with_thetas(written, 777.0)
            for kind, fields in files.items():
                folder = parent / model_type / kind
                folder.mkdir(parents=True)
                (folder / "config.json").write_text(json.dumps(fields))
                if "layers_block_type" in fields:
                    write_pattern(folder / "config.json")
                given[str(folder)] = family.added_for_sglang(fields)

    ended = subprocess.run(
        [*fork_server.PYTHON, "--sglang", "-c", _PROGRAM],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    return {str(Path(path).relative_to(parent)): config for path, config in found.items()}


def theta_of(config: dict[str, Any]) -> float:
    """Return the base frequency as SGLang's models find it."""
    text = config["text"]
    rope = text["rope_parameters"] or {}
    rope = rope.get("full_attention", rope)
    theta: float = rope.get("rope_theta", text["rope_theta"])
    return theta


WITH_CLASS = [name for name, family in FAMILIES.items() if family.sglang_class]


@pytest.mark.parametrize("model_type", WITH_CLASS)
def test_missing_fields_have_the_same_defaults(read: dict[str, Any], model_type: str) -> None:
    config = read[f"{model_type}/missing"]
    defaults = CLASS_DEFAULTS[model_type]
    for part in ("", *_NESTED):
        fields = defaults.get(part, {}) if part else defaults
        expected = {
            name: value
            for name, value in fields.items()
            if name not in (*_LEFT_OUT, *_NESTED) and value is not None
        }
        stored = config.get(part, {}) if part else config
        assert {name: stored.get(name) for name in expected} == expected

    if not rotates(model_type):
        return
    rope = defaults.get("text_config", defaults)["rope_parameters"]
    rope = rope.get("full_attention", rope)
    assert theta_of(config) == rope["rope_theta"]
    if rope["rope_type"] != "default":
        assert config["text"]["rope_parameters"].items() >= rope.items()
    if "partial_rotary_factor" in rope:
        stored_rope = config["text"]["rope_parameters"] or {}
        factor = stored_rope.get("partial_rotary_factor", config["text"]["partial_rotary_factor"])
        assert factor == rope["partial_rotary_factor"]


@pytest.mark.parametrize("model_type", [name for name in WITH_CLASS if rotates(name)])
def test_the_base_frequency_of_a_file_of_transformers_v5(read: dict[str, Any], model_type: str) -> None:
    assert theta_of(read[f"{model_type}/v5"]) == 777.0
