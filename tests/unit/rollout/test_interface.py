from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.rehearse.simulation.engines import SimulatedGeneration
from megarl.rollout.interface import (
    EngineLifecycle,
    EngineStateError,
    GenerationRequest,
    LifecycleState,
    RequestFailedError,
    RolloutEngine,
    SamplingParameters,
    check_request,
)
from megarl.weights.tensors import TensorMeta, WeightTransferError

MANIFEST = {"w": TensorMeta((4,), torch.float32)}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
    ],
)
def test_bad_sampling_parameters_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"sampling {field} is {value}"):
        SamplingParameters(**{"max_new_tokens": 1, "seed": 0, field: value})


def test_ready_only_between_a_complete_update_and_the_next_thing() -> None:
    life = EngineLifecycle()
    with pytest.raises(EngineStateError, match="cannot generate while empty"):
        life.require_ready()
    life.begin(MANIFEST)
    life.record(MANIFEST)
    with pytest.raises(EngineStateError, match="cannot generate while updating: "):
        life.require_ready()
    life.end(3)
    assert (life.require_ready(), life.weight_version) == (3, 3)
    with pytest.raises(EngineStateError, match="cannot load weights while ready"):
        life.record(MANIFEST)
    life.leave(LifecycleState.ASLEEP)
    with pytest.raises(EngineStateError, match="cannot generate while asleep: .* wake it"):
        life.require_ready()
    with pytest.raises(EngineStateError, match="cannot begin a weight update while asleep"):
        life.begin(MANIFEST)
    assert life.weight_version is None


def test_a_failed_or_repeated_update_starts_from_nothing() -> None:
    life = EngineLifecycle()
    life.begin(MANIFEST)
    life.record({"w": TensorMeta((3,), torch.float32)})
    with pytest.raises(WeightTransferError, match=r"w \(missing from element 3 of 4\)"):
        life.end(1)
    assert life.state is LifecycleState.EMPTY
    life.begin(MANIFEST)
    life.record({"w": TensorMeta((3,), torch.float32)})
    life.begin(MANIFEST)  # earlier chunks do not count
    life.record(MANIFEST)
    life.end(2)
    assert life.require_ready() == 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt of request 1 is empty"),
        ([3, 97], r"the prompt of request 1 has token ids 3\.\.97, but the model's vocabulary is 0\.\.96"),
        (
            [1] * 60,
            "the prompt of request 1 of 60 tokens and max_new_tokens 6 exceed the model's limit of 64",
        ),
    ],
)
def test_prompts_that_cannot_be_continued(prompt: list[int], message: str) -> None:
    request = GenerationRequest(1, prompt, SamplingParameters(max_new_tokens=6, seed=0))
    with pytest.raises(ValueError, match=message):
        check_request(request, vocab_size=97, max_length=64)


@pytest.mark.parametrize("at_a_time", [1, 3])
def test_the_first_request_that_fails_ends_generate(at_a_time: int) -> None:
    """An engine returns what finished and what failed in one list, in the order of their ends."""
    generation = SimulatedGeneration(
        lambda: 0.0, lambda request: 0 if request.request_id == 1 else 2, token_s=0.0
    )
    engine: Any = SimpleNamespace(
        submit=generation.submit, collect=lambda wait_s: generation.collect(at_a_time)
    )
    with pytest.raises(RequestFailedError, match="scripted"):
        RolloutEngine.generate(engine, [[1], [2], [3]], SamplingParameters(max_new_tokens=2, seed=0))
