"""Test weight sync into transformers: each family from each trainer layout by each transport, twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megarl.config.schema import Transport
from megarl.rollout.driver.replicas import Replicas
from tests.integration.weight_matrix import (
    HF,
    LAYOUTS,
    MATRIX,
    SGLANG,
    TRANSPORTS,
    EngineCase,
    Trained,
    Trainers,
    push_twice,
    started_engine,
    started_trainers,
    two_of_each_family,
)


def test_the_matrix_has_what_it_should() -> None:
    """The matrix covers every transport into transformers from every layout; into SGLang, every transport,
    every layout and every engine."""
    by_transformers = {(layout, transport) for engine, layout, transport in MATRIX if engine.mode is None}
    assert by_transformers == set(itertools.product(LAYOUTS, TRANSPORTS))
    engines, layouts, transports = zip(
        *((engine, layout, transport) for engine, layout, transport in MATRIX if engine.mode), strict=True
    )
    assert (set(engines), set(layouts), set(transports)) == (set(SGLANG), set(LAYOUTS), set(TRANSPORTS))
    assert set(TRANSPORTS) == {*Transport} - {Transport.auto}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return two_of_each_family(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def engines(ray_cluster: None, models: dict[str, list[Trained]]) -> Iterator[dict[EngineCase, Replicas]]:
    with ExitStack() as stack:
        yield {engine: stack.enter_context(started_engine(engine, models)) for engine in HF}


@pytest.fixture(scope="module")
def trainers(
    request: pytest.FixtureRequest, engines: dict[EngineCase, Replicas], models: dict[str, list[Trained]]
) -> Iterator[Trainers]:
    with started_trainers(request.param, models) as made:
        yield made


@pytest.mark.parametrize("transport", TRANSPORTS, ids=lambda transport: transport.value)
@pytest.mark.parametrize("engine", HF, ids=str)
# called explicitly: pytest would restart them for each of several cases
@pytest.mark.parametrize("trainers", LAYOUTS, indirect=True)
def test_the_engine_writes_what_hugging_face_writes_with_the_pushed_weights(
    trainers: Trainers,
    engines: dict[EngineCase, Replicas],
    models: dict[str, list[Trained]],
    engine: EngineCase,
    transport: Transport,
    tmp_path: Path,
) -> None:
    push_twice(trainers, engines[engine], models[engine.family], engine, transport, tmp_path)
