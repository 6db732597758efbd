"""Real SGLang engines for the tests of this folder, each started once, which takes 15 seconds.

A server is used from the tests' own process; an in-process engine runs in a Ray actor, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from megarl.config.schema import (
    Device,
    DType,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangConfig,
    SGLangMode,
)
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.sglang.engine import SGLangEngine
from tests.unit.rollout.models import random_model
from tests.unit.rollout.remote_engine import RemoteEngine

END_TOKEN = 7  # of every model for which these engines are started
# The context is four times as long as that of the model before it was extended.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@lru_cache(maxsize=4)
def server_model(seed: int = 0) -> PreTrainedModel:
    """Return a model that fits `sglang_server`. It has YaRN."""
    return random_model("qwen2", eos_token_id=END_TOKEN, seed=seed, rope_parameters=dict(YARN))


@lru_cache(maxsize=4)
def in_process_model(seed: int = 0) -> PreTrainedModel:
    """Return a model that fits `sglang_in_process`: with normalized queries and keys, with experts, and with
    40 MB to free."""
    return random_model("glm4_moe", eos_token_id=END_TOKEN, seed=seed, vocab_size=20000, hidden_size=256)


def spec_for(
    model: PreTrainedModel,
    folder: Path,
    mode: SGLangMode = SGLangMode.engine,
    tensor_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    min_new_tokens: int = 0,
    returns_routes: bool = False,
) -> RolloutEngineSpec:
    """Return the spec of an engine, from a folder without weights."""
    model.config.architectures = [type(model).__name__]  # as saving the whole model does
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    rollout = RolloutConfig(
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        max_concurrency=16,
        health_limit_s=60.0,
        validation=SamplingConfig(min_new_tokens=min_new_tokens),
        sglang=SGLangConfig(mode=mode),
    )
    policy = ModelConfig(path=str(folder), dtype=DType.float32)

    return RolloutEngineSpec(model=policy, rollout=rollout, device=Device.cpu, returns_routes=returns_routes)


@pytest.fixture(scope="package")
def sglang_server(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """Start a server with one rank, for `server_model`. Its weights are those of the last sync: each test
    syncs its own."""
    engine = SGLangEngine(spec_for(server_model(), tmp_path_factory.mktemp("server"), mode=SGLangMode.server))
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def sglang_in_process(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """Start an engine with two ranks in a Ray actor, for `in_process_model`; each rank has half of the
    experts. It returns routes."""
    folder = tmp_path_factory.mktemp("in_process")
    spec = spec_for(
        in_process_model(), folder, tensor_parallel_size=2, expert_parallel_size=2, returns_routes=True
    )
    engine = RemoteEngine(spec)
    yield engine
    engine.close()
