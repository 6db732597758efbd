"""Test SGLang as an HTTP server with one rank, against transformers in float32."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import requests
import torch
from transformers import PreTrainedModel

from megarl.agents.trajectory import Sample
from megarl.machine.errors import EngineDeadError
from megarl.rollout.interface import SamplingParameters, plan_requests
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.server import ServerBackend
from megarl.weights.tensors import WeightTransferError
from tests.fork_server import behind
from tests.unit.rollout.models import VOCAB, manifest_of, push
from tests.unit.rollout.sglang_engines import END_TOKEN, YARN, server_model

PROMPTS = [[5, 6, 14, 8], [9], [20, 21, 22, 23, 24, 25, 26, 27, 28], [3, 4, 3, 4, 3], [90, 91]]


def log_probs(
    model: PreTrainedModel, prompt: list[int], token_ids: list[int], temperature: float
) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return (
        torch.log_softmax(logits / (temperature or 1.0), -1)
        .gather(-1, torch.tensor(token_ids)[:, None])
        .squeeze(-1)
    )


def difference(
    model: PreTrainedModel, prompt: list[int], sample: Sample, temperature: float = 1.0
) -> torch.Tensor:
    return (
        torch.tensor(sample.log_probs) - log_probs(model, prompt, sample.token_ids.tolist(), temperature)
    ).abs()


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return server_model()


@pytest.fixture
def engine(sglang_server: SGLangEngine, model: PreTrainedModel) -> SGLangEngine:
    if sglang_server.weight_version != 1:
        push(model, sglang_server, version=1)
    return sglang_server


@pytest.fixture
def changed(engine: SGLangEngine) -> Iterator[SGLangEngine]:
    """Engine for tests that leave other weights, or none: the next test syncs its own."""
    yield engine
    push(server_model(), engine, version=0)


def test_end_tokens_and_lengths(engine: SGLangEngine) -> None:
    sampling = SamplingParameters(max_new_tokens=40, seed=0, n=30, temperature=2.0)
    samples = engine.generate([[5, 6]], sampling)
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}

    for sample in samples:
        assert END_TOKEN not in sample.token_ids.tolist()[:-1]
        assert (sample.token_ids.tolist()[-1] == END_TOKEN) == (sample.finish_reason == "stop")
        assert sample.finish_reason == "stop" or len(sample.token_ids) == 40

    ignored = engine.generate([[5, 6]], replace(sampling, ignore_eos=True))
    assert {(len(sample.token_ids), sample.finish_reason) for sample in ignored} == {(40, "length")}
    assert any(END_TOKEN in sample.token_ids.tolist() for sample in ignored)

    # With the same seeds, the samples are the ignored ones up to the first of both end tokens.
    stop = ignored[0].token_ids.tolist()[5]
    for sample, whole in zip(
        engine.generate([[5, 6]], replace(sampling, stop_token_ids=(stop,))), ignored, strict=True
    ):
        ends = [index for index, token in enumerate(whole.token_ids.tolist()) if token in (stop, END_TOKEN)]
        assert sample.token_ids.tolist() == whole.token_ids.tolist()[: ends[0] + 1 if ends else None]


def test_a_sample_may_fill_the_context_and_not_more(engine: SGLangEngine) -> None:
    sampling = SamplingParameters(max_new_tokens=30, seed=0, ignore_eos=True)
    [sample] = engine.generate([[5] * 34], sampling)
    assert (len(sample.token_ids), sample.finish_reason) == (30, "length")

    with pytest.raises(ValueError, match="35 tokens and max_new_tokens 30 exceed the model's limit of 64"):
        engine.generate([[5], [5] * 35], sampling)

    for prompt in ([], [VOCAB]):
        with pytest.raises(ValueError, match="empty|vocabulary"):
            engine.generate([[5], prompt], sampling)

    with pytest.raises(ValueError, match="min_new_tokens needs an engine with a tokenizer"):
        engine.generate([[5]], replace(sampling, min_new_tokens=2))
    assert engine.collect(0.0) == []  # nothing was queued


def test_greedy_samples_beyond_the_original_context_are_those_of_transformers(
    engine: SGLangEngine, model: PreTrainedModel
) -> None:
    """YaRN's factor of cosine and sine, and its frequencies, are those of transformers."""
    sampling = SamplingParameters(max_new_tokens=48, seed=0, temperature=0.0, ignore_eos=True)
    samples = engine.generate(PROMPTS, sampling)

    for prompt, sample in zip(PROMPTS, samples, strict=True):
        tokens = sample.token_ids.tolist()
        assert len(prompt + tokens) > 3 * YARN["original_max_position_embeddings"]
        assert float(difference(model, prompt, sample, temperature=0.0).max()) < 1e-5

        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_nudge_ends_the_wait_for_a_sample(engine: SGLangEngine) -> None:
    requests = plan_requests([[5]] * 8, SamplingParameters(max_new_tokens=60, seed=0, ignore_eos=True))
    engine.submit(requests)
    engine.interrupt()
    start_s = time.monotonic()
    found = engine.collect(60.0)
    assert time.monotonic() - start_s < 10.0
    while len(found) < len(requests):
        found += engine.collect(60.0)
    assert engine.collect(60.0) == []


def samples_across_two_pushes(
    engine: SGLangEngine, writers: list[PreTrainedModel], first: int
) -> set[tuple[int, ...]]:
    """Send requests before, between and after the syncs of versions first + 1 and first + 2, whose models are
    writers[1] and writers[2].

    Each token must be of the weights that its sample's versions specify, with no trace of older ones in the
    cache: all prompts begin with the same tokens.

    Returns:
        The versions of the samples, counted from `first`.
    """
    sampling = SamplingParameters(max_new_tokens=50, seed=0, ignore_eos=True)
    planned = [  # of many lengths, so that at any update some samples are unfinished
        request._replace(sampling=replace(request.sampling, max_new_tokens=(4, 50, 32, 46, 18)[number % 5]))
        for number, request in enumerate(
            plan_requests([[*range(20, 28), token] for token in range(10, 90)], sampling)
        )
    ]
    samples: dict[int, Sample] = {}

    for place, (sent, wait_s) in enumerate(
        [(planned[:40], 60.0), (planned[40:60], 0.0), (planned[60:], 60.0)]
    ):
        if engine.weight_version != first + place:
            push(writers[place], engine, first + place)
        engine.submit(sent)
        samples |= dict(engine.collect(wait_s))

    while len(samples) < len(planned):
        samples |= dict(engine.collect(1.0))
    only_one = []

    for request in planned:
        sample = samples[request.request_id]
        is_by = torch.stack([difference(writer, request.prompt, sample) < 1e-4 for writer in writers])
        places = torch.from_numpy(sample.token_versions).long() - first
        assert is_by.gather(0, places[None]).all()
        only_one += (is_by.sum(0) == 1).tolist()

    # so that a wrong version shows: sometimes two models agree about a token
    assert sum(only_one) > 0.98 * len(only_one)
    return {tuple(version - first for version in sample.weight_versions) for sample in samples.values()}


def test_updates_in_the_middle_show_in_the_versions(changed: SGLangEngine, model: PreTrainedModel) -> None:
    """Every sample may end between two syncs on a busy machine, so the test repeats until one spans both."""
    writers = [model, server_model(seed=1), server_model(seed=2)]
    wanted = {(0,), (2,), (0, 1, 2)}
    seen = set[tuple[int, ...]]()

    for attempt in range(20):
        seen |= samples_across_two_pushes(changed, writers, first=1 + 3 * attempt)
        if wanted <= seen:
            break

    assert wanted <= seen


def test_an_incomplete_folder_is_named(changed: SGLangEngine, tmp_path: Path) -> None:
    changed.begin_weight_update(manifest_of(server_model()))
    with pytest.raises(WeightTransferError, match=r"no model\.safetensors and no model"):
        changed.load_folder(tmp_path)


def test_requests_without_the_key_are_refused(engine: SGLangEngine) -> None:
    backend = engine.backend
    assert isinstance(backend, ServerBackend)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}

    for path in (
        "/generate",
        "/update_weights_from_disk",
        "/pause_generation",
        "/release_memory_occupation",
        "/get_model_info",
    ):
        for headers in ({}, {"Authorization": "Bearer nonsense"}):
            assert (
                requests.post(backend.url + path, json=body, headers=headers, timeout=30).status_code == 401
            ), path

    [sample] = engine.generate([[5]], SamplingParameters(max_new_tokens=1, seed=0))
    assert len(sample.token_ids) == 1


def test_it_listens_on_loopback_only_and_keeps_its_key_to_itself(engine: SGLangEngine) -> None:
    backend = engine.backend
    assert isinstance(backend, ServerBackend)
    listening = set()

    for pid in [*engine.process_ids(), *map(behind, engine.process_ids())]:
        process = psutil.Process(pid)
        listening |= {
            connection.laddr.ip
            for connection in process.net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        for file in ("cmdline", "environ"):
            assert backend.api_key.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()

    assert listening == {"127.0.0.1"}


def test_a_hung_engine_is_found_by_its_silence(
    changed: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changed, "health_limit_s", 1.0)
    schedulers = [
        pid for pid in map(behind, changed.process_ids()) if "scheduler" in psutil.Process(pid).name()
    ]
    assert schedulers
    for pid in schedulers:
        os.kill(pid, signal.SIGSTOP)

    try:
        with pytest.raises(EngineDeadError, match="no progress for 1 s"):
            changed.generate([[5]], SamplingParameters(max_new_tokens=2, seed=0))
    finally:
        for pid in schedulers:
            os.kill(pid, signal.SIGCONT)

    changed.abort()
