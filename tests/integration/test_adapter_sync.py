"""Test syncs of adapters alone, from Megatron ranks into real SGLang, and after an engine dies."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from megarl.config.schema import (
    Device,
    DType,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    RolloutEngineKind,
    SGLangConfig,
    SGLangMode,
    Transport,
)
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.models.adapters import is_adapter
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.sync.source import WeightSource
from tests.integration.weight_matrix import GREEDY, PROMPTS, ReloadingWorker, generate, greedy_by_transformers
from tests.rollout_replicas import sync_of
from tests.unit.engine.lora_cases import Adapted, save_adapted, save_merged
from tests.unit.engine.models import load_lm
from tests.unit.roles.groups import model_spec, started

TP2 = ParallelConfig(tensor_parallel_size=2)


def check(replica: RoleGroup, model: PreTrainedModel) -> None:
    """Check that a replica writes what transformers writes with merged weights, with the same log-probs."""
    samples = generate(replica, GREEDY)
    assert [sample.token_ids.tolist() for sample in samples] == greedy_by_transformers(model)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        tokens = torch.tensor(sample.token_ids.tolist())
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert float((expected - torch.tensor(sample.log_probs)).abs().max()) < 1e-5


def sizes(case: Adapted) -> tuple[int, int]:
    """Return the bytes of the frozen model, and those of its adapter with the modules that it saves."""
    adapter = load_file(f"{case.adapter}/adapter_model.safetensors")
    base = load_file(f"{case.base}/model.safetensors")
    frozen = (value for name, value in base.items() if f"base_model.model.{name}" not in adapter)
    return sum(each.nbytes for each in frozen), sum(each.nbytes for each in adapter.values())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_later_syncs_send_adapters_only(ray_cluster: None, tmp_path: Path, num_ranks: int) -> None:
    """A restarted engine gets the model again, and the other one in the same sync does not."""
    num_replicas = 3 - num_ranks
    case = save_adapted("qwen2", tmp_path, modules_to_save=("embed_tokens", "lm_head"))
    save_merged(case, tmp_path / "merged")
    model = load_lm(tmp_path / "merged")
    base_bytes, adapter_bytes = sizes(case)

    worker = RayClassWithInitArgs(
        ReloadingWorker,
        replace(
            model_spec(Path(case.base), TP2, optim=None),
            architecture=case.architecture(),
            lora_path=case.adapter,
            pushes_adapters=True,
        ),
    )
    rollout = RolloutConfig(
        engine=RolloutEngineKind.sglang,
        tensor_parallel_size=num_ranks,
        max_concurrency=8,
        sglang=SGLangConfig(mode=SGLangMode.engine),
    )
    spec = RolloutEngineSpec(
        model=ModelConfig(path=case.base, dtype=DType.float32),
        rollout=rollout,
        device=Device.cpu,
        lora=case.lora,
    )
    pool = RayResourcePool([num_replicas], use_gpu=False, name="adapted")
    replicas = Replicas(
        [ReplicaPlace(part) for part in pool.split()],
        partial(build_engine, spec),
        restart_limit=1,
        phase_time_limit_s=600,
    )

    try:
        with started("adapted-trainers", 2, {"actor": worker}) as groups:
            source = WeightSource(
                group=groups["actor"],
                architecture=case.architecture(),
                parallel=TP2,
                dtype=DType.float32,
                bucket_bytes=2_000,
            )
            assert any(map(is_adapter, source.manifest))
            sync = sync_of(
                source,
                Transport.group,
                tmp_path / "scratch",
                Path(case.base),
                num_replicas=num_replicas,
                num_ranks=num_ranks,
            )
            # Every checksum is compared in each sync.
            reports = []
            for version in (1, 2):
                report, lost = sync.push(replicas.all, version)
                assert lost == {}
                assert report is not None
                reports.append(report.nbytes)
                for replica in replicas.groups:
                    check(replica, model)
            if num_ranks == 1:
                assert reports == [num_replicas * (base_bytes + adapter_bytes), num_replicas * adapter_bytes]
            assert reports[1] < reports[0] / 2

            worker_pid, *schedulers = replicas.groups[0].call(RolloutWorker.process_ids)
            assert worker_pid == replicas.groups[0].pids[0]
            for pid in schedulers:
                os.kill(pid, signal.SIGKILL)
            report, lost = sync.push(replicas.all, 3)
            assert list(lost) == [0]
            assert (report is None) == (num_replicas == 1)
            replicas.replace(lost)

            report, lost = sync.push(replicas.all, 4)
            assert lost == {}
            assert report is not None
            for replica in replicas.groups:
                assert replica.call(RolloutWorker.weight_version) == 4
                check(replica, model)
            if num_ranks == 1:
                assert report.nbytes == base_bytes + num_replicas * adapter_bytes
            sync.close()
    finally:
        replicas.shutdown()
        pool.release()
