"""A trainer process and engine processes that a test leads, call by call: on one GPU, on two, or for
rehearsal on the CPU.

    with mortal_ranks(tmp_path, [partial(serve_trainer, spec), partial(serve_engine, spec)]) as (trainer, engine):
        link = ask(trainer, "serve", ask(engine, "needed"))
        ask(engine, "join", link)

The trainer has the random weights of a small model, a seed's for each push; the engine is of the kind hf.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from megarl.config.schema import Device, DType, ModelConfig, RolloutConfig
from megarl.machine.usage import PeakMemory
from megarl.rollout.hf.engine import HFEngine
from megarl.rollout.interface import RolloutEngineSpec
from megarl.weights.checksum import checksum
from megarl.weights.p2p import BACKENDS, P2PAddress, P2PGroup, reserve_port
from megarl.weights.plan import (
    RankLocation,
    RankSlices,
    TensorSlices,
    TransferPlan,
    plan_transfer,
    whole_slices,
)
from megarl.weights.receiver import EngineLink
from megarl.weights.schedule import Part
from megarl.weights.tensors import Manifest, WeightTransferError
from megarl.weights.transports.device import NUM_IPC_BUFFERS, DeviceEndpoint, DeviceSender
from megarl.weights.transports.group import GroupEndpoint, GroupSender, group_transfers
from megarl.weights.transports.interface import Sender, SendPass, SendReport
from tests.mortal_ranks import MortalRank, Place
from tests.nccl_semantics import NcclSemantics
from tests.plain_trainer import PlainShards, manifest_of

DTYPE = torch.bfloat16
LIMIT_S = 60.0  # of a push, and for a group to meet
NAME = "device"  # of the one device, in the plan

# As NCCL on one GPU: it refuses two ranks on it.
ONE_DEVICE = "nccl_semantics_on_one_device"
BACKENDS[ONE_DEVICE] = lambda store, rank, size, limit, host, port: NcclSemantics(
    store, rank, size, limit, device=0
)


@dataclass(frozen=True)
class SharedSpec:
    """folder: of the model's config.json. devices: of the trainer and of the engines. buffer_bytes: what fits
    in one IPC buffer."""

    folder: Path
    devices: tuple[torch.device, torch.device]
    buffer_bytes: int = 2**20

    @property
    def bucket_bytes(self) -> int:
        """All IPC buffers hold two."""
        return NUM_IPC_BUFFERS * self.buffer_bytes // 2


class Held(NamedTuple):
    """Bytes. of_process: by the allocator's count. of_device: all that is in use of a GPU, whoever uses it;
    as of_process on a CPU."""

    of_process: int
    of_device: int


def save_model(folder: Path, num_layers: int, hidden_size: int, vocab_size: int = 3000) -> None:
    """A config.json."""
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
    """The same on every device: made on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(meta.shape, generator=generator).to(DTYPE).to(device)
        for name, meta in manifest(folder).items()
    }


def ask(rank: MortalRank, name: str, *arguments: Any) -> Any:
    """What the process answers. Raises WeightTransferError where that is what its method raised."""
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
        """Seconds that it took; raises where they do not meet."""
        start_s = time.monotonic()
        listener = self._listener
        self._listener = None
        self.p2p = P2PGroup.join(address, rank, self.device, listener)
        return time.monotonic() - start_s


class TrainerProcess(_Obeying):
    def __init__(self, spec: SharedSpec, place: Place) -> None:
        super().__init__(spec, place, spec.devices[0])
        # type: ignore[arg-type]  # it sends nothing
        self._group = GroupSender()
        self._device = DeviceSender(None, 0)
        self._end: Sender = self._device
        self._weights = weights(spec.folder, 0, self.device)

    def _plan(self, needed: TensorSlices, device_name: str) -> TransferPlan:
        shapes = {name: meta.shape for name, meta in manifest(self.spec.folder).items()}
        source = RankSlices(RankLocation("node", NAME), whole_slices(shapes))
        target = RankSlices(RankLocation("node", device_name), needed)
        return plan_transfer(shapes, [source], [target], self.spec.buffer_bytes // DTYPE.itemsize)

    def serve(self, replica: int, needed: TensorSlices) -> str:
        """A link, as it travels."""
        schedules = self._plan(needed, NAME).of_target(0)
        address = self._device.serve(replica, NAME, schedules, DTYPE, self.device)
        return json.dumps(EngineLink(DeviceEndpoint(address, NAME), schedules, DTYPE).encode())

    def join_group(self, replica: int, address: P2PAddress, needed: TensorSlices) -> None:
        self.meet(address, 0)
        self._end = self._group
        self._group.join(replica, self.p2p, group_transfers(self._plan(needed, "another"), [0]).sends[0])

    def group_link(self, address: P2PAddress, needed: TensorSlices) -> str:
        (schedules,) = group_transfers(self._plan(needed, "another"), [0]).receives
        return json.dumps(EngineLink(GroupEndpoint(address, 1), schedules, DTYPE).encode())

    def change(self, seed: int) -> None:
        """What comes next are the weights of this seed."""
        self._weights = weights(self.spec.folder, seed, self.device)

    def send(self, replicas: Collection[int]) -> SendReport:
        """Ends with the pass, or fails after LIMIT_S."""
        shards: Any = PlainShards(self._weights)
        sending = SendPass(self._end, shards, replicas)
        deadline_s = time.monotonic() + LIMIT_S
        while (report := sending.run(())) is None:
            assert time.monotonic() < deadline_s, "the pass does not end"

        return report

    def checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self._weights.items()}

    def leave(self, replica: int) -> None:
        self._end.leave(replica)

    def held(self) -> Held:
        """When garbage is collected, and what the allocator keeps is given back."""
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
        self._group.close()


class _MortalEngine(HFEngine):
    """dies_at: it is killed when it is to find the place of so many parts, in the middle of a push; 0:
    never."""

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
        """What it needs. Until here it takes nothing of the device."""
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
        """The most bytes that it took beyond what it had."""
        peak = PeakMemory(self.device)
        self.engine.begin_weight_update(self.manifest)
        self.engine.receive_weights()
        self.engine.end_weight_update(version)
        return peak.extra_bytes()

    def checksums(self) -> dict[str, int]:
        return self.engine.checksums()

    def differing(self, seed: int) -> list[str]:
        """Names of parameters that are not those of the seed's weights, to the bit."""
        wanted = weights(self.spec.folder, seed, self.device)
        bits = torch.int16  # as whole numbers, of which each equals itself
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
