"""Trainer of one rank in the test's own process, which only has tensors and sends them to an engine."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config.schema import Transport
from megarl.models.adapters import is_adapter
from megarl.rollout.interface import RolloutEngine
from megarl.weights.checkpoint_index import INDEX_FILE
from megarl.weights.message_words import slices_in_words
from megarl.weights.plan import RankLocation, plan_repeated, plan_transfer, whole_slices
from megarl.weights.tensors import Manifest, Part, TensorMeta
from megarl.weights.transfer import Transfer
from megarl.weights.transports.interface import EngineLink, Sender, SendingRank, sides_of

LIMIT_S = 60.0
BACKEND_OF = {"cpu": "gloo", "cuda": "nccl"}
Weights = Mapping[str, torch.Tensor]


def no_trainers() -> Any:
    """Stub for the group of the trainers, of which there is one."""


def manifest_of(weights: Weights) -> Manifest:
    return {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


class PlainShards:
    """Stub for Shards with every tensor unsharded."""

    are_computed = False

    def __init__(self, weights: Weights) -> None:
        self.tensors = weights
        first = next(iter(weights.values()))
        self.dtype = first.dtype
        self.device = first.device

    def regions(self, part: Part) -> Iterator[torch.Tensor]:
        yield self.tensors[part.name][part.tensor_slice.index]


class PlainTrainer:
    """Trainer that is joined with `engine`: by IPC buffers on each of its ranks' devices, or in a group with
    them."""

    def __init__(
        self, engine: RolloutEngine, weights: Weights, transport: str = "device", message_numel: int = 2**20
    ) -> None:
        self._engine = engine
        self.manifest = manifest_of(weights)
        self._words = self._words_of(weights)
        needed = [slices_in_words(slices, self._words) for slices in engine.needed_slices(self.manifest)]
        shards = self._shards(weights)
        shapes = {name: tuple(tensor.shape) for name, tensor in shards.tensors.items()}
        source = (RankLocation("node", "device"), whole_slices(shapes))
        targets = [(RankLocation("node", f"device-{rank}"), slices) for rank, slices in enumerate(needed)]
        adapters = {name for name in shapes if is_adapter(name)}
        if adapters:
            self.plan = plan_repeated(shapes, [source], targets, message_numel, adapters)
        else:
            self.plan = plan_transfer(shapes, [source], targets, message_numel)
        self.first_adapter_round = self.plan.first_repeated_round
        self._dtype = shards.dtype
        self._device = shards.device
        self.ends: list[Sender] = []
        self.links: list[EngineLink] = []
        link = EngineLink(Transport(transport), "plain", self._dtype, LIMIT_S, words=self._words)
        self._join(link, len(targets))
        self._pending: list[Transfer] = []

    def _join(self, link: EngineLink, num_targets: int) -> None:
        """Join the engine: in a group, or as if a trainer rank were on the device of each of its ranks."""
        by_device = link.transport is Transport.device
        devices = [f"device-{rank}" for rank in range(num_targets)]
        sides = sides_of(link.transport)
        routes = sides.route(self.plan, devices if by_device else ["device"], dict(enumerate(devices)), link)
        backend = BACKEND_OF[self._device.type]
        own = SendingRank(0, "127.0.0.1", backend, self._device, no_trainers)
        self.ends = [sides.sender(link, own) for _ in routes.listeners]
        addresses = [
            end.listen(0, each) for end, each in zip(self.ends, routes.listeners.values(), strict=True)
        ]
        self.links = [replace(each, addresses=addresses) for each in routes.receivers]

        with ThreadPoolExecutor(1) as pool:
            sender = replace(routes.senders[0], addresses=addresses)
            joining = None if by_device else pool.submit(self.ends[0].join, 0, sender)
            self._engine.join_weights(self.links)
            if joining is not None:
                joining.result(LIMIT_S)

    def _words_of(self, weights: Weights) -> dict[str, int]:
        """Return the bytes of wide elements if tensors have several dtypes, which are sent as bytes."""
        if len({tensor.dtype for tensor in weights.values()}) == 1:
            return {}
        sizes = {name: tensor.dtype.itemsize for name, tensor in weights.items()}
        return {name: size for name, size in sizes.items() if size > 1}

    def _shards(self, weights: Weights) -> PlainShards:
        if not self._words:
            return PlainShards(weights)
        return PlainShards({name: tensor.view(torch.uint8) for name, tensor in weights.items()})

    def begin(self, weights: Weights, first_round: int = 0) -> None:
        """Begin to send these weights by calls of `go_on`."""
        shards: Any = self._shards(weights)
        self._pending = [end.open(shards, [0], first_round) for end in self.ends]

    def go_on(self) -> bool:
        """Return whether everything was sent and received; False after a second without a response from the
        engine."""
        self._pending = [sending for sending in self._pending if not sending.run()]
        return not self._pending

    def push(self, weights: Weights, version: int, first_round: int = 0) -> None:
        self.begin(weights, first_round)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(self._send)
            try:
                self._engine.begin_weight_update(self.manifest, first_round)
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
def joined(
    engine: RolloutEngine, weights: Weights, transport: str = "device", message_numel: int = 2**20
) -> Iterator[PlainTrainer]:
    trainer = PlainTrainer(engine, weights, transport, message_numel)
    try:
        yield trainer
    finally:
        trainer.close()


def push(engine: RolloutEngine, weights: Weights, version: int = 1, message_numel: int = 2**20) -> None:
    with joined(engine, weights, message_numel=message_numel) as trainer:
        trainer.push(weights, version)


def load_folder(engine: RolloutEngine, *files: Weights) -> None:
    """Load a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        file_of = {}
        for number, weights in enumerate(files):
            contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            save_file(contiguous, Path(folder) / f"model-{number}.safetensors", {"format": "pt"})
            file_of |= dict.fromkeys(weights, f"model-{number}.safetensors")
        (Path(folder) / INDEX_FILE).write_text(json.dumps({"weight_map": file_of}))
        engine.load_folder(Path(folder))


def halves(weights: Weights) -> Sequence[dict[str, torch.Tensor]]:
    """Split the tensors into two parts."""
    names = list(weights)
    return [
        {name: weights[name] for name in part}
        for part in (names[: len(names) // 2], names[len(names) // 2 :])
    ]
