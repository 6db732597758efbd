"""Engines on which every conformance test runs, with weights for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from megarl.agents.trajectory import Sample
from megarl.rollout.interface import RolloutEngine, SamplingParameters
from megarl.weights.tensors import Manifest
from tests.fake_engine import MANIFEST, FakeEngine, FakeSpec, random_weights
from tests.plain_trainer import manifest_of, push
from tests.unit.rollout.models import engine_for, random_model, weights_of
from tests.unit.rollout.sglang_engines import END_TOKEN, in_process_model, server_model

Weights = dict[str, torch.Tensor]
PROMPTS = [[5, 6, 7], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28], [3, 4, 3, 4, 3], [30, 31]]


class Subject(NamedTuple):
    """An engine under test.

    Attributes:
        model: seed -> the model with the weights `weights(seed)`; None if there is no model to compare with.
    """

    engine: RolloutEngine
    weights: Callable[[int], Weights]
    model: Callable[[int], PreTrainedModel] | None
    has_min_new_tokens: bool = True

    @property
    def manifest(self) -> Manifest:
        return manifest_of(self.weights(0))

    def push(self, seed: int = 0, version: int = 1, message_numel: int = 10**6) -> None:
        push(self.engine, self.weights(seed), version, message_numel)


def of_model(model: Callable[[int], PreTrainedModel]) -> Callable[[int], Weights]:
    return lambda seed: weights_of(model(seed))


def hf_model(seed: int = 0) -> PreTrainedModel:
    return random_model(eos_token_id=END_TOKEN, seed=seed)


@pytest.fixture(params=["fake", "hf", "sglang_server", "sglang_in_process"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    if request.param == "fake":
        spec = FakeSpec(folder=tmp_path, manifest=MANIFEST, end_token_ids=(END_TOKEN,))
        yield Subject(FakeEngine(spec), lambda seed: random_weights(MANIFEST, seed), None)
    elif request.param == "hf":
        yield Subject(engine_for(hf_model(), tmp_path, max_concurrency=4), of_model(hf_model), hf_model)
    else:
        model = server_model if request.param == "sglang_server" else in_process_model
        yield Subject(
            request.getfixturevalue(request.param), of_model(model), model, has_min_new_tokens=False
        )


@pytest.fixture
def ready(subject: Subject) -> Subject:
    """Sync weights of seed 0, which alone are version 1 when a test ends."""
    if subject.engine.weight_version != 1:
        subject.push()
    return subject


def greedy(max_new_tokens: int = 6) -> SamplingParameters:
    return SamplingParameters(max_new_tokens=max_new_tokens, seed=0, temperature=0.0)


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]
