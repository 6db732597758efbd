"""Rules for engines with pipeline stages: what a run refuses, and which models have stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.schema import PPOConfig
from megarl.config.validate import validate
from tests.unit.config.folders import model_folder, ppo_values, write_yaml

PP = "rollout.pipeline_parallel_size"
NGRAM = "rollout.sglang.server_args={speculative_algorithm: NGRAM}"
AHEAD = ("rollout.max_staleness=1", "algorithm.rollout_correction.level=token")


def violations(tmp_path: Path, *overrides: str, **fields: Any) -> list[str]:
    """Return the violations of a run whose model has 4 layers and these fields."""
    values = ppo_values(tmp_path)
    values["model"]["path"] = str(model_folder(tmp_path / "policy", **fields))
    values["rollout"] |= {"engine": "sglang", "pipeline_parallel_size": 2, "num_replicas": 1}
    path = write_yaml(tmp_path / "run.yaml", values)
    return [str(each) for each in validate(load_config(PPOConfig, path, overrides))]


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ([], {}),
        (["rollout.tensor_parallel_size=2"], {}),
        ([*AHEAD, "rollout.on_update=drain"], {}),
        ([], {"tie_word_embeddings": True}),
    ],
)
def test_stages_that_are_accepted(tmp_path: Path, overrides: list[str], fields: dict[str, Any]) -> None:
    assert violations(tmp_path, *overrides, **fields) == []


@pytest.mark.parametrize(
    ("overrides", "fields", "said"),
    [
        ([f"{PP}=5"], {}, f"{PP}: is 5, but "),
        (
            [*AHEAD],
            {},
            f"{PP}, rollout.max_staleness, rollout.on_update: is 2, but SGLang pauses only one of",
        ),
        ([NGRAM, "device=cuda"], {}, "SGLang decodes speculatively in engines of one stage only; remove"),
        (["actor.lora.rank=4", "actor.lora.sync=adapter"], {}, f"{PP}, actor.lora.sync: is 2, but engines"),
        (["rollout.dtype=fp8"], {}, f"{PP}, rollout.dtype: is 2, but megarl has no test of FP8 in engines"),
        (["engine.routing_replay=rollout"], {}, f"{PP}, engine.routing_replay: is 2, but SGLang's first"),
        (
            ["rollout.engine=hf"],
            {},
            "the engine 'hf' cannot shard a model, but pipeline_parallel_size is 2; ",
        ),
        (
            [],
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
            "(llama) ties its output layer to the embedding, which the last stage of SGLang's class lacks",
        ),
        (
            ["placement.strategy=hybrid", "rollout.num_replicas=3"],
            {},
            "num_replicas 3 x tensor_parallel_size 1 x pipeline_parallel_size 2 = 6 devices, but in the",
        ),
    ],
)
def test_what_stages_cannot_be_combined_with(
    tmp_path: Path, overrides: list[str], fields: dict[str, Any], said: str
) -> None:
    found = violations(tmp_path, *overrides, **fields)
    assert any(said in each for each in found), found
