"""Test SGLang on one GPU: weights by CUDA IPC from this process, memory released and reallocated by its tags,
log-probs against transformers.

The test needs SGLang's own packages: it uses CUDA graphs, flash attention and torch_memory_saver.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from megarl.agents.trajectory import Sample
from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, SGLangConfig, SGLangMode
from megarl.rollout.interface import EngineStateError, RolloutEngineSpec, SamplingParameters
from megarl.weights.checksum import checksum
from tests.unit.rollout.models import push

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine import SGLangEngine

PROMPTS = [[5, 6, 14, 8], [9], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
NEEDED = ("sglang", "sgl_kernel", "torch_memory_saver")
TOLERANCE = 0.05  # bfloat16 on both sides, by different kernels


def cuda_model(seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=7,
        architectures=["Qwen2ForCausalLM"],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()


def server_args() -> dict[str, float | str]:
    """Return the server arguments. The flash-attention library in sgl_kernel takes a GB and may be left out
    where uploads are limited; attention is then Triton's and sampling PyTorch's."""
    arguments: dict[str, float | str] = {"mem_fraction_static": 0.3}
    (folder,) = find_spec("sgl_kernel").submodule_search_locations  # type: ignore[union-attr, misc]
    if not list(Path(folder).glob("flash_ops*")):
        arguments |= {"attention_backend": "triton", "sampling_backend": "pytorch"}

    return arguments


@pytest.fixture(scope="module")
def engine(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    yield from started_engine(tmp_path_factory.mktemp("model"), {})


def started_engine(folder: Path, speculation: dict[str, int | str]) -> Iterator[SGLangEngine]:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"SGLang on a GPU needs {', '.join(NEEDED)}: not installed are {', '.join(missing)}")
    from megarl.rollout.sglang.engine import SGLangEngine

    model = cuda_model(0)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    sglang = SGLangConfig(mode=SGLangMode.server, server_args=server_args() | speculation)
    rollout = RolloutConfig(max_concurrency=16, sglang=sglang)
    policy = ModelConfig(path=str(folder), dtype=DType.bfloat16)
    engine = SGLangEngine(
        RolloutEngineSpec(model=policy, rollout=rollout, device=Device.cuda, release_memory=True)
    )
    engine.wake_cache()  # it starts without the cache
    yield engine
    engine.close()


def mean_gap(model: PreTrainedModel, samples: list[Sample], temperature: float) -> float:
    gaps = []
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + sample.token_ids.tolist()], device="cuda"))
                .logits[0, len(prompt) - 1 : -1]
                .float()
                .cpu()
            )
        expected = (
            (logits / temperature)
            .log_softmax(-1)
            .gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
        )
        gaps.append((expected - torch.tensor(sample.log_probs)).abs())

    return float(torch.cat(gaps).mean())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_weights_by_cuda_ipc_give_the_models_log_probs(engine: SGLangEngine, temperature: float) -> None:
    model = cuda_model(seed=int(temperature * 10))
    push(model, engine, version=int(temperature * 10))
    assert engine.checksums() == {
        name: checksum(parameter.detach()) for name, parameter in model.named_parameters()
    }
    samples = engine.generate(
        PROMPTS, SamplingParameters(max_new_tokens=32, seed=0, temperature=temperature, ignore_eos=True)
    )
    assert mean_gap(model, samples, temperature) < TOLERANCE


def test_memory_is_given_back_and_taken_again_the_weights_first(
    engine: SGLangEngine, record_property: Callable[[str, object], None]
) -> None:
    model = cuda_model(seed=3)
    push(model, engine, version=3)
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    awake = free_bytes()
    engine.sleep()
    asleep = free_bytes()
    assert asleep - awake > 2**30  # the cache alone is a third of the device
    engine.wake()
    with_weights = free_bytes()
    assert weight_bytes / 2 < asleep - with_weights < weight_bytes + 512 * 2**20  # neither cache nor graphs
    push(model, engine, version=4)
    assert engine.checksums() == {
        name: checksum(parameter.detach()) for name, parameter in model.named_parameters()
    }
    with pytest.raises(EngineStateError, match="wake_cache first"):
        engine.generate(PROMPTS, SamplingParameters(max_new_tokens=8, seed=0))
    engine.wake_cache()
    assert abs(free_bytes() - awake) < 512 * 2**20
    samples = engine.generate(PROMPTS, SamplingParameters(max_new_tokens=8, seed=0, ignore_eos=True))
    assert {sample.weight_versions for sample in samples} == {(4,)}
    assert mean_gap(model, samples, 1.0) < TOLERANCE
    given = f"{(asleep - awake) / 1e9:.1f} GB, of which {(asleep - with_weights) / 1e9:.2f} for weights"
    record_property("given back", given)


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
def test_samples_with_drafts_are_the_policys_also_after_sleep(
    device: torch.device, tmp_path: Path, algorithm: str, record_property: Callable[[str, object], None]
) -> None:
    """The draft model has the weights of the second policy, so it is right about most of that one's tokens."""
    policies = [cuda_model(seed) for seed in (5, 6)]
    speculation: dict[str, int | str] = {"speculative_algorithm": algorithm}
    if algorithm == "STANDALONE":
        policies[1].save_pretrained(tmp_path / "draft")
        speculation |= {
            "speculative_draft_model_path": str(tmp_path / "draft"),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        }

    folder = tmp_path / "policy"
    folder.mkdir()
    accepted = []
    with contextlib.contextmanager(started_engine)(folder, speculation) as engine:
        for version, model in enumerate((*policies, policies[1]), start=1):
            if version == 3:
                engine.sleep()
                engine.wake()
            push(model, engine, version)
            engine.wake_cache()
            # For a draft model they include that it is as it was loaded.
            assert engine.checksums() == {
                name: checksum(parameter.detach()) for name, parameter in model.named_parameters()
            }
            for temperature in (0.0, 1.0):
                sampling = SamplingParameters(
                    max_new_tokens=32, seed=0, temperature=temperature, ignore_eos=True
                )
                samples = engine.generate(PROMPTS, sampling)
                assert mean_gap(model, samples, temperature or 1.0) < TOLERANCE
                length = 32 * len(samples) / sum(sample.num_verifications for sample in samples)
                record_property(f"version {version}, temperature {temperature:g}", f"{length:.2f} tokens")
                if temperature == 0:
                    accepted.append(length)

    if algorithm == "STANDALONE":
        wrong, right, after_sleep = accepted
        assert right > 1.2 * wrong
        assert after_sleep == pytest.approx(right, rel=0.1)


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
