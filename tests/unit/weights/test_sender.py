"""Weights sent by real gloo ranks in every layout, through memory, and checksums of their shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megarl.weights.bucket import GroupAddress
from megarl.weights.checksum import checksum
from megarl.weights.gather import Shards
from megarl.weights.load import load_into_shards
from megarl.weights.manifest import manifest_of
from megarl.weights.receiver import ParcelReceiver
from megarl.weights.sender import KeptSegments, WeightSender, open_sender
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.verify import WeightMismatchError, add_checksums, compare_checksums, shard_checksums
from megarl.weights.weight_group import WeightGroup, reserve_port
from tests.unit.weights.models import PADDED_VOCAB, architecture_of, random_model, save

MODELS = [("qwen2", True), ("qwen3", False), ("llama", False)]
CPU = torch.device("cpu")
LAYOUTS = {"TP1": (1, 1, None), "TP2": (2, 1, None), "PP2": (1, 2, None), "TP2xPP2": (2, 2, None), "PP2xVPP2": (1, 2, 2)}


class Layout(NamedTuple):
    tensor: int
    pipeline: int
    virtual: int | None

    def layouts(self, architecture):
        return model_layouts(
            architecture,
            tensor_parallel_size=self.tensor,
            pipeline_parallel_size=self.pipeline,
            virtual_pipeline_parallel_size=self.virtual,
            padded_vocab_size=PADDED_VOCAB,
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    root = tmp_path_factory.mktemp("folders")
    return {(family, tied): save(random_model(family, tied=tied), root / f"{family}-{tied}") for family, tied in MODELS}


def shards_of(folder: Path, family: str, tied: bool, layout: Layout, rank: int, group: dist.ProcessGroup | None) -> Shards:
    architecture = architecture_of(family, tied=tied)
    own = layout.layouts(architecture)[rank]
    parameters = {name: torch.full(shape, torch.nan) for name, shape in shard_shapes(architecture, own).items()}
    load_into_shards(folder, architecture, own, parameters)
    return Shards(parameters=parameters, architecture=architecture, layout=own, group=group)


def received(sender: WeightSender, receiver: ParcelReceiver, state: dict[str, torch.Tensor]) -> int:
    """Takes all parcels, compares them with the model, counts elements."""
    count = 0
    while (parcel := sender.next_parcel()).chunks:
        for chunk in receiver.open(parcel):
            expected = state[chunk.name].view(-1)[chunk.offset : chunk.offset + len(chunk.data)]
            assert torch.equal(chunk.data, expected), chunk.name
            count += len(chunk.data)
    return count


def send_all(folders: dict, layout: Layout) -> dict:
    """Each model by segments with small buckets; returns counts and checksums."""
    stages = [dist.new_group(range(stage * layout.tensor, (stage + 1) * layout.tensor)) for stage in range(layout.pipeline)]
    rank = dist.get_rank()
    stage, tensor_rank = divmod(rank, layout.tensor)
    results = {}
    for (family, tied), folder in folders.items():
        shards = shards_of(folder, family, tied, layout, rank, stages[stage] if layout.tensor > 1 else None)
        state = random_model(family, tied=tied).state_dict()
        receiver = ParcelReceiver(CPU)
        counts = []
        for bucket_bytes in (300, 3000, 10**6):  # far smaller than most tensors; smaller than some; all
            sender = open_sender(shards, bucket_bytes, torch.float32, KeptSegments())
            if tensor_rank == 0:
                counts.append(received(sender, receiver, state))
            else:
                num_buckets = len(sender._gatherer.buckets)
                assert not any(sender.next_parcel().chunks for _ in range(num_buckets))
            report = sender.end()
            assert report.planned_extra_bytes <= 2 * bucket_bytes
            assert report.nbytes == (4 * counts[-1] if tensor_rank == 0 else 0)
        results[family, tied] = (counts, shard_checksums(shards, torch.float32))
    return results


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_sends_each_element_once(rank_pool, folders, name: str) -> None:
    layout = Layout(*LAYOUTS[name])
    per_rank = rank_pool.run(send_all, world_size=layout.tensor * layout.pipeline, folders=folders, layout=layout)
    for family, tied in MODELS:
        manifest = manifest_of(architecture_of(family, tied=tied), torch.float32)
        state = {name: tensor for name, tensor in random_model(family, tied=tied).state_dict().items() if name in manifest}
        total = sum(tensor.numel() for tensor in state.values())
        counts = [results[family, tied][0] for results in per_rank if results[family, tied][0]]
        assert [sum(of_bucket_size) for of_bucket_size in zip(*counts, strict=True)] == [total] * 3

        sums = add_checksums(results[family, tied][1] for results in per_rank)
        true = {name: checksum(tensor) for name, tensor in state.items()}
        assert sums == true
        compare_checksums(manifest, sums, true, "the engine")


def test_a_lie_is_found_and_named() -> None:
    architecture = architecture_of("qwen3")
    manifest = manifest_of(architecture, torch.float32)
    state = random_model("qwen3").state_dict()
    trainer = {name: checksum(state[name]) for name in manifest}
    engine = dict(trainer)
    changed = state["model.layers.2.mlp.up_proj.weight"].clone()
    changed[[1, 4]] = changed[[4, 1]]  # two rows in each other's place
    engine["model.layers.2.mlp.up_proj.weight"] = checksum(changed)
    del engine["model.norm.weight"]
    with pytest.raises(WeightMismatchError, match=r"replica 1 does not hold.*2 of \d+ tensors.*layers\.2\.mlp\.up_proj.*model\.norm"):
        compare_checksums(manifest, trainer, engine, "replica 1")


def broadcast_all(folder: Path, layout: Layout) -> float:
    """Rank 2 is the engine, ranks 0 and 1 the tensor-parallel ranks of the trainer. Returns the elements that arrived, or left."""
    group = dist.new_group([0, 1])
    rank = dist.get_rank()
    listener = reserve_port("127.0.0.1") if rank == 0 else None
    addresses = [GroupAddress("stage-0", "127.0.0.1", listener.getsockname()[1], 2, "gloo", 60.0) if listener else None]
    dist.broadcast_object_list(addresses)
    receiver, sender = ParcelReceiver(CPU), None
    if rank == 2:
        receiver.join(addresses[0], 1)
    else:
        shards = shards_of(folder, "qwen3", False, layout, rank, group)
        weights = WeightGroup(addresses[0], 0, CPU, listener) if rank == 0 else None
        sender = open_sender(shards, 5000, torch.float32, KeptSegments(), weights, "stage-0")
    state = random_model("qwen3").state_dict()
    count = 0
    while True:
        parcels = [sender.next_parcel() if sender else None]
        dist.broadcast_object_list(parcels)  # as the driver hands them on
        if not parcels[0].chunks:
            return count if sender is None else sender.end().nbytes / 4
        for chunk in receiver.open(parcels[0]) if rank == 2 else ():
            assert torch.equal(chunk.data, state[chunk.name].view(-1)[chunk.offset : chunk.offset + len(chunk.data)])
            count += len(chunk.data)


def test_broadcast(rank_pool, folders) -> None:
    total = sum(tensor.numel() for tensor in random_model("qwen3").state_dict().values())
    results = rank_pool.run(broadcast_all, world_size=3, folder=folders["qwen3", False], layout=Layout(2, 1, None))
    assert results == [total, 0, total]


def measure_memory(bucket_bytes: int) -> list[int]:
    """What the kernel counts while a model of 140 MB is sent in buckets far smaller."""
    architecture = replace(architecture_of("qwen3", num_layers=1), vocab_size=30_000, hidden_size=1024)
    rank = dist.get_rank()
    own = model_layouts(architecture, tensor_parallel_size=2, padded_vocab_size=30_000)[rank]
    parameters = {name: torch.ones(shape) for name, shape in shard_shapes(architecture, own).items()}
    shards = Shards(parameters=parameters, architecture=architecture, layout=own, group=dist.new_group([0, 1]))
    measured, kept = [], KeptSegments()
    for _ in range(2):
        sender = open_sender(shards, bucket_bytes, torch.float32, kept)
        sender.send_all()
        report = sender.end()
        assert report.planned_extra_bytes <= 2 * bucket_bytes
        measured.append(report.measured_extra_bytes)
    assert measured[1] < bucket_bytes  # the buffers are those of the first pass
    kept.close()
    return measured


def test_memory_as_measured_is_at_most_two_buckets(rank_pool) -> None:
    bucket_bytes = 16 * 2**20
    slack = 4 * 2**20  # of gloo, and of the interpreter
    for rank, measured in enumerate(rank_pool.run(measure_memory, world_size=2, bucket_bytes=bucket_bytes)):
        assert max(measured) <= 2 * bucket_bytes + slack
        assert rank != 0 or max(measured) > bucket_bytes  # it measures
