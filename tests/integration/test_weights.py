"""Each family from each trainer layout by each carrier: fresh random weights go from real Megatron ranks into transformers and the real
SGLang, twice, which then write what Hugging Face writes with them. At last one of SGLang's processes is killed, and no sample is lost."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from megarl.config.architecture import read_architecture
from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, RolloutEngineKind, SGLangConfig, SGLangMode, Transport
from megarl.controller.dispatch import Dispatch
from megarl.controller.errors import WorkerError
from megarl.controller.group import RoleGroup
from megarl.controller.register import register
from megarl.controller.resource_pool import RayResourcePool
from megarl.controller.worker import RayClassWithInitArgs
from megarl.engine.spec import ModelSpec
from megarl.roles.replicas import ReplicaPlace, Replicas
from megarl.roles.rollout import RolloutLimits
from megarl.roles.weight_source import WeightSource
from megarl.roles.weight_sync import WeightSync
from megarl.rollout.interface import RolloutEngineSpec, Sample, SamplingParameters, plan_requests
from megarl.weights.checksum import checksum
from megarl.workers.engines import build_engine
from megarl.workers.megatron import MegatronWorker
from tests.rollout_replicas import RULES, StartedRollout, sync_of
from tests.unit.engine.models import FAMILIES, load_lm, save_model
from tests.unit.engine.rank_side import LAYOUTS
from tests.unit.roles.groups import model_spec, started

ALL = "MEGARL_SOAK" in os.environ  # as tests/soak asks for
TRANSPORTS = (Transport.device, Transport.group, Transport.folder)
BUCKET_BYTES = 20_000  # less than the embedding: it is split
TOLERANCE = 1e-3
PROMPTS = [[5, 6, 14, 7, 8], [9, 10], [120, 121, 122, 123, 124, 125, 198]]
GREEDY = SamplingParameters(max_new_tokens=12, seed=0, temperature=0, ignore_eos=True)
COOL = SamplingParameters(max_new_tokens=12, seed=1, temperature=0.6, ignore_eos=True)


class EngineCase(NamedTuple):
    """`num_ranks`: of each replica. mode None: transformers."""

    family: str
    num_ranks: int = 1
    mode: SGLangMode | None = None
    num_replicas: int = 1

    def __str__(self) -> str:
        return f"{self.family}-{self.mode.value if self.mode else 'hf'}{self.num_replicas}x{self.num_ranks}"


HF = [EngineCase(family) for family in ("qwen2-tied", "llama2", "qwen3-tied")]
SGLANG = [
    EngineCase("qwen2-tied", 1, SGLangMode.server),
    EngineCase("qwen2-tied", 2, SGLangMode.engine),
    EngineCase("llama2", 2, SGLangMode.engine),
    EngineCase("llama3-tied", 1, SGLangMode.engine),
    EngineCase("qwen3-tied", 2, SGLangMode.server),
    EngineCase("qwen3-tied", 1, SGLangMode.engine, num_replicas=2),
]
MORTAL = SGLANG[3]  # which is killed


def works(engine: EngineCase, layout: str, transport: Transport) -> bool:
    """`device` wants a trainer rank beside each engine rank; what is said otherwise: test_transport.py, test_carriers.py."""
    return transport is not Transport.device or engine.num_ranks * engine.num_replicas <= LAYOUTS[layout].world_size


# The whole product of transformers; SGLang of each family and size from each layout, by the carriers in turns. Its whole product is a soak
# test.
MATRIX = [
    (engine, layout, transport)
    for row, layout in enumerate(LAYOUTS)
    for column, engine in enumerate([*HF, *SGLANG])
    for number, transport in enumerate(TRANSPORTS)
    if works(engine, layout, transport) and (engine.mode is None or ALL or number == (row + column) % len(TRANSPORTS))
]


class ReloadingWorker(MegatronWorker):
    """Takes one model after another; the processes and their parallel groups stay."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, spec: ModelSpec) -> None:
        MegatronWorker.__init__(self, spec)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_model(family, folder / family)
    return {family: folder / family for family in FAMILIES}


@pytest.fixture(scope="module")
def engines(ray_cluster: None, folders: dict[str, Path]) -> Iterator[dict[EngineCase, Replicas]]:
    """All at the same time: they start while the trainers do."""
    pools, replicas = [], {}
    for engine in [*HF, *SGLANG]:
        pool = RayResourcePool([engine.num_replicas], use_gpu=False, name=str(engine))
        rollout = RolloutConfig(
            engine=RolloutEngineKind.sglang if engine.mode else RolloutEngineKind.hf,
            tensor_parallel_size=engine.num_ranks,
            max_concurrency=8,
            sglang=SGLangConfig(mode=engine.mode or SGLangMode.engine),
        )
        model = ModelConfig(path=str(folders[engine.family]), dtype=DType.float32)
        spec = RolloutEngineSpec(model=model, rollout=rollout, device=Device.cpu)
        places = [ReplicaPlace(part) for part in pool.split()]
        replicas[engine] = Replicas(places, partial(build_engine, spec), restart_limit=int(engine is MORTAL), phase_time_limit_s=600)
        pools.append(pool)
    yield replicas
    for of_engine in replicas.values():
        of_engine.shutdown()
    for pool in pools:
        pool.release()


class Trainers(NamedTuple):
    layout: str
    group: RoleGroup

    def load(self, folder: Path) -> None:
        self.group.load(model_spec(folder, LAYOUTS[self.layout], optim=None))

    def sync(self, engine: EngineCase, folder: Path, transport: Transport, scratch: Path) -> WeightSync:
        """Every push compares every checksum."""
        source = WeightSource(
            group=self.group,
            architecture=read_architecture(str(folder)),
            parallel=LAYOUTS[self.layout],
            dtype=DType.float32,
            bucket_bytes=BUCKET_BYTES,
        )
        return sync_of(source, transport, scratch, folder, num_replicas=engine.num_replicas, num_ranks=engine.num_ranks)


@pytest.fixture(scope="module")
def trainers(request: pytest.FixtureRequest, engines: dict[EngineCase, Replicas], folders: dict[str, Path]) -> Iterator[Trainers]:
    parallel = LAYOUTS[request.param]
    worker = RayClassWithInitArgs(ReloadingWorker, model_spec(folders["qwen2"], parallel, optim=None))
    with started("trainers", parallel.world_size, {"actor": worker}) as groups:
        yield Trainers(request.param, groups["actor"])


def generate(replica: RoleGroup, sampling: SamplingParameters) -> list[Sample]:
    requests = plan_requests(PROMPTS, sampling)
    samples: dict[int, Sample] = {}
    waiting = list(requests)
    while len(samples) < len(requests):
        samples |= dict(replica.submit_and_poll(waiting, 5.0).get())
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
            max_new_tokens=12,
            min_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
        )
        written.append(whole[0, len(prompt) :].tolist())
    return written


def log_prob_gap(model: PreTrainedModel, samples: list[Sample], temperature: float) -> float:
    """The largest difference from Hugging Face's log_softmax(logits / temperature) of the same tokens."""
    gaps = []
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        gaps.append(float((expected - torch.tensor(sample.log_probs)).abs().max()))
    return max(gaps)


_versions = itertools.count(1)


def test_the_matrix_has_every_pair() -> None:
    engines, layouts, transports = zip(*MATRIX, strict=True)
    for one, other in ((engines, layouts), (layouts, transports)):
        assert set(zip(one, other, strict=True)) == set(itertools.product(one, other))
    possible = {(engine, transport) for engine in [*HF, *SGLANG] for layout in LAYOUTS for transport in TRANSPORTS}
    assert set(zip(engines, transports, strict=True)) == possible
    assert set(transports) == {*Transport} - {Transport.auto}


@pytest.mark.parametrize(
    ("engine", "trainers", "transport"), MATRIX, indirect=["trainers"], ids=lambda value: str(getattr(value, "value", value))
)
def test_the_engine_writes_what_hugging_face_writes_with_the_pushed_weights(
    trainers: Trainers, engines: dict[EngineCase, Replicas], engine: EngineCase, transport: Transport, tmp_path: Path
) -> None:
    replicas = engines[engine]
    save_model(engine.family, tmp_path / "model", seed=0)
    sync = trainers.sync(engine, tmp_path / "model", transport, tmp_path / "scratch")
    for version in itertools.islice(_versions, 2):
        folder = tmp_path / f"model-{version}"
        save_model(engine.family, folder, seed=version)
        model = load_lm(folder)
        expected = greedy_by_transformers(model)
        for replica in replicas.groups:
            if replicas.weight_version is None:
                with pytest.raises(WorkerError, match="no complete weights"):
                    generate(replica, GREEDY)
            else:
                assert [sample.token_ids for sample in generate(replica, GREEDY)] != expected
        trainers.load(folder)
        report, lost = sync.push(replicas.all, version)
        assert lost == {}
        assert replicas.accept(replicas.all, version) == {}
        for replica in replicas.groups:
            greedy, cool = generate(replica, GREEDY), generate(replica, COOL)
            assert [sample.token_ids for sample in greedy] == expected
            assert log_prob_gap(model, greedy, 1.0) < TOLERANCE
            assert log_prob_gap(model, cool, COOL.temperature) < TOLERANCE
            assert {sample.weight_versions for sample in greedy + cool} == {(version,)}
    sync.close()


def test_a_killed_scheduler_costs_no_sample(engines: dict[EngineCase, Replicas], folders: dict[str, Path]) -> None:
    """In the middle of a batch: the batch is whole, the weights are right, the run goes on. It comes last: then the engine is another."""
    replicas, (version, later) = engines[MORTAL], itertools.islice(_versions, 2)
    rollout = StartedRollout(replicas, RULES, RolloutLimits(max_concurrency=8, answer_limit_s=60.0, sample_limit_s=60.0), seed=0)
    weights = {name: parameter.detach() for name, parameter in load_lm(folders[MORTAL.family]).named_parameters()}
    requests = plan_requests([[number + 1] for number in range(40)], SamplingParameters(max_new_tokens=10, seed=3))
    rollout.send(weights, version)
    expected = dict(rollout.stream(requests))
    worker, *schedulers = rollout.replicas[0].process_ids()
    assert worker == rollout.replicas[0].pids[0]
    found = {}
    for number, finished in enumerate(rollout.stream(requests)):
        assert finished.request_id not in found
        found[finished.request_id] = finished.sample
        if number == 10:
            os.kill(schedulers[0], signal.SIGKILL)
    metrics = rollout.drain_metrics()
    assert metrics["rollout/num_restarts"] == 1
    assert 1 <= metrics["rollout/num_resent"] <= 8
    assert {key: sample.token_ids for key, sample in found.items()} == {key: sample.token_ids for key, sample in expected.items()}
    assert rollout.replicas[0].checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    rollout.send(weights, later)
    assert {sample.weight_versions for _, sample in rollout.stream(requests[:3])} == {(later,)}
