"""Test SGLang's models of each kind of layers on a GPU: log-probs of their samples against transformers.

Each engine gets the weights of two models, one after the other, and releases its memory in between. A tensor
that SGLang derives from weights and that a weight sync leaves stale would show in the log-probs of the second.

tests/soak/test_rehearsed_gpu_sglang.py runs what SGLang can on a CPU, so that the tests stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from megarl.config.schema import (
    Device,
    DType,
    EngineDType,
    ModelConfig,
    RolloutConfig,
    SGLangConfig,
    SGLangMode,
)
from megarl.models.families import read_architecture
from megarl.models.fp8 import quantized_tensors, scale_name
from megarl.rollout.interface import RolloutEngineSpec, SamplingParameters
from megarl.weights.checksum import checksum
from tests import plain_trainer
from tests.families import example_config, model_class, new_model
from tests.gpu.test_sglang import NEEDED, server_args
from tests.unit.rollout.models import weights_of
from tests.unit.weights.test_quantized_shards import dequantized_by_hand, quantized_by_hand

if TYPE_CHECKING:
    from megarl.rollout.sglang.engine import SGLangEngine

Record = Callable[[str, object], None]

PROMPTS = [[5, 6, 14, 8], [9], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
GREEDY = SamplingParameters(max_new_tokens=32, seed=0, temperature=0, ignore_eos=True)
# Gated delta nets, latent attention, sinks with windows, windows, experts.
FAMILIES = ("qwen3_next", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_moe")
GPU_ONLY = {"qwen3_next", "gpt_oss"}
# Heads of the sizes that kernels are made for. Every token goes to all experts, so that rounding selects no others.
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "sliding_window": 16,
    "num_experts_per_tok": 8,
    "topk_group": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "eos_token_id": 7,
}
# The mean difference of log-probs: bfloat16 on both sides by different kernels; float32 on a CPU.
TOLERANCE = {"cuda": 0.05, "cpu": 1e-4}
# The engine also rounds what its matrices are multiplied with; a CPU does not.
FP8_TOLERANCE = {"cuda": 0.15, "cpu": 1e-4}


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def random_model(family: str, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model whose norms are far from one, and whose log-probs differ by several nats."""
    model = new_model(example_config(family, **SIZES))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(noise * 0.3)
            elif name.endswith("A_log"):
                parameter.copy_(-noise.abs())
            elif name.endswith("conv1d.weight"):
                parameter.copy_(noise * 0.5)
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(noise * 0.08)
    model.config.architectures = [type(model).__name__]
    return model.to(dtype=dtype, device=device).eval()


@contextmanager
def started(
    model: PreTrainedModel,
    folder: Path,
    device: torch.device,
    num_ranks: int = 1,
    in_fp8: bool = False,
    **arguments: bool,
) -> Iterator[SGLangEngine]:
    """Start an engine without weights for a model, and end it."""
    if device.type == "cuda" and (missing := [name for name in NEEDED if find_spec(name) is None]):
        pytest.skip(f"SGLang on a GPU needs {', '.join(NEEDED)}: not installed are {', '.join(missing)}")
    from megarl.rollout.sglang.engine import SGLangEngine

    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    is_cuda = device.type == "cuda"
    given: dict[str, Any] = {**server_args(), **arguments} if is_cuda else {}
    rollout = RolloutConfig(
        tensor_parallel_size=num_ranks,
        max_concurrency=4,  # few graphs to capture
        health_limit_s=60.0,
        dtype=EngineDType.fp8 if in_fp8 else EngineDType.model,
        sglang=SGLangConfig(mode=SGLangMode.server, server_args=given),
    )
    policy = ModelConfig(path=str(folder), dtype=DType(str(model.dtype).removeprefix("torch.")))
    engine = SGLangEngine(
        RolloutEngineSpec(model=policy, rollout=rollout, device=Device(device.type), release_memory=is_cuda)
    )
    try:
        yield engine
    finally:
        engine.close()


def gap(model: PreTrainedModel, engine: SGLangEngine) -> float:
    """Return the mean difference of an engine's log-probs and the model's, over all sampled tokens."""
    found = []
    for prompt, sample in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        tokens = sample.token_ids.tolist()
        with torch.no_grad():
            row = torch.tensor([prompt + tokens], device=model.device)
            logits = model(row).logits[0, len(prompt) - 1 : -1].float().cpu()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found.append((expected - torch.tensor(sample.log_probs)).abs())
    return float(torch.cat(found).mean())


def check(
    family: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    record_property: Record,
    num_ranks: int = 1,
    **arguments: bool,
) -> None:
    """Push two models one after the other, and compare the log-probs of samples."""
    models = [random_model(family, seed, dtype, device) for seed in (1, 2)]
    with started(models[0], folder / "policy", device, num_ranks, **arguments) as engine:
        for version, model in enumerate(models, start=1):
            if device.type == "cuda" and version > 1:
                engine.sleep()
                engine.wake()
            weights = weights_of(model)
            plain_trainer.push(engine, weights, version)
            assert engine.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
            if device.type == "cuda":
                engine.wake_cache()
            difference = gap(model, engine)
            record_property(f"{family}, version {version}: gap of log-probs", f"{difference:.2e} nats")
            assert difference < TOLERANCE[device.type], version
        # The comparison would see the weights of the other model.
        assert gap(models[0], engine) > 10 * TOLERANCE[device.type]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_log_probs_of_transformers(
    family: str, device: torch.device, dtype: torch.dtype, tmp_path: Path, record_property: Record
) -> None:
    if device.type == "cpu" and family in GPU_ONLY:
        pytest.skip(f"SGLang runs {family} on GPUs only")
    check(family, tmp_path, device, dtype, record_property)


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused_norms", "plain_norms"])
def test_two_ranks_of_qwen3_next_have_the_log_probs(
    is_fused: bool,
    two_devices: tuple[torch.device, torch.device],
    dtype: torch.dtype,
    tmp_path: Path,
    record_property: Record,
) -> None:
    """With several ranks on Hopper, SGLang fuses the all-reduce with the norm, whose weight it derives."""
    arguments = {} if is_fused else {"enforce_disable_flashinfer_allreduce_fusion": True}
    check("qwen3_next", tmp_path, two_devices[0], dtype, record_property, num_ranks=2, **arguments)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_samples_in_fp8_have_the_log_probs_of_dequantized_weights(
    family: str, device: torch.device, dtype: torch.dtype, tmp_path: Path, record_property: Record
) -> None:
    model = random_model(family, 1, dtype, device)
    with started(model, tmp_path / "policy", device, in_fp8=True) as engine:
        quantized = quantized_tensors(read_architecture(str(tmp_path / "policy")))
        weights: dict[str, Tensor] = {}
        for name, tensor in weights_of(model).items():
            weights[name] = tensor
            if name in quantized:
                parts = quantized_by_hand(tensor.float().cpu())
                weights[name], weights[scale_name(name)] = (part.to(device) for part in parts)
        plain_trainer.push(engine, weights, version=1)
        if device.type == "cuda":
            engine.wake_cache()
        exact = {name: dequantized_by_hand(weights[name], weights[scale_name(name)]) for name in quantized}
        difference = gap(with_weights(model, exact, tmp_path / "dequantized"), engine)
    record_property(f"{family} in FP8: gap of log-probs", f"{difference:.2e} nats")
    assert difference < FP8_TOLERANCE[device.type]


def with_weights(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> PreTrainedModel:
    """Return the model with other weights, by their names in a folder."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    assert weights.keys() <= tensors.keys()
    save_file(
        tensors | {name: tensor.cpu() for name, tensor in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    kind = model_class(model.config)
    return kind.from_pretrained(folder, dtype=model.dtype).to(model.device).eval()
