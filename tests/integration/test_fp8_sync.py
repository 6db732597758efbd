"""Test syncs to engines with weights in block-scaled FP8: from Megatron ranks into real SGLang."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
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
from megarl.engine.spec import ModelSpec
from megarl.models.families import read_architecture
from megarl.models.fp8 import quantized_tensors, scale_name
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.checksum import checksum
from megarl.weights.sync.source import WeightSource
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
from tests.unit.weights.test_quantized_shards import dequantized_by_hand, quantized_by_hand

TP2 = ParallelConfig(tensor_parallel_size=2)
EP2 = ParallelConfig(tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=2)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


class Case(NamedTuple):
    family: str
    sizes: dict[str, int]
    parallel: ParallelConfig
    num_ranks: int  # of an engine, over which experts are distributed
    transport: Transport


CASES = {
    "dense": Case("qwen3", SIZES, TP2, 1, Transport.group),
    "experts": Case("qwen3_moe", SIZES | {"moe_intermediate_size": 128}, EP2, 2, Transport.device),
    "latent attention": Case(
        "deepseek_v3",
        {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "q_lora_rank": 128},
        EP2,
        1,
        Transport.group,
    ),
}


def save_two(case: Case, folder: Path) -> list[Path]:
    """Write two models with random weights."""
    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = example_config(case.family, **case.sizes, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Norms far from one, and matrices whose rounding would change tokens.
                parameter.copy_(
                    parameter + torch.randn_like(parameter) * 0.2 if "norm" in name else parameter * 3
                )
        folders.append(folder / str(seed))
        model.save_pretrained(folders[-1])
    return folders


def dequantized_copy(folder: Path, copy: Path) -> dict[str, int]:
    """Write the model that engines are to compute with. Returns the checksums of their tensors."""
    quantized = quantized_tensors(read_architecture(str(folder)))
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    sums = {}
    for name, tensor in tensors.items():
        if name not in quantized:
            sums[name] = checksum(tensor)
            continue
        values, scales = quantized_by_hand(tensor)
        sums |= {name: checksum(values), scale_name(name): checksum(scales)}
        tensors[name] = dequantized_by_hand(values, scales)
    assert quantized.keys() <= tensors.keys()
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return sums


def with_another_matrix(folder: Path, copy: Path) -> Path:
    """Write the model with another matrix of keys and values."""
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.kv_b_proj.weight"].mul_(-1)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", CASES)
def test_engines_have_the_whole_tensors_blocks(ray_cluster: None, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    folders = save_two(case, tmp_path)

    def actor(folder: Path) -> ModelSpec:
        return replace(model_spec(folder, case.parallel, optim=None), pushes_fp8=True)

    spec = RolloutEngineSpec(
        model=ModelConfig(path=str(folders[0]), dtype=DType.float32),
        rollout=RolloutConfig(
            engine=RolloutEngineKind.sglang,
            dtype=EngineDType.fp8,
            tensor_parallel_size=case.num_ranks,
            expert_parallel_size=case.num_ranks if "moe" in case.family else 1,
            max_concurrency=8,
        ),
        device=Device.cpu,
    )
    pool = RayResourcePool([1], use_gpu=False, name="fp8")
    replicas = Replicas(
        [ReplicaPlace(pool)], partial(build_engine, spec), restart_limit=1, phase_time_limit_s=600
    )

    try:
        worker = RayClassWithInitArgs(ReloadingWorker, actor(folders[0]))
        with started("fp8-trainers", 2, {"actor": worker}) as groups:
            source = WeightSource(
                group=groups["actor"],
                architecture=read_architecture(str(folders[0])),
                parallel=case.parallel,
                dtype=DType.float32,
                bucket_bytes=100_003,  # messages end inside of blocks and of elements
                quantizes=True,
            )
            # Every checksum is compared in each sync.
            sync = sync_of(
                source,
                case.transport,
                tmp_path / "scratch",
                folders[0],
                num_ranks=case.num_ranks,
                sends_changes=name == "latent attention",
            )
            for version, folder in enumerate(folders, 1):
                expected = dequantized_copy(folder, tmp_path / f"dequantized-{version}")
                groups["actor"].call(ReloadingWorker.load, actor(folder))
                report, lost = sync.push(replicas.all, version)
                assert lost == {}
                assert report is not None
                (replica,) = replicas.groups
                assert replica.call(RolloutWorker.checksums) == expected

                model = load(tmp_path / f"dequantized-{version}")
                samples = generate(replica, GREEDY)
                assert [each.token_ids.tolist() for each in samples] == greedy_by_transformers(model)
                assert log_prob_gap(model, samples, 1.0) < 1e-4
                # A difference from the weights before they were quantized would be noticed.
                assert float((log_probs(model) - log_probs(load(folder))).abs().max()) > 1e-2

                # An engine that slept has lost everything, also the scales that SGLang computes itself.
                replicas.sleep()
                replica.call(RolloutWorker.wake)
                replica.call(RolloutWorker.wake_cache)

            if name == "dense":
                # Its trainers have begun to send when they notice that it is gone.
                _, *schedulers = replica.call(RolloutWorker.process_ids)
                for pid in schedulers:
                    os.kill(pid, signal.SIGKILL)
                _, lost = sync.push(replicas.all, 3)
                assert list(lost) == [0]
                replicas.replace(lost)
                _, lost = sync.push(replicas.all, 4)
                assert lost == {}
                assert replicas.groups[0].call(RolloutWorker.checksums) == expected

            if name == "latent attention":
                # Everything is sent after the sleep, and then one matrix, whose products SGLang computes again.
                assert sync.push(replicas.all, 3)[0].sent_share > 0.9
                changed = with_another_matrix(folders[1], tmp_path / "changed")
                expected = dequantized_copy(changed, tmp_path / "dequantized-4")
                groups["actor"].call(ReloadingWorker.load, actor(changed))
                report, _ = sync.push(replicas.all, 4)
                assert report.sent_share < 0.1
                assert replica.call(RolloutWorker.checksums) == expected
                samples = generate(replica, GREEDY)
                assert log_prob_gap(load(tmp_path / "dequantized-4"), samples, 1.0) < 1e-4
            sync.close()
    finally:
        replicas.shutdown()
        pool.release()


def log_probs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(PROMPTS[:1])).logits.log_softmax(-1)
