"""Roles on real Ray: a policy at two temperatures, its reference and a critic, fused in the processes of one
layout; and a rollout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megarl.config.roles import role_named
from megarl.config.schema import (
    AlgorithmConfig,
    Device,
    DType,
    EngineConfig,
    KLConfig,
    KLWhere,
    MicroBatchConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RolloutConfig,
    Transport,
    ValueLossConfig,
    Verify,
)
from megarl.controller.group import RayWorkerGroup, RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, create_colocated_worker_cls
from megarl.engine.spec import ModelSpec
from megarl.models.families import read_architecture
from megarl.models.tensor_table import Head
from megarl.roles.megatron_role import MiniBatchPlan
from megarl.roles.megatron_worker import ActorWorker, CriticWorker, PolicyWorker
from megarl.roles.models import Actor, Critic, Scorer
from megarl.rollout.driver.rollout import TokenRules
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync
from tests.rollout_replicas import StartedRollout, started_rollout, sync_of
from tests.unit.engine.models import save_critic, save_model

FAMILY = "qwen2-tied"
COOL = 0.7  # temperature of the second actor
ONE_ROW = MicroBatchConfig(sequences=1)  # so that every uneven batch has padding micro-batches
BUCKET_BYTES = 20_000  # several buckets even for a tiny model
MAX_RESPONSE_LENGTH = 8
END_TOKEN_ID = 5

# With an epsilon this large, an update is nearly linear in the gradient: a wrongly scaled gradient gives a
# wrong weight.
OPTIM = OptimConfig(lr=0.05, eps=0.1)
ALGORITHM = AlgorithmConfig(kl=KLConfig(where=KLWhere.loss, coefficient=0.1), entropy_coefficient=0.01)


class Folders(NamedTuple):
    policy: Path
    critic: Path


class Models(NamedTuple):
    actor: Actor
    cool_actor: Actor  # samples and trains at temperature COOL, with one update per batch
    reference: Scorer
    critic: Critic
    syncs: list[WeightSync]  # of the actors; one at a time uses the engines


def save_folders(folder: Path) -> Folders:
    save_model(FAMILY, folder / "policy")
    save_critic(folder / "policy", folder / "critic")
    return Folders(folder / "policy", folder / "critic")


def model_spec(
    path: Path,
    parallel: ParallelConfig,
    head: Head = "lm",
    optim: OptimConfig | None = OPTIM,
    temperature: float = 1.0,
) -> ModelSpec:
    return ModelSpec(
        path=str(path),
        architecture=read_architecture(str(path)),
        head=head,
        dtype=DType.float32,
        parallel=parallel,
        engine=EngineConfig(log_prob_chunk_tokens=8),
        device=Device.cpu,
        seed=0,
        temperature=temperature,
        optim=optim,
    )


@contextmanager
def started(
    pool_name: str, world_size: int, workers: Mapping[str, RayClassWithInitArgs]
) -> Iterator[dict[str, RoleGroup]]:
    """Start the workers, fused in `world_size` processes that end with the block."""
    pool = RayResourcePool([world_size], use_gpu=False, name=pool_name)
    group = RayWorkerGroup(pool, create_colocated_worker_cls(workers), phase_time_limit_s=480)

    try:
        yield group.spawn()
    finally:
        group.shutdown()
        pool.release()


@contextmanager
def started_models(folders: Folders, parallel: ParallelConfig) -> Iterator[Models]:
    workers = {
        "actor": RayClassWithInitArgs(ActorWorker, model_spec(folders.policy, parallel)),
        "cool_actor": RayClassWithInitArgs(
            ActorWorker, model_spec(folders.policy, parallel, temperature=COOL)
        ),
        "reference": RayClassWithInitArgs(PolicyWorker, model_spec(folders.policy, parallel, optim=None)),
        "critic": RayClassWithInitArgs(CriticWorker, model_spec(folders.critic, parallel, head="value")),
    }
    updates = MiniBatchPlan(updates_per_step=1, epochs_per_batch=2, seed=0)
    one_update = MiniBatchPlan(updates_per_step=1, epochs_per_batch=1, seed=0)

    with started("models", parallel.world_size, workers) as groups:
        syncs = []

        def actor(name: str, updates: MiniBatchPlan) -> Actor:
            source = weight_source(groups[name], folders, parallel, BUCKET_BYTES)

            # there are two engines
            transport = Transport.device if parallel.world_size > 1 else Transport.group
            sync = sync_of(
                source, transport, folders.policy.parent, folders.policy, num_replicas=2, verify=Verify.first
            )
            syncs.append(sync)

            return Actor(groups[name], parallel, ONE_ROW, source, updates, algorithm=ALGORITHM)

        yield Models(
            actor=actor("actor", updates),
            cool_actor=actor("cool_actor", one_update),
            reference=Scorer(role_named("reference"), groups["reference"], parallel, ONE_ROW),
            critic=Critic(groups["critic"], parallel, ONE_ROW, updates, ValueLossConfig()),
            syncs=syncs,
        )


def weight_source(
    group: RoleGroup, folders: Folders, parallel: ParallelConfig, bucket_bytes: int
) -> WeightSource:
    return WeightSource(
        group=group,
        architecture=read_architecture(str(folders.policy)),
        parallel=parallel,
        dtype=DType.float32,
        bucket_bytes=bucket_bytes,
    )


@contextmanager
def started_policy_rollout(folders: Folders, num_replicas: int) -> Iterator[StartedRollout]:
    policy = ModelConfig(path=str(folders.policy), dtype=DType.float32)
    spec = RolloutEngineSpec(model=policy, rollout=RolloutConfig(max_concurrency=8), device=Device.cpu)
    rules = TokenRules(
        pad_token_id=0, stop_token_ids=(END_TOKEN_ID,), max_response_length=MAX_RESPONSE_LENGTH
    )

    with started_rollout(
        partial(build_engine, spec), num_replicas, rules=rules, max_concurrency=8
    ) as rollout:
        yield rollout
