from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import PreTrainedModel

from megarl.agents.trajectory import Sample
from megarl.models.families import FAMILIES
from megarl.rollout.hf import decoding
from megarl.rollout.hf.decoding import sample_tokens
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import GenerationRequest, SamplingParameters, plan_requests
from megarl.weights.checksum import checksum
from megarl.weights.tensors import WeightTransferError
from tests.families import DENSE_FAMILIES, example_architecture
from tests.plain_trainer import load_folder
from tests.unit.rollout.models import VOCAB, engine_for, manifest_of, push, random_model

# Models that read images are tested in test_images.py. Those with gated delta nets are refused.
LANGUAGE = [
    family
    for family in DENSE_FAMILIES
    if FAMILIES[family].tower_rows is None and example_architecture(family).delta_net is None
]
PROMPTS = [[5, 6, 7], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28], [3, 4, 3, 4, 3], [90, 91]]


def greedy(max_new_tokens: int = 6) -> SamplingParameters:
    return SamplingParameters(max_new_tokens=max_new_tokens, seed=0, temperature=0.0)


def reference_log_probs(
    model: PreTrainedModel, prompt: list[int], token_ids: list[int], temperature: float
) -> torch.Tensor:
    """Return the log-probs of one forward pass over the whole sequence, without padding and cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    return (
        torch.log_softmax(logits / (temperature or 1.0), -1)
        .gather(-1, torch.tensor(token_ids)[:, None])
        .squeeze(-1)
    )


def greedy_reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    token_ids: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            token_ids.append(int(model(torch.tensor([prompt + token_ids])).logits[0, -1].argmax()))
    return token_ids


@pytest.fixture
def model() -> PreTrainedModel:
    return random_model()


@pytest.fixture
def engine(model: PreTrainedModel, tmp_path: Path) -> HFEngine:
    engine = engine_for(model, tmp_path)
    push(model, engine)
    return engine


@pytest.mark.parametrize(
    ("family", "tied"), [*((family, False) for family in LANGUAGE), ("qwen2", True), ("llama", True)]
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
def test_log_probs_are_those_of_a_plain_forward(
    tmp_path: Path, family: str, tied: bool, temperature: float
) -> None:
    model = random_model(family, tied=tied)
    engine = engine_for(model, tmp_path, max_concurrency=4)  # several batches, each with different lengths
    push(model, engine)
    sampling = SamplingParameters(
        max_new_tokens=7, seed=1, n=2, temperature=temperature, top_p=1.0 if temperature == 1 else 0.9
    )
    samples = engine.generate(PROMPTS, sampling)

    for index, sample in enumerate(samples):
        expected = reference_log_probs(model, PROMPTS[index // 2], sample.token_ids.tolist(), temperature)
        assert torch.allclose(torch.tensor(sample.log_probs), expected, atol=1e-5)
        if temperature == 0:
            assert sample.token_ids.tolist() == greedy_reference(model, PROMPTS[index // 2], 7)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_float32_are_not_rounded(tmp_path: Path, tied: bool) -> None:
    model = random_model(tied=tied).bfloat16()
    engine = engine_for(model, tmp_path, dtype=torch.bfloat16, fp32_lm_head=True)
    push(model, engine)
    hidden = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = hidden.double() @ model.lm_head.weight.double().T

    assert float((engine.model.lm_head(hidden).double() - exact).abs().max()) < 1e-5
    assert float((model.lm_head(hidden).double() - exact).abs().max()) > 1e-3  # what the option avoids
    assert len(engine.generate(PROMPTS, greedy(2))) == len(PROMPTS)


def test_samples_are_prompt_major_and_repeatable(engine: HFEngine) -> None:
    sampling = SamplingParameters(max_new_tokens=5, seed=7, n=3)
    samples = engine.generate(PROMPTS, sampling)
    assert len(samples) == 15
    assert str(samples) == str(engine.generate(PROMPTS, sampling))
    other = engine.generate(PROMPTS, SamplingParameters(max_new_tokens=5, seed=8, n=3))
    assert [sample.token_ids.tolist() for sample in samples] != [
        sample.token_ids.tolist() for sample in other
    ]
    for first in range(0, 15, 3):  # the samples of a prompt differ from each other
        assert len({tuple(sample.token_ids.tolist()) for sample in samples[first : first + 3]}) == 3
    greedy_samples = engine.generate(
        PROMPTS, SamplingParameters(max_new_tokens=5, seed=7, n=2, temperature=0)
    )
    singles = [engine.generate([prompt], greedy(5))[0].token_ids.tolist() for prompt in PROMPTS]
    assert [sample.token_ids.tolist() for sample in greedy_samples] == [
        ids for ids in singles for _ in range(2)
    ]


def test_a_caller_ends_samples_by_their_tokens(model: PreTrainedModel, tmp_path: Path) -> None:
    """No further tokens are computed for them."""
    free = [greedy_reference(model, prompt, 12) for prompt in PROMPTS]
    engine = engine_for(
        model,
        tmp_path,
        is_ended=lambda token_ids: token_ids in (free[0][:2], free[1][:4]) or len(token_ids) == 5,
    )
    push(model, engine)
    lengths: list[int] = []

    with patch.object(
        decoding,
        "sample_tokens",
        lambda logits, *rest: lengths.append(len(logits)) or sample_tokens(logits, *rest),
    ):
        samples = engine.generate(PROMPTS, greedy(12))

    assert [(sample.token_ids.tolist(), sample.finish_reason) for sample in samples] == [
        (ids[:length], "stop") for ids, length in zip(free, (2, 4, 5, 5, 5), strict=True)
    ]
    assert len(lengths) == 5


def test_the_models_own_end_token(tmp_path: Path) -> None:
    free = greedy_reference(random_model(), PROMPTS[2], 8)
    model = random_model(eos_token_id=free[3])
    engine = engine_for(model, tmp_path)
    push(model, engine)
    end = free.index(free[3])
    assert engine.generate([PROMPTS[2]], greedy(8))[0].token_ids.tolist() == free[: end + 1]
    ignoring = SamplingParameters(
        max_new_tokens=8, seed=0, temperature=0, ignore_eos=True, stop_token_ids=(free[1],)
    )
    assert engine.generate([PROMPTS[2]], ignoring)[0].token_ids.tolist() == free


def test_a_batch_that_has_ended_is_not_computed_further(engine: HFEngine) -> None:
    """Every token stops: there is exactly one forward pass over the model."""
    passes = []
    engine.model.register_forward_hook(lambda *_: passes.append(1))
    samples = engine.generate(
        PROMPTS, SamplingParameters(max_new_tokens=9, seed=0, stop_token_ids=tuple(range(VOCAB)))
    )
    assert passes == [1]
    assert all((len(sample.token_ids), sample.finish_reason) == (1, "stop") for sample in samples)


def test_a_sample_does_not_depend_on_what_is_written_beside_it(engine: HFEngine) -> None:
    """The same requests in one batch, in batches of two, one by one and in another order."""
    requests = plan_requests(
        PROMPTS, SamplingParameters(max_new_tokens=7, seed=3, n=2, stop_token_ids=tuple(range(20)))
    )
    together = dict(collected(engine, requests))
    engine.max_concurrency = 2
    in_pairs = dict(collected(engine, requests[::-1]))
    alone = {request.request_id: collected(engine, [request])[0][1] for request in requests}
    assert {len(sample.token_ids) for sample in together.values()} != {7}

    for other in (in_pairs, alone):
        for request_id, sample in together.items():
            assert other[request_id].token_ids.tolist() == sample.token_ids.tolist()
            assert other[request_id].log_probs == pytest.approx(sample.log_probs, abs=1e-5)


def collected(engine: HFEngine, requests: Sequence[GenerationRequest]) -> list[tuple[int, Sample]]:
    engine.submit(requests)
    return [finished for _ in requests for finished in engine.collect(0.0)]


def test_requests_of_different_kinds_are_decoded_apart(engine: HFEngine) -> None:
    kinds = [greedy(3), SamplingParameters(max_new_tokens=4, seed=1), greedy(3)]
    engine.submit(
        [GenerationRequest(number, PROMPTS[number], sampling) for number, sampling in enumerate(kinds)]
    )
    batches = [[number for number, _ in engine.collect(0.0)] for _ in range(3)]
    assert batches == [[2, 0], [1], []]  # the longest prompt first, with those that can be batched with it


def test_no_token_ends_a_sample_before_the_minimum(model: PreTrainedModel, engine: HFEngine) -> None:
    """Every token but two ends a sample: the first three are of these two, and their log-probs are over the
    whole vocabulary."""
    sampling = SamplingParameters(
        max_new_tokens=9, min_new_tokens=3, seed=0, n=4, stop_token_ids=tuple(range(2, VOCAB))
    )
    for index, sample in enumerate(engine.generate(PROMPTS, sampling)):
        assert len(sample.token_ids) > 3
        assert set(sample.token_ids.tolist()[:3]) <= {0, 1}
        expected = reference_log_probs(model, PROMPTS[index // 4], sample.token_ids.tolist(), 1.0)
        assert torch.allclose(torch.tensor(sample.log_probs), expected, atol=1e-5)


def test_weights_are_read_from_a_folder_with_several_files(
    model: PreTrainedModel, engine: HFEngine, tmp_path: Path
) -> None:
    other = random_model(seed=5)
    other.save_pretrained(tmp_path / "other", max_shard_size="20KB")
    assert len(list((tmp_path / "other").glob("*.safetensors"))) > 1
    engine.begin_weight_update(manifest_of(model))
    engine.load_folder(tmp_path / "other")
    engine.end_weight_update(2)

    for (name, parameter), (_, saved) in zip(
        engine.model.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, saved), name


def test_a_folder_without_whole_weights(model: PreTrainedModel, engine: HFEngine, tmp_path: Path) -> None:
    engine.begin_weight_update(manifest_of(model))
    with pytest.raises(WeightTransferError, match=r"no model\.safetensors and no model"):
        engine.load_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678{}")
    with pytest.raises(WeightTransferError, match=r"model\.safetensors: truncated or not a safetensors file"):
        engine.load_folder(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_an_update_replaces_every_weight(tmp_path: Path, tied: bool) -> None:
    old = random_model(tied=tied, seed=1)
    new = random_model(tied=tied, seed=2)
    engine = engine_for(old, tmp_path)
    push(old, engine, version=4)
    before = engine.generate(PROMPTS, greedy())
    assert [sample.token_ids.tolist() for sample in before] == [
        greedy_reference(old, prompt, 6) for prompt in PROMPTS
    ]
    push(new, engine, version=5)
    after = engine.generate(PROMPTS, greedy())
    assert [sample.token_ids.tolist() for sample in after] == [
        greedy_reference(new, prompt, 6) for prompt in PROMPTS
    ]
    assert [sample.token_ids.tolist() for sample in after] != [sample.token_ids.tolist() for sample in before]
    assert ({sample.weight_versions for sample in before}, {sample.weight_versions for sample in after}) == (
        {(4,)},
        {(5,)},
    )

    for (name, parameter), (_, sent) in zip(
        engine.model.named_parameters(), new.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, sent), name

    assert engine.checksums() == {
        name: checksum(parameter.data) for name, parameter in new.named_parameters()
    }


def test_float32_weights_into_a_bfloat16_engine(model: PreTrainedModel, tmp_path: Path) -> None:
    engine = engine_for(model, tmp_path, dtype=torch.bfloat16)
    push(model, engine)
    sample = engine.generate([PROMPTS[0]], greedy())[0]
    expected = reference_log_probs(
        random_model().to(torch.bfloat16), PROMPTS[0], sample.token_ids.tolist(), 0.0
    )
    assert torch.allclose(torch.tensor(sample.log_probs), expected.float(), atol=0.1)


def test_sleep_gives_memory_back_and_the_next_update_restores_it(
    model: PreTrainedModel, engine: HFEngine
) -> None:
    before = engine.generate(PROMPTS, greedy())
    engine.sleep()
    assert sum(parameter.numel() for parameter in engine.model.parameters()) == 0
    engine.wake()
    push(model, engine)
    assert str(engine.generate(PROMPTS, greedy())) == str(before)


def test_weights_that_are_not_the_models(model: PreTrainedModel, engine: HFEngine) -> None:
    wrong = dict(manifest_of(random_model(tied=True)))
    wrong["score.weight"] = wrong["model.norm.weight"]

    with pytest.raises(
        WeightTransferError,
        match=r"lm_head\.weight is missing; score\.weight is not a tensor of the engine's model",
    ):
        engine.begin_weight_update(wrong)

    assert engine.weight_version == 1  # still usable
    engine.begin_weight_update(manifest_of(model))

    with pytest.raises(
        WeightTransferError, match=r"'model\.norm\.weight': elements 0..34 lie outside shape \(32,\)"
    ):
        load_folder(engine, {"model.norm.weight": torch.zeros(34)})
