"""Models of a run's width with few layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.config.shipped import CONFIGS_DIR
from megarl.models.counts import num_parameters
from megarl.models.families import read_architecture
from megarl.rehearse.calibration.measurements import most_layers, reduced_config, write_reduced

MODELS = sorted(file.parent for file in (CONFIGS_DIR / "models").rglob("config.json"))


@pytest.mark.parametrize("folder", MODELS, ids=lambda folder: folder.name)
def test_every_shipped_model_has_a_reduced_one(folder: Path, tmp_path: Path) -> None:
    whole = read_architecture(str(folder), trust_remote_code=True)
    for num_layers in (4, 8):
        if num_layers < whole.num_hidden_layers:
            reduced = write_reduced(str(folder), num_layers, tmp_path)
            assert reduced.num_hidden_layers == num_layers
            assert reduced.hidden_size == whole.hidden_size
            assert reduced.num_experts == whole.num_experts


def test_lists_by_layer_are_cut_and_experts_are_in_all_layers() -> None:
    config = {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "a"],
        "stop": [1, 2],
        "first_k_dense_replace": 1,
        "mlp_only_layers": [0, 2],
        "num_nextn_predict_layers": 1,
    }
    assert reduced_config(config, 2) == {
        "num_hidden_layers": 2,
        "layer_types": ["a", "b"],
        "stop": [1, 2],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [0],
        "num_nextn_predict_layers": 0,
    }
    assert reduced_config({"text_config": {"num_hidden_layers": 3}}, 1) == {
        "text_config": {"num_hidden_layers": 1}
    }
    assert reduced_config(config, 3)["first_k_dense_replace"] == 1


def test_as_many_layers_as_fit(tmp_path: Path) -> None:
    folder = CONFIGS_DIR / "models" / "Qwen3-32B"
    sizes = {n: 2 * num_parameters(write_reduced(str(folder), n, tmp_path)) for n in (2, 5, 6)}
    assert most_layers(str(folder), tmp_path, 2, sizes[6] - 1, limit=64) == 5
    assert most_layers(str(folder), tmp_path, 2, sizes[6], limit=64) == 6
    assert most_layers(str(folder), tmp_path, 2, sizes[6], limit=4) == 4
    assert most_layers(str(folder), tmp_path, 2, sizes[2] - 1, limit=64) == 0
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
