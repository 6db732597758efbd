"""Transfers among real ranks without a driver: some are trainers, the others engine ranks, in any layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megarl.config.schema import ParallelConfig, Transport
from megarl.models.architecture import Architecture
from megarl.weights.manifest import manifest_of
from megarl.weights.p2p import BACKENDS, P2PAddress, P2PGroup, reserve_port
from megarl.weights.plan import RankLocation, TensorSlices, TransferPlan, plan_transfer
from megarl.weights.shard_layout import layouts_of
from megarl.weights.shards import Shards, held_slices
from megarl.weights.tensors import Part, TensorSlice
from megarl.weights.transfer import SendReport
from megarl.weights.transports.interface import EngineLink, Routes, SendingRank, WeightReceiver, sides_of
from tests.nccl_semantics import NcclSemantics
from tests.ranks import gather
from tests.unit.weights.models import PADDED_VOCAB, random_state, shards_of

CPU = torch.device("cpu")


class Cut(NamedTuple):
    """How the trainers, or one engine, shard a model."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    def layouts(self, architecture: Architecture, padded_vocab: int = PADDED_VOCAB) -> list:
        """Return the layouts in megarl's rank order."""
        parallel = ParallelConfig(
            tensor_parallel_size=self.tensor,
            pipeline_parallel_size=self.pipeline,
            virtual_pipeline_parallel_size=self.virtual,
            data_parallel_size=self.data,
            expert_parallel_size=self.expert,
            expert_tensor_parallel_size=self.expert_tensor,
        )
        return [
            replace(layout, padded_vocab_size=padded_vocab) for layout in layouts_of(architecture, parallel)
        ]


class Case(NamedTuple):
    """A test case.

    Attributes:
        engines: The layout of each engine.
        transport: group, delta or device. With device, the engines are on the trainers' devices, in order.
        changed_share: The share of the elements that change from one seed to the next. None: each seed is
            another model.
    """

    architecture: Architecture
    family: str
    tied: bool
    trainer: Cut
    engines: tuple[Cut, ...]
    transport: str
    message_numel: int
    backend: str = "gloo"
    padded_vocab: int = PADDED_VOCAB
    changed_share: float | None = None

    def state(self, seed: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a model."""
        num_layers = self.architecture.num_hidden_layers
        first = seed if self.changed_share is None else 1
        state = dict(random_state(self.family, tied=self.tied, seed=first, num_layers=num_layers))

        # Each later version changes the sign of some elements.
        for version in range(first + 1, seed + 1):
            generator = torch.Generator().manual_seed(version)
            for name, tensor in state.items():
                is_changed = torch.rand(tensor.shape, generator=generator) < self.changed_share
                state[name] = torch.where(is_changed, -tensor, tensor)
        return state

    @property
    def engine_ranks(self) -> list[list[int]]:
        """Return the engine ranks, numbered as the plan's targets."""
        ends = 0
        ranks = []

        for engine in self.engines:
            ranks.append(list(range(ends, ends + engine.num_ranks)))
            ends += engine.num_ranks

        return ranks

    @property
    def num_ranks(self) -> int:
        return self.trainer.num_ranks + sum(engine.num_ranks for engine in self.engines)

    def device(self, target: int) -> str:
        return f"device-{target}" if self.transport == "device" else f"engine-device-{target}"

    def plan(self) -> TransferPlan:
        shapes = {name: meta.shape for name, meta in manifest_of(self.architecture, torch.float32).items()}
        sources = [
            (RankLocation("node", f"device-{rank}"), held_slices(self.architecture, layout))
            for rank, layout in enumerate(self.trainer.layouts(self.architecture, self.padded_vocab))
        ]
        targets = [
            (RankLocation("node", self.device(target)), self.needed(target))
            for target in range(sum(map(len, self.engine_ranks)))
        ]

        return plan_transfer(shapes, sources, targets, self.message_numel)

    def link(self, replica: int, limit_s: float = 30.0) -> EngineLink:
        """Return what all links of an engine share."""
        transport = Transport.device if self.transport == "device" else Transport.group
        return EngineLink(
            transport, f"replica-{replica}", torch.float32, limit_s, sends_changes=self.transport == "delta"
        )

    def routes(self, plan: TransferPlan, replica: int, limit_s: float = 30.0) -> Routes:
        devices = [f"device-{trainer}" for trainer in range(self.trainer.num_ranks)]
        targets = {target: self.device(target) for target in self.engine_ranks[replica]}
        link = self.link(replica, limit_s)
        return sides_of(link.transport).route(plan, devices, targets, link)

    def needed(self, target: int) -> dict[str, tuple[TensorSlice, ...]]:
        layouts = [
            layout
            for engine in self.engines
            for layout in engine.layouts(self.architecture, self.padded_vocab)
        ]
        return held_slices(self.architecture, layouts[target])


def _semantics(
    store: dist.Store, rank: int, size: int, limit: timedelta, host: str, port: int
) -> NcclSemantics:
    return NcclSemantics(store, rank, size, limit)


BACKENDS["nccl_semantics"] = _semantics


def numel_of(slices: TensorSlices) -> int:
    return sum(tensor_slice.volume for listed in slices.values() for tensor_slice in listed)


class TrainerRank:
    """A trainer rank. `p2p` is the trainers' group, None if they need none."""

    def __init__(self, case: Case, plan: TransferPlan, rank: int, p2p: P2PGroup | None) -> None:
        self.case = case
        self.rank = rank
        self.layout = case.trainer.layouts(case.architecture, case.padded_vocab)[rank]
        self.p2p = p2p
        link = case.link(0)
        own = SendingRank(rank, "127.0.0.1", case.backend, CPU, lambda: p2p)  # type: ignore[arg-type]
        self.end = sides_of(link.transport).sender(link, own)
        self.plan = plan

    def shards(self, seed: int) -> Shards:
        parameters = shards_of(self.case.state(seed), self.case.architecture, self.layout)

        return Shards(
            parameters={name: value.contiguous() for name, value in parameters.items()},
            architecture=self.case.architecture,
            layout=self.layout,
        )

    def send(self, seed: int, replicas: Sequence[int]) -> SendReport:
        sending = self.end.open(self.shards(seed), replicas)
        while not sending.run():
            pass
        return sending.report()

    def close(self) -> None:
        self.end.close()
        if self.p2p is not None:
            self.p2p.close()


class EngineRank:
    def __init__(self, case: Case, target: int) -> None:
        self.needed = case.needed(target)
        self.tensors = {
            name: [torch.full(tensor_slice.shape, torch.nan) for tensor_slice in slices]
            for name, slices in self.needed.items()
        }

        self.receiver = WeightReceiver(CPU)
        self.has_moved = False

    def link(self, link: EngineLink) -> None:
        found = EngineLink.decode(json.loads(json.dumps(link.encode())))
        self.receiver.join(found, self.needed, lambda part: self.places(part))

    def places(self, part: Part) -> Iterator[torch.Tensor]:
        for tensor_slice, tensor in zip(self.needed[part.name], self.tensors[part.name], strict=True):
            if part.tensor_slice.intersect(tensor_slice) == part.tensor_slice:
                yield tensor[part.tensor_slice.relative_to(tensor_slice.starts).index]

    def receive(self, folder: Path | None = None) -> int:
        before = self.receiver.received_bytes
        self.receiver.begin(self.has_moved, folder=None if folder is None else str(folder))
        while not self.receiver.receive():
            pass
        return self.receiver.received_bytes - before

    def close(self) -> None:
        self.receiver.leave()

    def differing(self, case: Case, seed: int) -> list[str]:
        state = case.state(seed)
        return [
            name
            for name, slices in self.needed.items()
            for tensor_slice, tensor in zip(slices, self.tensors[name], strict=True)
            if not torch.equal(state[name][tensor_slice.index], tensor)
        ]


def trainers_group(case: Case) -> P2PGroup | None:
    """Create the group of the ranks that are trainers. Called by every rank."""
    rank = dist.get_rank()
    listener = reserve_port("127.0.0.1") if rank == 0 else None
    port = gather(listener and listener.getsockname()[1])[0]
    if rank >= case.trainer.num_ranks or case.transport != "device":
        return None

    return P2PGroup.join(
        P2PAddress("trainers", "127.0.0.1", port, case.trainer.num_ranks, case.backend, 60.0),
        rank,
        CPU,
        listener,
    )


def join(case: Case, plan: TransferPlan, own: TrainerRank | EngineRank, replica: int) -> None:
    """Connect one engine, as the driver does. Called by every rank."""
    rank = dist.get_rank()
    routes = case.routes(plan, replica)
    address = None
    if isinstance(own, TrainerRank) and rank in routes.listeners:
        address = own.end.listen(replica, routes.listeners[rank])
    published = gather(address)
    addresses = [published[listener] for listener in routes.listeners]

    if isinstance(own, TrainerRank):
        if rank in routes.senders:
            own.end.join(replica, replace(routes.senders[rank], addresses=addresses))
    else:
        links = dict(zip(case.engine_ranks[replica], routes.receivers, strict=True))
        target = rank - case.trainer.num_ranks
        if target in links:
            own.link(replace(links[target], addresses=addresses))

    dist.barrier()
