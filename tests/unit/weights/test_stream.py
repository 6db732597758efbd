"""Streams of buckets between threads and processes: whoever is slower, however many they are, and when one of them dies."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megarl.weights.bucket import ChunkMeta, SegmentHandle
from megarl.weights.receipt import WeightTransferError
from megarl.weights.stream import NUM_SLOTS, PATIENCE_S, StreamAddress, StreamReader, StreamSource, StreamWriter, WeightStream
from tests.unit.weights.test_receiver import resident_shared_bytes

SLOT_NUMEL = 6
BUCKETS = tuple((ChunkMeta("a", 4 * number, 4), ChunkMeta("b", 2 * number, 1 + number % 2)) for number in range(7))
LIMIT_S = 30.0


@pytest.fixture
def source_of() -> Iterator[Callable[[int, int], StreamSource]]:
    sources = []

    def make(num_writers: int, num_readers: int) -> StreamSource:
        sources.append(StreamSource(SLOT_NUMEL * 4, num_writers, num_readers))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


def stream_of(address: StreamAddress) -> WeightStream:
    return WeightStream(address, torch.float32, SLOT_NUMEL, BUCKETS)


def value(bucket: int, element: int, turn: int) -> float:
    return 1000.0 * turn + 100.0 * bucket + element


def write(writer: StreamWriter, number: int, num_writers: int, turn: int, delay_s: float) -> None:
    """The elements number, number + num_writers, ... of each bucket."""
    for bucket in range(len(BUCKETS)):
        while not writer.may_write(bucket):
            pass
        time.sleep(delay_s)
        for element in range(number, SLOT_NUMEL, num_writers):
            writer.slot(bucket, torch.float32)[element] = value(bucket, element, turn)
        writer.has_written()
    while not writer.is_read(len(BUCKETS)):
        pass


def read(reader: StreamReader, delay_s: float) -> list[list[float]]:
    """The elements of each bucket."""
    taken: list[list[float]] = []

    def take(number: int) -> None:
        time.sleep(delay_s)
        taken.append([element for chunk in reader.buckets[number] for element in chunk.data.tolist()])

    while not reader.read(take):
        pass
    return taken


@pytest.mark.parametrize("num_writers", [1, 2])
@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize(("write_s", "read_s"), [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01)])
def test_every_reader_gets_every_bucket_in_every_pass(
    source_of: Callable, num_writers: int, num_readers: int, write_s: float, read_s: float
) -> None:
    source = source_of(num_writers, num_readers)
    writers = [StreamWriter(source.address, number) for number in range(num_writers)]
    readers = [StreamReader([stream_of(source.address)], number) for number in range(num_readers)]
    with ThreadPoolExecutor(num_writers + num_readers) as pool:
        for turn in range(3):
            reading = [pool.submit(read, reader, read_s * (number + 1)) for number, reader in enumerate(readers)]
            writing = [
                pool.submit(write, writer, number, num_writers, turn, write_s * (number + 1)) for number, writer in enumerate(writers)
            ]
            for future in writing:
                future.result(LIMIT_S)
            expected = [
                [value(bucket, element, turn) for element in range(sum(chunk.numel for chunk in chunks))]
                for bucket, chunks in enumerate(BUCKETS)
            ]
            assert [future.result(LIMIT_S) for future in reading] == [expected] * num_readers


def test_stages_are_read_in_turns(source_of: Callable) -> None:
    sources = [source_of(1, 1) for _ in range(2)]
    reader = StreamReader([stream_of(source.address) for source in sources], 0)
    with ThreadPoolExecutor(3) as pool:
        reading = pool.submit(read, reader, 0.0)
        writing = [pool.submit(write, StreamWriter(source.address, 0), 0, 1, turn, 0.0) for turn, source in enumerate(sources)]
        for future in writing:
            future.result(LIMIT_S)
        assert [round(bucket[0]) for bucket in reading.result(LIMIT_S)][:4] == [0, 1000, 100, 1100]


def test_nobody_waits_for_long_for_one_who_is_gone(source_of: Callable) -> None:
    source = source_of(1, 1)
    writer, reader = StreamWriter(source.address, 0), StreamReader([stream_of(source.address)], 0)
    start_s = time.monotonic()
    assert not reader.read(lambda number: None)  # nobody writes
    assert time.monotonic() - start_s < PATIENCE_S + 5
    for bucket in range(NUM_SLOTS):
        assert writer.may_write(bucket)
        writer.has_written()
    assert not writer.may_write(NUM_SLOTS)  # nobody reads
    taken: list[int] = []
    assert not reader.is_under_way
    assert not reader.read(taken.append)
    assert taken == list(range(NUM_SLOTS))
    assert reader.is_under_way
    assert writer.may_write(NUM_SLOTS + 1)  # it goes on where it was


HOLDER = """
import json, sys, torch
from megarl.weights.stream import StreamSource, StreamWriter
source = StreamSource(24, 1, 1)
writer = StreamWriter(source.address, 0)
writer.slot(0, torch.float32).fill_(5)
writer.has_written()
print(json.dumps(source.address), flush=True)
sys.stdin.read()
"""


def test_a_writer_that_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        name, segment, writers, readers = json.loads(process.stdout.readline())
        address = StreamAddress(name, SegmentHandle(*segment), tuple(writers), tuple(readers))
        reader = StreamReader([stream_of(address)], 0)
        process.kill()
        process.wait()
        taken: list[int] = []
        with pytest.raises(WeightTransferError, match="given up"):
            reader.read(taken.append)
        assert taken == [0]
        with pytest.raises(WeightTransferError, match=r"gone.*transport=broadcast"):
            StreamReader([stream_of(address)], 0)
        with pytest.raises(WeightTransferError, match="gone"):
            StreamWriter(address, 0)
    finally:
        process.kill()
        process.communicate()


def test_a_stream_that_was_closed(source_of: Callable) -> None:
    source = source_of(1, 1)
    writer, reader = StreamWriter(source.address, 0), StreamReader([stream_of(source.address)], 0)
    writer.slot(0, torch.float32).fill_(7)
    source.close()
    assert reader.buckets[0][0].data.tolist() == [0.0] * 4  # the memory is given back although it is mapped
    reader.close()
    with pytest.raises(WeightTransferError, match="given up"):
        writer.has_written()


def test_between_passes_it_holds_no_memory() -> None:
    slot_bytes = 16 * 2**20
    stream_buckets = tuple((ChunkMeta("a", number * slot_bytes // 4, slot_bytes // 4),) for number in range(NUM_SLOTS))
    before = resident_shared_bytes()
    source = StreamSource(slot_bytes, 1, 1)
    stream = WeightStream(source.address, torch.float32, slot_bytes // 4, stream_buckets)
    writer, reader = StreamWriter(source.address, 0), StreamReader([stream], 0)
    for turn in range(2):
        for bucket in range(NUM_SLOTS):
            writer.slot(bucket, torch.float32).fill_(1.0 + turn)
            writer.has_written()
        sums: list[float] = []
        assert reader.read(lambda number, sums=sums: sums.append(float(reader.buckets[number][0].data.mean())))
        assert sums == [1.0 + turn] * NUM_SLOTS
        assert writer.is_read(NUM_SLOTS)
        assert resident_shared_bytes() - before >= NUM_SLOTS * slot_bytes
        source.empty()
        assert resident_shared_bytes() - before < slot_bytes // 4  # in the writer's and the reader's mapping
    writer.close()
    reader.close()
    source.close()


def test_more_ranks_than_a_byte_can_name() -> None:
    with pytest.raises(ValueError, match=r"300 engine ranks.*transport=broadcast"):
        StreamSource(24, 1, 300)
