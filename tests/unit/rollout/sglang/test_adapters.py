"""Test adapters that SGLang applies itself, against transformers with merged weights in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megarl.config.schema import SGLangMode
from megarl.models.adapters import adapter_names, is_adapter
from megarl.models.architecture import LoRA
from megarl.rollout.interface import EngineStateError, RolloutEngine, SamplingParameters, plan_requests
from megarl.rollout.sglang.engine import SGLangEngine
from megarl.weights.checksum import checksum
from megarl.weights.tensors import WeightTransferError
from tests.plain_trainer import Weights, joined, manifest_of
from tests.unit.rollout.models import random_model, weights_of
from tests.unit.rollout.remote_engine import RemoteEngine
from tests.unit.rollout.sglang.test_server_engine import PROMPTS, difference
from tests.unit.rollout.sglang_engines import spec_for

GREEDY = SamplingParameters(max_new_tokens=24, seed=0, temperature=0.0, ignore_eos=True)
EVERY = LoRA(rank=3, alpha=6.0)
SOME = LoRA(rank=4, alpha=6.0, targets=("q_proj", "o_proj", "mlp.up_proj"))


def adapted(model: PreTrainedModel, lora: LoRA, seed: int) -> Weights:
    """Return the weights of a model, and those of a random adapter on it."""
    generator = torch.Generator().manual_seed(seed)
    tensors = weights_of(model)
    for name, weight in list(tensors.items()):
        stem = name.removesuffix(".weight")
        is_target = stem.endswith(lora.targets) if lora.targets else stem.endswith("_proj")
        if name.endswith("_proj.weight") and is_target:
            a, b = adapter_names(name)
            tensors[a] = torch.randn(lora.rank, weight.shape[1], generator=generator) * 0.2
            tensors[b] = torch.randn(weight.shape[0], lora.rank, generator=generator) * 0.2
    return tensors


def merged(model: PreTrainedModel, tensors: Weights, lora: LoRA) -> PreTrainedModel:
    """Return the model with the adapter merged."""
    values = {name: tensor.clone() for name, tensor in tensors.items() if not is_adapter(name)}
    for name in values:
        a, b = adapter_names(name)
        if a in tensors:
            values[name] += lora.scale * tensors[b] @ tensors[a]
    other = random_model(model.config.model_type)
    other.load_state_dict(values)
    return other


def assert_serves(engine: RolloutEngine, tensors: Weights, model: PreTrainedModel, lora: LoRA) -> None:
    """Check the engine's checksums, and that its greedy samples are those of the merged model."""
    assert engine.checksums() == {name: checksum(tensor) for name, tensor in tensors.items()}
    exact = merged(model, tensors, lora)

    for prompt, sample in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([prompt + sample.token_ids.tolist()])
        with torch.no_grad():
            greedy = exact(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert sample.token_ids.tolist() == greedy.tolist()
        assert float(difference(exact, prompt, sample, temperature=0.0).max()) < 1e-5


@pytest.fixture(scope="module")
def server(forked_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    spec = spec_for(random_model(), tmp_path_factory.mktemp("adapted"), mode=SGLangMode.server)
    engine = SGLangEngine(replace(spec, lora=EVERY))
    yield engine
    engine.close()


def test_every_projection_in_one_rank(server: SGLangEngine) -> None:
    """Test that later syncs send adapters only, and that a sync after sleep sends everything."""
    model = random_model()
    first, second, third = (adapted(model, EVERY, seed) for seed in (1, 2, 3))

    with joined(server, first, message_numel=500) as trainer:
        trainer.push(first, version=1)
        assert_serves(server, first, model, EVERY)

        # The model of the second weights is never sent, so it may be anything.
        sent = {name: tensor if is_adapter(name) else tensor + 1 for name, tensor in second.items()}
        trainer.push(sent, version=2, first_round=trainer.first_adapter_round)
        assert server.weight_version == 2
        assert_serves(server, second, model, EVERY)

        server.sleep()
        server.wake()
        with pytest.raises(EngineStateError, match="it has no complete weights"):
            server.begin_weight_update(trainer.manifest, trainer.first_adapter_round)
        trainer.push(third, version=3)
        server.wake_cache()
        assert_serves(server, third, model, EVERY)


def test_requests_in_flight_continue_with_the_new_adapter(server: SGLangEngine) -> None:
    model = random_model()
    first, second = (adapted(model, EVERY, seed) for seed in (1, 2))
    with joined(server, first) as trainer:
        trainer.push(first, version=1)
        requests = [replace(GREEDY, max_new_tokens=48)]
        [alone] = server.generate([[5, 6]], requests[0])
        server.submit(plan_requests([[5, 6]], requests[0]))
        trainer.push(second, version=2, first_round=trainer.first_adapter_round)
        samples = []
        while not samples:
            samples = server.collect(5.0)

    [(_, sample)] = samples
    assert sample.weight_versions[-1] == 2
    tokens = sample.token_ids.tolist()
    start = sample.spans[0].end if len(sample.spans) > 1 else 0
    assert tokens[:start] == alone.token_ids.tolist()[:start]
    with torch.no_grad():
        logits = merged(model, second, EVERY)(torch.tensor([[5, 6, *tokens]])).logits[0, 1:-1]
    assert tokens[start:] == logits.argmax(-1).tolist()[start:]


def test_tensors_that_the_engine_has_no_adapter_for_are_named(server: SGLangEngine) -> None:
    weights = adapted(random_model(), EVERY, 1)
    missing = {name: tensor for name, tensor in weights.items() if "o_proj.lora" not in name}
    with pytest.raises(WeightTransferError, match=r"no tensor is loaded into .*o_proj.lora_a"):
        server.needed_slices(manifest_of(missing))


def test_some_projections_in_two_ranks(ray_cluster: None, tmp_path: Path) -> None:
    """Parts of fused projections without an adapter stay zero."""
    model = random_model("qwen3")
    spec = replace(spec_for(model, tmp_path, tensor_parallel_size=2), lora=SOME)
    engine = RemoteEngine(spec)
    try:
        first, second = (adapted(model, SOME, seed) for seed in (1, 2))
        with joined(engine, first, transport="group", message_numel=500) as trainer:
            trainer.push(first, version=1)
            assert_serves(engine, first, model, SOME)
            trainer.push(second, version=2, first_round=trainer.first_adapter_round)
            assert_serves(engine, second, model, SOME)
    finally:
        engine.close()
    assert json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"] == 2
