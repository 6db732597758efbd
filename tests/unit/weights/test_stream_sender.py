"""Weights streamed by real ranks in every layout to readers that work at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.weights import stream_sender
from megarl.weights.gather import Shards
from megarl.weights.sender import SenderReport
from megarl.weights.shard_layout import model_layouts, shard_shapes
from megarl.weights.stream import StreamReader, WeightStream
from megarl.weights.stream_sender import StreamSender, open_stream
from tests.unit.weights.models import architecture_of, random_model, save
from tests.unit.weights.test_receiver import resident_shared_bytes
from tests.unit.weights.test_sender import LAYOUTS, Layout, shards_of

FAMILY = "qwen3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILY, tied=False), tmp_path_factory.mktemp("model"))


@contextmanager
def joined(shards: Shards, bucket_bytes: int, num_readers: int) -> Iterator[tuple[StreamSender, list[WeightStream]]]:
    """This rank's sender, and the streams of all stages."""
    is_head = shards.layout.tensor_parallel_rank == 0
    source, own = open_stream(shards, bucket_bytes, num_readers) if is_head else (None, None)
    gathered: list[WeightStream | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    streams = [stream for stream in gathered if stream is not None]
    stage = dist.get_rank() // shards.layout.tensor_parallel_size
    sender = StreamSender(shards, bucket_bytes, streams[stage], source)
    dist.barrier()
    yield sender, streams
    dist.barrier()
    sender.close()


def read_all(streams: list[WeightStream], number: int, state: dict[str, torch.Tensor]) -> int:
    """Compares what comes with the model; returns the number of elements."""
    reader, count = StreamReader(streams, number), 0

    def take(bucket: int) -> None:
        nonlocal count
        for chunk in reader.buckets[bucket]:
            assert torch.equal(chunk.data, state[chunk.name].view(-1)[chunk.offset : chunk.offset + len(chunk.data)]), chunk.name
            count += len(chunk.data)

    while not reader.read(take):
        pass
    reader.close()
    return count


def send(sender: StreamSender, shards: Shards) -> SenderReport:
    while (report := sender.send(shards)) is None:
        pass
    return report


def stream_all(folder: Path, layout: Layout, bucket_bytes: int) -> tuple[int, list[int]]:
    """Two passes to two readers, which are threads of rank 0; returns the bytes of a pass of this rank, and the readers' elements."""
    rank = dist.get_rank()
    shards = shards_of(folder, FAMILY, False, layout, rank, None)
    counts: list[int] = []
    with joined(shards, bucket_bytes, 2) as (sender, streams), ThreadPoolExecutor(2) as pool:
        for turn in range(2):
            state = {name: tensor * 2**turn for name, tensor in random_model(FAMILY, tied=False).state_dict().items()}
            doubled = replace(shards, parameters={name: tensor * 2**turn for name, tensor in shards.parameters.items()})
            reading = [pool.submit(read_all, streams, number, state) for number in range(2)] if rank == 0 else []
            report = send(sender, doubled)
            counts += [future.result(60) for future in reading]
            assert report.planned_extra_bytes <= 2 * bucket_bytes
            dist.barrier()
    return report.nbytes, counts


@pytest.mark.parametrize("bucket_bytes", [3000, 10**6])  # far smaller than most tensors; all
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_streams_each_element_once(rank_pool, folder: Path, name: str, bucket_bytes: int) -> None:
    layout = Layout(*LAYOUTS[name])
    results = rank_pool.run(stream_all, world_size=layout.tensor * layout.pipeline, folder=folder, layout=layout, bucket_bytes=bucket_bytes)
    total = sum(tensor.numel() for tensor in random_model(FAMILY, tied=False).state_dict().values())
    assert sum(nbytes for nbytes, _ in results) == 4 * total
    assert results[0][1] == [total] * 4


def measure_memory(bucket_bytes: int) -> tuple[list[int], int]:
    """What the kernel counts while a model of 140 MB is sent in slots as large as they may be, three times; before the last the
    memory is given back. And what of the shared memory was left then."""
    stream_sender.MAX_SLOT_BYTES = bucket_bytes
    architecture = replace(architecture_of("qwen3", num_layers=1), vocab_size=30_000, hidden_size=1024)
    rank = dist.get_rank()
    own = model_layouts(architecture, tensor_parallel_size=2, padded_vocab_size=30_000)[rank]
    parameters = {name: torch.ones(shape) for name, shape in shard_shapes(architecture, own).items()}
    shards = Shards(parameters=parameters, architecture=architecture, layout=own, group=None)
    measured, shared_before = [], resident_shared_bytes()
    with joined(shards, bucket_bytes, 1) as (sender, streams), ThreadPoolExecutor(1) as pool:
        for turn in range(3):
            if turn == 2:
                sender.release()
                dist.barrier()
                assert sender._held_bytes == 0
                left = resident_shared_bytes() - shared_before
            # by rank 1, whose mapping for reading counts as well
            reader = StreamReader(streams, 0) if rank == 1 else None
            reading = [pool.submit(_drain, reader)] if reader else []
            measured.append(send(sender, shards).measured_extra_bytes)
            assert all(future.result(60) for future in reading)
            dist.barrier()
    return measured, left


def _drain(reader: StreamReader) -> bool:
    while not reader.read(lambda number: None):
        pass
    reader.close()
    return True


def test_memory_as_measured_is_at_most_two_buckets(rank_pool) -> None:
    bucket_bytes = 16 * 2**20
    slack = 4 * 2**20
    for measured, left in rank_pool.run(measure_memory, world_size=2, bucket_bytes=bucket_bytes):
        assert max(measured) <= 2 * bucket_bytes + slack
        assert min(measured) > bucket_bytes // 2  # it measures
        assert left < slack  # as much as a trainer whose state is away may hold
