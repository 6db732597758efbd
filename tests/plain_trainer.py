"""A trainer of one rank in the test's own process, which has tensors and nothing else, and gives them to an engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.rollout.interface import RolloutEngine
from megarl.weights.p2p import Wire, WireAddress, reserve_port
from megarl.weights.plan import Part, RankBoxes, RankPlace, plan_transfer, whole_boxes
from megarl.weights.receiver import EngineLink
from megarl.weights.tensors import Manifest, TensorMeta
from megarl.weights.transports.device import DevicePlace, DeviceTrainerEnd
from megarl.weights.transports.group import GroupPlace, GroupTrainerEnd, group_route
from megarl.weights.transports.interface import Sending, TrainerEnd

LIMIT_S = 60.0
BACKEND_OF = {"cpu": "gloo", "cuda": "nccl"}
Weights = Mapping[str, torch.Tensor]


def manifest_of(weights: Weights) -> Manifest:
    return {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


class PlainShards:
    """As Shards: every tensor whole."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        first = next(iter(weights.values()))
        self.dtype, self.device = first.dtype, first.device

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        yield self._weights[part.name][part.box.slices]


class PlainTrainer:
    """Joined with `engine`: by slots beside each of its ranks, or in a group with them."""

    def __init__(self, engine: RolloutEngine, weights: Weights, carrier: str = "device", message_numel: int = 2**20) -> None:
        self._engine, self.manifest = engine, manifest_of(weights)
        needed = engine.needed_boxes(self.manifest)
        shapes = {name: meta.shape for name, meta in self.manifest.items()}
        source = RankBoxes(RankPlace("node", "device"), whole_boxes(shapes))
        targets = [RankBoxes(RankPlace("node", f"device-{rank}"), boxes) for rank, boxes in enumerate(needed)]
        self.plan = plan_transfer(shapes, [source], targets, message_numel)
        shards = PlainShards(weights)
        self._dtype, self._device = shards.dtype, shards.device
        self.ends: list[TrainerEnd] = []
        self.links = self._by_slots() if carrier == "device" else self._by_group()
        if carrier == "device":
            engine.join_weights(self.links)
        self._under_way: list[Sending] = []

    def _by_slots(self) -> list[EngineLink]:
        links = []
        for rank in range(len({target for _, target in self.plan.streams})):
            end, streams = DeviceTrainerEnd(None, 0), self.plan.of_target(rank)  # type: ignore[arg-type]  # it sends nothing
            address = end.serve(0, f"device-{rank}", streams, self._dtype, self._device)
            links.append(EngineLink(DevicePlace(address, f"device-{rank}"), streams, self._dtype))
            self.ends.append(end)
        return links

    def _by_group(self) -> list[EngineLink]:
        route, listener = group_route(self.plan, sorted({target for _, target in self.plan.streams})), reserve_port("127.0.0.1")
        address = WireAddress("plain", "127.0.0.1", listener.getsockname()[1], route.size, BACKEND_OF[self._device.type], LIMIT_S)
        links = [EngineLink(GroupPlace(address, 1 + rank), streams, self._dtype) for rank, streams in enumerate(route.receives)]
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(Wire.join, address, 0, self._device, listener)
            self._engine.join_weights(links)
            end = GroupTrainerEnd()
            end.join(0, joining.result(LIMIT_S), route.sends[0])
        self.ends.append(end)
        return links

    def begin(self, weights: Weights) -> None:
        """What comes of `go_on` are these weights."""
        shards: Any = PlainShards(weights)
        self._under_way = [Sending(end, shards, [0]) for end in self.ends]

    def go_on(self) -> bool:
        """Whether all was sent and taken; False after a second without a word from the engine."""
        self._under_way = [sending for sending in self._under_way if sending.run(()) is None]
        return not self._under_way

    def push(self, weights: Weights, version: int) -> None:
        self.begin(weights)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send)
            try:
                self._engine.begin_weight_update(self.manifest)
                self._engine.receive_weights()
                self._engine.end_weight_update(version)
            finally:
                self._is_over = True
                sending.result(LIMIT_S)

    def _send(self) -> None:
        self._is_over = False
        while not self.go_on() and not self._is_over:
            pass

    def close(self) -> None:
        for end in self.ends:
            end.close()


@contextmanager
def joined(engine: RolloutEngine, weights: Weights, carrier: str = "device", message_numel: int = 2**20) -> Iterator[PlainTrainer]:
    trainer = PlainTrainer(engine, weights, carrier, message_numel)
    try:
        yield trainer
    finally:
        trainer.close()


def push(engine: RolloutEngine, weights: Weights, version: int = 1, message_numel: int = 2**20) -> None:
    with joined(engine, weights, message_numel=message_numel) as trainer:
        trainer.push(weights, version)


def load_folder(engine: RolloutEngine, *files: Weights) -> None:
    """A folder of these files."""
    with tempfile.TemporaryDirectory() as folder:
        for number, weights in enumerate(files):
            contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            save_file(contiguous, Path(folder) / f"model-{number}.safetensors", {"format": "pt"})
        engine.load_folder(Path(folder))


def halves(weights: Weights) -> Sequence[dict[str, torch.Tensor]]:
    """The tensors in two parts."""
    names = list(weights)
    return [{name: weights[name] for name in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]
