"""A trainer process and engine processes that a test controls, call by call: on one GPU, on two, or on the
CPU.

    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), partial(serve_engine, spec)]) as (trainer, engine):
        link = ask(trainer, "serve", ask(engine, "needed"))
        ask(engine, "join", link)

The trainer has the random weights of a small model, of a given seed for each sync; the engine is of the kind
hf.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig, Transport
from megarl.machine.usage import PeakMemory
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.checksum import checksum
from megarl.weights.p2p import BACKENDS, P2PAddress, P2PGroup, reserve_port
from megarl.weights.plan import (
    NUM_IPC_BUFFERS,
    RankLocation,
    TensorSlices,
    plan_transfer,
    whole_slices,
)
from megarl.weights.tensors import Manifest, Part, WeightTransferError
from megarl.weights.transfer import SendReport
from megarl.weights.transports.interface import EngineLink, Sender, SendingRank, sides_of
from tests.mortal_ranks import MortalRank, Place
from tests.nccl_semantics import NcclSemantics
from tests.plain_trainer import PlainShards, manifest_of, no_trainers

DTYPE = torch.bfloat16
LIMIT_S = 60.0  # of a weight sync, and for a group to connect
NAME = "device"  # of the one device, in the plan

# NCCL refuses two ranks on one GPU.
ONE_DEVICE = "nccl_semantics_on_one_device"
BACKENDS[ONE_DEVICE] = lambda store, rank, size, limit, host, port: NcclSemantics(
    store, rank, size, limit, device=0
)


@dataclass(frozen=True)
class SharedSpec:
    """Specification of the processes.

    Attributes:
        folder: Folder of the model's config.json.
        devices: Devices of the trainer and of the engines.
        buffer_bytes: Size of one IPC buffer.
    """

    folder: Path
    devices: tuple[torch.device, torch.device]
    buffer_bytes: int = 2**20

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket; all IPC buffers together hold two."""
        return NUM_IPC_BUFFERS * self.buffer_bytes // 2


class Held(NamedTuple):
    """Memory in bytes.

    Attributes:
        of_process: As counted by the allocator.
        of_device: Everything in use on a GPU, by any process; equals of_process on a CPU.
    """

    of_process: int
    of_device: int


def save_model(folder: Path, num_layers: int, hidden_size: int, vocab_size: int = 3000) -> None:
    """Save a config.json."""
    config = Qwen2Config(
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    config.save_pretrained(folder)


def manifest(folder: Path) -> Manifest:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config.from_pretrained(folder), dtype=DTYPE)
    return manifest_of(dict(model.named_parameters()))


def weights(folder: Path, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return weights that are the same on every device, because they are generated on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(meta.shape, generator=generator).to(DTYPE).to(device)
        for name, meta in manifest(folder).items()
    }


def ask(rank: MortalRank, name: str, *arguments: Any) -> Any:
    """Return the process's answer. Raises WeightTransferError if its method raised that."""
    rank.tell((name, *arguments))
    return answer(rank)


def answer(rank: MortalRank) -> Any:
    heard = rank.hear()
    if isinstance(heard, WeightTransferError):
        raise heard
    return heard


class _Obeying:
    def __init__(self, spec: SharedSpec, place: Place, device: torch.device) -> None:
        self.spec = spec
        self.place = place
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._listener: socket.socket | None = None

    def obey(self) -> None:
        while (call := self.place.listen()) is not None:
            name, *arguments = call
            try:
                self.place.say(getattr(self, name)(*arguments))
            except WeightTransferError as error:
                self.place.say(error)

    def reserve(self) -> int:
        self._listener = reserve_port("127.0.0.1")
        return self._listener.getsockname()[1]

    def meet(self, address: P2PAddress, rank: int) -> float:
        """Connect a group, and return the seconds it took. Raises if the ranks do not meet."""
        start_s = time.monotonic()
        listener = self._listener
        self._listener = None
        self.p2p = P2PGroup.join(address, rank, self.device, listener)
        return time.monotonic() - start_s


class TrainerProcess(_Obeying):
    def __init__(self, spec: SharedSpec, place: Place) -> None:
        super().__init__(spec, place, spec.devices[0])
        self._device = self._sender(Transport.device, "")
        self._end = self._device
        self._weights = weights(self.spec.folder, 0, self.device)

    def _sender(self, transport: Transport, backend: str) -> Sender:
        own = SendingRank(0, "127.0.0.1", backend, self.device, no_trainers)
        return sides_of(transport).sender(EngineLink(transport, "", DTYPE, LIMIT_S), own)

    def _link(self, transport: Transport, replica: int, needed: TensorSlices, device_name: str) -> str:
        """Return the serialized link of the engine."""
        shapes = {name: meta.shape for name, meta in manifest(self.spec.folder).items()}
        source = (RankLocation("node", NAME), whole_slices(shapes))
        target = (RankLocation("node", device_name), needed)
        plan = plan_transfer(shapes, [source], [target], self.spec.buffer_bytes // DTYPE.itemsize)
        link = EngineLink(transport, f"replica-{replica}", DTYPE, LIMIT_S)
        routes = sides_of(transport).route(plan, [NAME], {0: device_name}, link)
        addresses = [self._end.listen(replica, routes.listeners[0])]
        self._own_link = replace(routes.senders[0], addresses=addresses)
        return json.dumps(replace(routes.receivers[0], addresses=addresses).encode())

    def serve(self, replica: int, needed: TensorSlices) -> str:
        return self._link(Transport.device, replica, needed, NAME)

    def group_link(self, replica: int, backend: str, needed: TensorSlices) -> str:
        self._end = self._sender(Transport.group, backend)
        return self._link(Transport.group, replica, needed, "another")

    def join_group(self, replica: int) -> None:
        self._end.join(replica, self._own_link)

    def change(self, seed: int) -> None:
        """Use the weights of this seed from now on."""
        self._weights = weights(self.spec.folder, seed, self.device)

    def send(self, replicas: Collection[int]) -> SendReport:
        """Send the weights. Ends with the transfer, or fails after LIMIT_S."""
        shards: Any = PlainShards(self._weights)
        sending = self._end.open(shards, replicas)
        deadline_s = time.monotonic() + LIMIT_S
        while not sending.run():
            assert time.monotonic() < deadline_s, "the pass does not end"

        return sending.report()

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self._weights.items()}

    def leave(self, replica: int) -> None:
        self._end.leave(replica)

    def held(self) -> Held:
        """Return the memory after garbage collection and after emptying the allocator's cache."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            return Held(torch.cuda.memory_allocated(self.device), total - free)

        shared = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssShmem:")
        )
        return Held(*2 * (int(shared.split()[1]) * 1024,))

    def close(self) -> None:
        self._device.close()
        self._end.close()


class _MortalEngine(HFEngine):
    """Engine that is killed in the middle of a sync.

    Args:
        dies_at: Number of the part at whose lookup it is killed; 0: never.
    """

    dies_at = 0
    place: Place

    def places_of(self, part: Part) -> list[torch.Tensor]:
        self.dies_at -= 1
        if self.dies_at == 0:
            self.place.die(signal.SIGKILL)
        return super().places_of(part)


class EngineProcess(_Obeying):
    def __init__(self, spec: SharedSpec, place: Place) -> None:
        super().__init__(spec, place, spec.devices[1])
        self.manifest = manifest(spec.folder)

    def start(self) -> TensorSlices:
        """Start the engine, and return the slices that it needs. Before this, it uses nothing of the
        device."""
        policy = ModelConfig(path=str(self.spec.folder), dtype=DType.bfloat16)
        engine_spec = RolloutEngineSpec(
            model=policy, rollout=RolloutConfig(), device=Device(self.device.type)
        )
        self.engine = _MortalEngine(engine_spec)
        self.engine.place = self.place
        (needed,) = self.engine.needed_slices(self.manifest)

        return needed

    def join(self, link: str) -> None:
        self.engine.join_weights([EngineLink.decode(json.loads(link))])

    def doom(self, num_parts: int) -> None:
        self.engine.dies_at = num_parts

    def receive(self, version: int) -> int:
        """Receive weights. Returns the peak of additional bytes."""
        peak = PeakMemory(self.device)
        self.engine.begin_weight_update(self.manifest)
        self.engine.receive_weights()
        self.engine.end_weight_update(version)
        return peak.extra_bytes()

    def checksums(self) -> dict[str, int]:
        return self.engine.checksums()

    def differing(self, seed: int) -> list[str]:
        """Return the names of parameters that are not bitwise equal to the seed's weights."""
        wanted = weights(self.spec.folder, seed, self.device)
        bits = torch.int16  # compared as integers, since NaN does not equal itself
        return [
            name
            for name, each in self.engine.parameters.items()
            if not torch.equal(each.data.view(bits), wanted[name].view(bits))
        ]

    def close(self) -> None:
        self.engine.close()


def serve_trainer(spec: SharedSpec, place: Place) -> None:
    TrainerProcess(spec, place).obey()


def serve_engine(spec: SharedSpec, place: Place) -> None:
    EngineProcess(spec, place).obey()
