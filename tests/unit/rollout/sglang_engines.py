"""Real SGLang engines for the tests, each started once: that takes a quarter of a minute.

A server is reached from the tests' own process; an in-process engine lives in a Ray actor, as in a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megarl.config.schema import SGLangMode
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.spec import SGLangSpec
from tests.unit.rollout.models import random_model
from tests.unit.rollout.remote_engine import RemoteEngine

END_TOKEN = 7  # of every model that these engines are started for


def server_model(seed: int = 0) -> PreTrainedModel:
    """A model that fits `sglang_server`."""
    return random_model("qwen2", eos_token_id=END_TOKEN, seed=seed)


def in_process_model(seed: int = 0) -> PreTrainedModel:
    """A model that fits `sglang_in_process`: tied, with normalised queries and keys, and with 40 MB to be given back."""
    return random_model("qwen3", tied=True, eos_token_id=END_TOKEN, seed=seed, vocab_size=40000, hidden_size=256)


def spec_for(model: PreTrainedModel, folder: Path, **changes: Any) -> SGLangSpec:
    """From a folder that holds no weights."""
    model.config.architectures = [type(model).__name__]  # as saving the whole model does
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    settings = dict(dtype=torch.float32, device=torch.device("cpu"), max_concurrency=16, health_limit_s=60.0)
    return SGLangSpec(path=folder, **(settings | changes))


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """A server with one rank, for `server_model`. Its weights are those of the last push: each test pushes its own."""
    engine = SGLangEngine(spec_for(server_model(), tmp_path_factory.mktemp("server"), mode=SGLangMode.server))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sglang_in_process(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteEngine]:
    """An engine with two ranks in a Ray actor, for `in_process_model`."""
    engine = RemoteEngine(spec_for(in_process_model(), tmp_path_factory.mktemp("in_process"), tensor_parallel_size=2))
    yield engine
    engine.close()
