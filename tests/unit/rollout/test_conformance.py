"""Test the requirements on every engine: the fake one, the reference, and SGLang in both modes."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from megarl.agents.trajectory import Sample
from megarl.rollout.interface import (
    EngineStateError,
    GenerationRequest,
    RolloutEngine,
    SamplingParameters,
    plan_requests,
)
from megarl.weights.checksum import checksum
from megarl.weights.tensors import TensorMeta, WeightTransferError
from tests.plain_trainer import halves, load_folder
from tests.unit.rollout.sglang_engines import END_TOKEN
from tests.unit.rollout.subjects import PROMPTS, Subject, greedy, tokens
from tests.unit.rollout.test_hf_engine import greedy_reference, reference_log_probs


def collected(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[int, Sample]:
    engine.submit(requests)
    samples: dict[int, Sample] = {}

    while len(samples) < len(requests):
        found = engine.collect(1.0)
        assert not samples.keys() & dict(found).keys()
        samples |= dict(found)

    return samples


def test_no_sample_without_complete_weights(ready: Subject) -> None:
    engine = ready.engine
    before = engine.generate(PROMPTS, greedy())
    engine.begin_weight_update(ready.manifest)
    with pytest.raises(EngineStateError, match="cannot generate while updating"):
        engine.generate(PROMPTS, greedy())
    with pytest.raises(EngineStateError, match="updating"):
        engine.checksums()
    some, rest = halves(ready.weights(0))
    missing = next(iter(some))
    load_folder(engine, {name: tensor for name, tensor in ready.weights(0).items() if name != missing})
    with pytest.raises(WeightTransferError, match=rf"{missing} \(missing from element"):
        engine.end_weight_update(2)
    with pytest.raises(EngineStateError, match="cannot generate while empty"):
        engine.generate(PROMPTS, greedy())
    with pytest.raises(EngineStateError, match="cannot load weights while empty"):
        load_folder(engine, some, rest)
    with pytest.raises(EngineStateError, match="cannot load weights while empty"):
        engine.receive_weights()
    assert engine.weight_version is None
    ready.push(version=3)
    assert tokens(engine.generate(PROMPTS, greedy())) == tokens(before)
    assert engine.weight_version == 3


def test_doubled_unknown_and_misplaced_weights(ready: Subject) -> None:
    engine = ready.engine
    wrong = {**ready.manifest, "score.weight": TensorMeta((3,), torch.float32)}
    with pytest.raises(WeightTransferError, match=r"score\.weight"):
        engine.begin_weight_update(wrong)
    with pytest.raises(WeightTransferError, match=r"score\.weight"):
        engine.needed_slices(wrong)
    assert engine.generate(PROMPTS[:1], greedy())[0].weight_versions == (1,)  # it is unchanged
    name, tensor = next((name, tensor) for name, tensor in ready.weights(0).items() if tensor.dim() == 1)
    engine.begin_weight_update(ready.manifest)

    for weights, message in [
        ({"score.weight": torch.zeros(3)}, "'score.weight' is not in the model's manifest"),
        ({name: torch.zeros(len(tensor) + 1)}, "lie outside shape"),
        ({name: tensor.bfloat16()}, "arrived as torch.bfloat16, but the manifest specifies torch.float32"),
    ]:
        with pytest.raises(WeightTransferError, match=message):
            load_folder(engine, weights)

    engine.begin_weight_update(ready.manifest)
    load_folder(engine, ready.weights(0))
    load_folder(engine, {name: tensor})
    with pytest.raises(WeightTransferError, match=rf"{name} \(twice at element"):
        engine.end_weight_update(2)


def test_weights_arrive_whole_from_any_pieces(ready: Subject) -> None:
    engine = ready.engine
    before = engine.generate(PROMPTS, greedy())

    for version, message_numel in ((2, 1_777 if ready.model is None else 77_777), (3, 10**8)):
        ready.push(seed=version, version=version, message_numel=message_numel)
        expected = {name: checksum(tensor) for name, tensor in ready.weights(version).items()}
        assert engine.checksums() == expected
        after = engine.generate(PROMPTS, greedy())
        assert {sample.weight_versions for sample in after} == {(version,)}
        assert tokens(after) != tokens(before)


def test_weights_from_a_folder_equal_those_of_the_model(ready: Subject) -> None:
    ready.engine.begin_weight_update(ready.manifest)
    load_folder(ready.engine, *halves(ready.weights(4)))
    ready.engine.end_weight_update(2)
    assert ready.engine.checksums() == {name: checksum(tensor) for name, tensor in ready.weights(4).items()}


def test_samples_are_prompt_major_and_follow_the_seed(ready: Subject) -> None:
    sampling = SamplingParameters(max_new_tokens=5, seed=7, n=3)
    samples = ready.engine.generate(PROMPTS, sampling)
    assert len(samples) == 15
    assert tokens(ready.engine.generate(PROMPTS, sampling)) == tokens(samples)
    assert tokens(
        ready.engine.generate(PROMPTS, SamplingParameters(max_new_tokens=5, seed=8, n=3))
    ) != tokens(samples)
    assert len({tuple(ids) for ids in tokens(samples)[:3]}) > 1
    singles = [ready.engine.generate([prompt], greedy(5))[0].token_ids.tolist() for prompt in PROMPTS]
    twice = ready.engine.generate(PROMPTS, SamplingParameters(max_new_tokens=5, seed=7, n=2, temperature=0))
    assert tokens(twice) == [ids for ids in singles for _ in range(2)]


def test_a_sample_does_not_depend_on_what_is_written_beside_it(ready: Subject) -> None:
    requests = plan_requests(PROMPTS, SamplingParameters(max_new_tokens=7, seed=3, n=2))
    together = collected(ready.engine, requests)
    backwards = collected(ready.engine, requests[::-1])
    alone = {
        request.request_id: collected(ready.engine, [request])[request.request_id] for request in requests
    }

    for request_id, sample in together.items():
        assert (
            backwards[request_id].token_ids.tolist()
            == sample.token_ids.tolist()
            == alone[request_id].token_ids.tolist()
        )


def test_stop_tokens_end_a_sample_and_length_does(ready: Subject) -> None:
    free = ready.engine.generate(
        PROMPTS, SamplingParameters(max_new_tokens=12, seed=0, temperature=0, ignore_eos=True)
    )
    assert {(len(sample.token_ids), sample.finish_reason) for sample in free} == {(12, "length")}
    stops = {free[0].token_ids.tolist()[2], free[1].token_ids.tolist()[0], free[3].token_ids.tolist()[5]}
    sampling = SamplingParameters(max_new_tokens=12, seed=0, temperature=0, stop_token_ids=tuple(stops))
    reasons = set()

    for sample, whole in zip(ready.engine.generate(PROMPTS, sampling), free, strict=True):
        end = next(
            (place for place, token in enumerate(whole.token_ids.tolist()) if token in {*stops, END_TOKEN}),
            None,
        )
        assert sample.token_ids.tolist() == (
            whole.token_ids.tolist() if end is None else whole.token_ids.tolist()[: end + 1]
        )
        assert sample.finish_reason == ("length" if end is None else "stop")
        assert len(sample.log_probs) == len(sample.token_ids)
        reasons.add(sample.finish_reason)

    assert "stop" in reasons


def test_the_minimum_length(ready: Subject) -> None:
    sampling = SamplingParameters(
        max_new_tokens=9, min_new_tokens=3, seed=0, n=4, stop_token_ids=tuple(range(2, 30))
    )
    if not ready.has_min_new_tokens:
        with pytest.raises(ValueError, match="min_new_tokens needs an engine with a tokenizer"):
            ready.engine.generate(PROMPTS, sampling)
        return

    samples = ready.engine.generate(PROMPTS, sampling)
    assert min(len(sample.token_ids) for sample in samples) > 3
    assert not {token for sample in samples for token in sample.token_ids.tolist()[:3]} & {
        *range(2, 30),
        END_TOKEN,
    }


def test_log_probs_are_those_of_the_whole_distribution(ready: Subject) -> None:
    if ready.model is None:
        pytest.skip("it has no model: its log-probs are made up")
    model = ready.model(0)

    for temperature in (0.6, 1.0, 0.0):
        cut = {"top_p": 0.8, "top_k": 20} if temperature == 0.6 else {}
        sampling = SamplingParameters(max_new_tokens=9, seed=1, temperature=temperature, **cut)
        for prompt, sample in zip(PROMPTS, ready.engine.generate(PROMPTS, sampling), strict=True):
            ids = sample.token_ids.tolist()
            expected = reference_log_probs(model, prompt, ids, temperature)
            assert torch.allclose(torch.tensor(sample.log_probs), expected, atol=1e-4)
            assert temperature or ids == greedy_reference(model, prompt, len(ids))


def test_prompts_that_cannot_be_continued_are_refused_with_all_beside_them(ready: Subject) -> None:
    prompts: list[list[int]] = [[], [3, 10**6], [-1], [1] * 62]
    for prompt in prompts:
        requests = [GenerationRequest(0, [5], greedy()), GenerationRequest(1, prompt, greedy())]
        with pytest.raises(ValueError, match="the prompt of request 1"):
            ready.engine.submit(requests)

    assert ready.engine.collect(0.2) == []
    assert ready.engine.generate([], greedy()) == []


def test_aborted_requests_return_no_samples(ready: Subject) -> None:
    ready.engine.submit(plan_requests(PROMPTS, greedy(40)))
    ready.engine.abort()
    assert ready.engine.collect(0.2) == []
    numbered = [
        request._replace(request_id=100 + request.request_id)
        for request in plan_requests(PROMPTS, greedy(40))
    ]
    ready.engine.submit(numbered[1:])
    ready.engine.abort([101, 103, 105])
    found = collected(ready.engine, numbered[:1]).keys()
    while len(found) < 3:
        found |= dict(ready.engine.collect(1.0)).keys()
    assert sorted(found) == [100, 102, 104]
    assert ready.engine.collect(0.2) == []


def test_asleep_it_refuses_and_the_next_update_wakes_it_up_to_the_same(
    ready: Subject, request: pytest.FixtureRequest
) -> None:
    engine = ready.engine
    before = engine.generate(PROMPTS, greedy())
    engine.submit(plan_requests(PROMPTS, greedy(40)))
    engine.sleep()
    engine.sleep()

    for call in (
        lambda: engine.generate(PROMPTS, greedy()),
        lambda: engine.begin_weight_update(ready.manifest),
        engine.checksums,
    ):
        with pytest.raises(EngineStateError, match="asleep"):
            call()

    engine.wake()
    engine.wake()
    with pytest.raises(EngineStateError, match="cannot generate while empty"):
        engine.generate(PROMPTS, greedy())
    ready.push(version=5)

    if "sglang" in request.node.name:  # the others have no cache
        with pytest.raises(EngineStateError, match="wake_cache first"):
            engine.generate(PROMPTS, greedy())

    engine.wake_cache()
    engine.wake_cache()
    assert tokens(engine.generate(PROMPTS, greedy())) == tokens(before)


def test_a_sleeping_engine_keeps_no_request_that_was_in_flight(ready: Subject) -> None:
    """A request that arrives after all have been aborted would run without weights."""
    for delay_ms in range(0, 12, 2):
        ready.engine.submit(plan_requests(PROMPTS * 6, greedy(40)))
        time.sleep(delay_ms / 1000)  # each delay finds them elsewhere
        ready.engine.sleep()
        ready.engine.wake()
        ready.push()
        ready.engine.wake_cache()
    assert ready.engine.collect(0.2) == []


def test_an_update_can_be_begun_anew(ready: Subject) -> None:
    ready.engine.begin_weight_update(ready.manifest)
    load_folder(ready.engine, halves(ready.weights(1))[0])
    ready.push(seed=2, version=2)
    assert ready.engine.checksums() == {name: checksum(tensor) for name, tensor in ready.weights(2).items()}


def test_before_its_first_weights_and_closed_it_refuses(
    subject: Subject, request: pytest.FixtureRequest
) -> None:
    if "sglang" in request.node.name:
        pytest.skip("the other tests need this engine")
    with pytest.raises(EngineStateError, match="cannot generate while empty"):
        subject.engine.generate(PROMPTS, greedy())
    subject.push()
    subject.engine.close()
    with pytest.raises(EngineStateError, match="cannot generate while closed"):
        subject.engine.generate(PROMPTS, greedy())
    with pytest.raises(EngineStateError, match="cannot begin a weight update while closed"):
        subject.engine.begin_weight_update(subject.manifest)
    assert subject.engine.process_ids() == []
