"""Weight-sync matrix of test_weights_hf.py and test_weights_sglang.py: each family from each trainer layout
by each transport."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from megarl.agents.trajectory import Sample
from megarl.config.schema import (
    Device,
    DType,
    ModelConfig,
    RolloutConfig,
    RolloutEngineKind,
    SGLangConfig,
    SGLangMode,
    Transport,
)
from megarl.controller.dispatch import Dispatch
from megarl.controller.errors import WorkerError
from megarl.controller.group import RoleGroup
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs, register
from megarl.engine.spec import ModelSpec
from megarl.models.families import read_architecture
from megarl.roles.megatron_worker import MegatronWorker
from megarl.rollout.driver.replicas import ReplicaPlace, Replicas
from megarl.rollout.engines import build_engine
from megarl.rollout.interface import RolloutEngineSpec, SamplingParameters, plan_requests
from megarl.rollout.worker.rollout_worker import RolloutWorker
from megarl.weights.sync.source import WeightSource
from megarl.weights.sync.sync import WeightSync
from tests.rollout_replicas import sync_of
from tests.unit.engine.models import load_lm, save_model
from tests.unit.engine.rank_side import ALL_LAYOUTS
from tests.unit.roles.groups import model_spec, started

ALL = "MEGARL_SOAK" in os.environ  # set by tests/soak
TRANSPORTS = (Transport.device, Transport.group, Transport.folder)
BUCKET_BYTES = 20_000  # smaller than the embedding, which is split
TOLERANCE = 1e-3
PROMPTS = [[5, 6, 14, 7, 8], [9, 10], [120, 121, 122, 123, 124, 125, 198]]
GREEDY = SamplingParameters(max_new_tokens=5, seed=0, temperature=0, ignore_eos=True)
COOL = SamplingParameters(max_new_tokens=5, seed=1, temperature=0.6, ignore_eos=True)


class EngineCase(NamedTuple):
    """An engine of the matrix.

    Attributes:
        num_ranks: Ranks of each replica.
        num_stages: Pipeline stages of each replica.
        num_nodes: Nodes of each replica, with a process on each. Here they are all this machine.
        mode: None for transformers.
    """

    family: str
    num_ranks: int = 1
    mode: SGLangMode | None = None
    num_replicas: int = 1
    num_nodes: int = 1
    num_stages: int = 1

    def __str__(self) -> str:
        stages = f"-pp{self.num_stages}" if self.num_stages > 1 else ""
        nodes = f"-on{self.num_nodes}" if self.num_nodes > 1 else ""
        mode = self.mode.value if self.mode else "hf"
        return f"{self.family}-{mode}{self.num_replicas}x{self.num_ranks}{stages}{nodes}"


HF = [EngineCase(family) for family in ("qwen2-tied", "llama2", "qwen3-tied")]
SGLANG = [
    EngineCase("qwen2-tied", 1, SGLangMode.server),
    EngineCase("qwen2-tied", 2, SGLangMode.engine, num_nodes=2, num_stages=2),
    EngineCase("llama2", 2, SGLangMode.engine, num_nodes=2),
    EngineCase("llama-tied", 1, SGLangMode.engine),
    EngineCase("qwen3-tied", 2, SGLangMode.server),
    EngineCase("qwen3-tied", 1, SGLangMode.engine, num_replicas=2),
]
# Ranks with copies of the weights are those that split rows: a weight sync does not distinguish them from
# replicas.
LAYOUTS = {name: ALL_LAYOUTS[name] for name in ("TP1", "TP2", "PP2", "TP2xPP2", "PP2xVPP2", "CP2", "TP2+SP")}
MORTAL = SGLANG[3]  # the one that is killed
OVER_NODES = SGLANG[1]


def works(engine: EngineCase, layout: str, transport: Transport) -> bool:
    """Return whether the combination is supported: `device` needs a trainer rank on each engine rank's
    device. test_transport.py and test_transports.py test the errors for the others."""
    return (
        transport is not Transport.device
        or engine.num_ranks * engine.num_replicas <= LAYOUTS[layout].world_size
    )


# Layouts are the outer loop for transformers, engines for SGLang, whose idle processes poll all the time.
# transformers runs the whole product; SGLang runs each family and size from every other layout, with
# alternating transports. Its whole product is a soak test.
def _is_tried(row: int, column: int, number: int) -> bool:
    return ALL or ((row + column) % 2 == 0 and number == (row + column) // 2 % len(TRANSPORTS))


MATRIX = [
    (engine, layout, transport)
    for column, engine in enumerate([*HF, *SGLANG])
    for row, layout in enumerate(LAYOUTS)
    for number, transport in enumerate(TRANSPORTS)
    if works(engine, layout, transport) and (engine.mode is None or _is_tried(row, column, number))
]


class ReloadingWorker(MegatronWorker):
    """Worker that loads one model after another; the processes and their parallel groups stay."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, spec: ModelSpec) -> None:
        MegatronWorker.__init__(self, spec)


class Trained(NamedTuple):
    """A model with random weights, and what transformers generates with it."""

    folder: Path
    model: PreTrainedModel
    greedy: list[list[int]]


def two_of_each_family(folder: Path) -> dict[str, list[Trained]]:
    """Return the models, which are synced one after the other."""
    made: dict[str, list[Trained]] = {}
    for family in dict.fromkeys(engine.family for engine in [*HF, *SGLANG]):
        for seed in (1, 2):
            path = folder / f"{family}-{seed}"
            save_model(family, path, seed=seed)
            model = load_lm(path)
            made.setdefault(family, []).append(Trained(path, model, greedy_by_transformers(model)))

    return made


@contextmanager
def started_engine(
    engine: EngineCase, models: dict[str, list[Trained]], restart_limit: int = 0
) -> Iterator[Replicas]:
    pool = RayResourcePool([engine.num_replicas * engine.num_nodes], use_gpu=False, name=str(engine))
    rollout = RolloutConfig(
        engine=RolloutEngineKind.sglang if engine.mode else RolloutEngineKind.hf,
        tensor_parallel_size=engine.num_ranks // engine.num_stages,
        pipeline_parallel_size=engine.num_stages,
        max_concurrency=8,
        sglang=SGLangConfig(mode=engine.mode or SGLangMode.engine),
    )
    model = ModelConfig(path=str(models[engine.family][0].folder), dtype=DType.float32)
    spec = RolloutEngineSpec(model=model, rollout=rollout, device=Device.cpu)
    processes = range(pool.world_size)
    places = [ReplicaPlace(pool.part(own)) for own in itertools.batched(processes, engine.num_nodes)]
    replicas = Replicas(
        places, partial(build_engine, spec), restart_limit=restart_limit, phase_time_limit_s=600
    )

    try:
        yield replicas
    finally:
        replicas.shutdown()
        pool.release()


class Trainers(NamedTuple):
    layout: str
    group: RoleGroup

    def load(self, folder: Path) -> None:
        self.group.call(ReloadingWorker.load, model_spec(folder, LAYOUTS[self.layout], optim=None))

    def sync(self, engine: EngineCase, folder: Path, transport: Transport, scratch: Path) -> WeightSync:
        """Build a weight sync that compares every checksum."""
        source = WeightSource(
            group=self.group,
            architecture=read_architecture(str(folder)),
            parallel=LAYOUTS[self.layout],
            dtype=DType.float32,
            bucket_bytes=BUCKET_BYTES,
        )
        return sync_of(
            source, transport, scratch, folder, num_replicas=engine.num_replicas, num_ranks=engine.num_ranks
        )


@contextmanager
def started_trainers(layout: str, models: dict[str, list[Trained]]) -> Iterator[Trainers]:
    parallel = LAYOUTS[layout]
    worker = RayClassWithInitArgs(
        ReloadingWorker, model_spec(models["llama2"][0].folder, parallel, optim=None)
    )
    with started(f"trainers-{layout}", parallel.world_size, {"actor": worker}) as groups:
        yield Trainers(layout, groups["actor"])


def generate(replica: RoleGroup, sampling: SamplingParameters) -> list[Sample]:
    requests = plan_requests(PROMPTS, sampling)
    samples: dict[int, Sample] = {}
    waiting = list(requests)

    while len(samples) < len(requests):
        samples |= dict(replica.call(RolloutWorker.submit_and_poll, waiting, 5.0).get())
        waiting = []

    return [samples[request.request_id] for request in requests]


def greedy_by_transformers(model: PreTrainedModel) -> list[list[int]]:
    written = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=GREEDY.max_new_tokens,
            min_new_tokens=GREEDY.max_new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        written.append(whole[0, len(prompt) :].tolist())

    return written


def log_prob_gap(model: PreTrainedModel, samples: list[Sample], temperature: float) -> float:
    """Return the largest difference from Hugging Face's log_softmax(logits / temperature) of the same
    tokens."""
    gaps = []
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.token_ids.tolist()])).logits[0, len(prompt) - 1 : -1]
        expected = (
            (logits / temperature)
            .log_softmax(-1)
            .gather(1, torch.tensor(sample.token_ids.tolist())[:, None])[:, 0]
        )
        gaps.append(float((expected - torch.tensor(sample.log_probs)).abs().max()))

    return max(gaps)


versions = itertools.count(1)


def push_twice(
    trainers: Trainers,
    replicas: Replicas,
    trained_models: list[Trained],
    engine: EngineCase,
    transport: Transport,
    scratch: Path,
) -> None:
    """Sync twice. The engine must then write what transformers writes with these weights."""
    sync = trainers.sync(engine, trained_models[0].folder, transport, scratch)
    for trained, version in zip(trained_models, versions, strict=False):
        for replica in replicas.groups:
            if replicas.weight_version is None:
                with pytest.raises(WorkerError, match="no complete weights"):
                    generate(replica, GREEDY)
            else:
                assert [sample.token_ids.tolist() for sample in generate(replica, GREEDY)] != trained.greedy
        trainers.load(trained.folder)
        report, lost = sync.push(replicas.all, version)
        assert lost == {}
        assert replicas.accept(replicas.all, version) == {}
        for replica in replicas.groups:
            greedy = generate(replica, GREEDY)
            cool = generate(replica, COOL)
            assert [sample.token_ids.tolist() for sample in greedy] == trained.greedy
            assert log_prob_gap(trained.model, greedy, 1.0) < TOLERANCE
            assert log_prob_gap(trained.model, cool, COOL.temperature) < TOLERANCE
            assert {sample.weight_versions for sample in greedy + cool} == {(version,)}

    sync.close()
