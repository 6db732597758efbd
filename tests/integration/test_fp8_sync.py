"""Test syncs to engines with weights in block-scaled FP8: from Megatron ranks into real SGLang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.config.schema import (
    Device,
    DType,
    EngineDType,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutEngineKind,
    Transport,
)
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.models.families import read_architecture
from megarl.roles.rollout.replicas import ReplicaPlace, Replicas
from megarl.roles.weights.source import WeightSource
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.checksum import checksum
from megarl.weights.fp8 import BLOCK, quantized_tensors, scale_name
from megarl.workers.engines import build_engine
from megarl.workers.rollout_worker import RolloutWorker
from tests.families import example_config
from tests.integration.weight_matrix import (
    GREEDY,
    PROMPTS,
    ReloadingWorker,
    generate,
    greedy_by_transformers,
    log_prob_gap,
)
from tests.rollout_replicas import sync_of
from tests.unit.roles.groups import model_spec, started
from tests.unit.weights.test_quantized_shards import quantized_by_hand

TP2 = ParallelConfig(tensor_parallel_size=2)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def save_two(folder: Path) -> list[PreTrainedModel]:
    """Write two models, and return them with the weights that engines are to have."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = example_config("qwen3", **SIZES, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms far from one, and matrices whose rounding would change tokens.
                parameter.copy_(
                    parameter + torch.randn_like(parameter) * 0.2 if "norm" in name else parameter * 3
                )
        model.save_pretrained(folder / str(seed))
        models.append(model)
    return models


def quantize_by_hand(model: PreTrainedModel, folder: Path) -> dict[str, int]:
    """Replace a model's weights by dequantized ones. Returns the checksums of what engines must have."""
    quantized = quantized_tensors(read_architecture(str(folder)))
    sums = {}
    for name, parameter in model.state_dict().items():
        if name not in quantized:
            sums[name] = checksum(parameter)
            continue
        values, scales = quantized_by_hand(parameter)
        sums |= {name: checksum(values), scale_name(name): checksum(scales)}
        parameter.copy_(values.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1))
    assert len(sums) == len(model.state_dict()) + len(quantized)
    return sums


@pytest.mark.parametrize(("num_ranks", "transport"), [(1, Transport.group), (2, Transport.device)])
def test_engines_have_the_whole_tensors_blocks(
    ray_cluster: None, tmp_path: Path, num_ranks: int, transport: Transport
) -> None:
    models = save_two(tmp_path)
    folders = [tmp_path / "1", tmp_path / "2"]
    worker = RayClassWithInitArgs(
        ReloadingWorker, replace(model_spec(folders[0], TP2, optim=None), pushes_fp8=True)
    )
    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folders[0]), dtype=DType.float32),
        rollout=RolloutConfig(
            engine=RolloutEngineKind.sglang,
            dtype=EngineDType.fp8,
            tensor_parallel_size=num_ranks,
            max_concurrency=8,
        ),
        device=Device.cpu,
    )
    pool = RayResourcePool([1], use_gpu=False, name="fp8")
    replicas = Replicas(
        [ReplicaPlace(pool)], partial(build_engine, spec), restart_limit=0, phase_time_limit_s=600
    )

    try:
        with started("fp8-trainers", 2, {"actor": worker}) as groups:
            source = WeightSource(
                group=groups["actor"],
                architecture=read_architecture(str(folders[0])),
                parallel=TP2,
                dtype=DType.float32,
                bucket_bytes=100_003,  # messages end inside of blocks and of elements
                quantizes=True,
            )
            # Every checksum is compared in each sync.
            sync = sync_of(source, transport, tmp_path / "scratch", folders[0], num_ranks=num_ranks)
            for version, (model, folder) in enumerate(zip(models, folders, strict=True), 1):
                unquantized = log_probs(model)
                expected = quantize_by_hand(model, folder)
                groups["actor"].call(
                    ReloadingWorker.load, replace(model_spec(folder, TP2, optim=None), pushes_fp8=True)
                )
                report, lost = sync.push(replicas.all, version)
                assert lost == {}
                assert report is not None
                (replica,) = replicas.groups
                assert replica.call(RolloutWorker.checksums) == expected

                samples = generate(replica, GREEDY)
                assert [each.token_ids.tolist() for each in samples] == greedy_by_transformers(model)
                assert log_prob_gap(model, samples, 1.0) < 1e-4
                assert float((log_probs(model) - unquantized).abs().max()) > 1e-2  # it would be noticed

                # An engine that slept has lost everything, also the scales that SGLang computes itself.
                replicas.sleep()
                replica.call(RolloutWorker.wake)
                replica.call(RolloutWorker.wake_cache)
            sync.close()
    finally:
        replicas.shutdown()
        pool.release()


def log_probs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(PROMPTS[:1])).logits.log_softmax(-1)
