"""Parcels from another process, through memory and through a group; what becomes of them when that process goes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from megarl.weights.bucket import ChunkMeta, GroupAddress, Parcel, SegmentHandle
from megarl.weights.receipt import WeightTransferError
from megarl.weights.receiver import ParcelReceiver
from megarl.weights.shared_memory import Segment, SegmentReader
from megarl.weights.weight_group import WeightGroup, reserve_port

CPU = torch.device("cpu")
CHUNKS = (ChunkMeta("a", 3, 4), ChunkMeta("b", 0, 6))

HOLDER = """
import sys, torch
from megarl.weights.shared_memory import Segment
segment = Segment.create(40, torch.device("cpu"))
segment.tensor(torch.float32, 10).copy_(torch.arange(10.0))
print(segment.handle.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder():
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_chunks_from_another_process_until_it_is_killed(holder) -> None:
    parcel = Parcel(CHUNKS, torch.float32, SegmentHandle("memfd", holder.stdout.readline().strip(), 40))
    receiver = ParcelReceiver(CPU)
    for _ in range(2):  # the second time it is mapped already
        chunks = [(chunk.name, chunk.offset, chunk.data.tolist()) for chunk in receiver.open(parcel)]
        assert chunks == [("a", 3, [0.0, 1.0, 2.0, 3.0]), ("b", 0, [4.0, 5.0, 6.0, 7.0, 8.0, 9.0])]
    holder.kill()
    holder.wait()
    for stale in (receiver, ParcelReceiver(CPU)):
        with pytest.raises(WeightTransferError, match=r"segment is gone, its process has ended.*transport=broadcast"):
            list(stale.open(parcel))


def test_a_closed_segment_gives_its_memory_back_to_all() -> None:
    size = 64 * 2**20
    before = resident_shared_bytes()
    segment, reader = Segment.create(size, CPU), SegmentReader()
    segment.tensor(torch.uint8, size).fill_(7)
    mapped = reader.open(segment.handle, torch.uint8, size)
    assert int(mapped[-1]) == 7
    assert resident_shared_bytes() - before >= size
    segment.close()
    segment.close()
    assert int(mapped[-1]) == 0  # the reader has not let go, and holds nothing
    assert resident_shared_bytes() - before < size // 4
    with pytest.raises(WeightTransferError, match="gone"):
        reader.open(segment.handle, torch.uint8, size)


def resident_shared_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem"))


def test_a_new_segment_in_the_place_of_an_old_one_is_not_taken_for_it() -> None:
    reader = SegmentReader()
    first = Segment.create(8, CPU)
    first.tensor(torch.int64, 1).fill_(1)
    assert reader.open(first.handle, torch.int64, 1).item() == 1
    first.close()
    second = Segment.create(8, CPU)
    second.tensor(torch.int64, 1).fill_(2)
    assert second.handle == first.handle  # the same number of an open file
    assert reader.open(second.handle, torch.int64, 1).item() == 2
    with pytest.raises(WeightTransferError, match="2 elements of torch.int64 were announced, it holds 8 bytes"):
        reader.open(second.handle, torch.int64, 2)
    second.close()


def test_other_files_are_not_segments(tmp_path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.write(bytes(8))
        file.flush()
        handle = SegmentHandle("memfd", f"/proc/{os.getpid()}/fd/{file.fileno()}", 8)
        with pytest.raises(WeightTransferError, match="is not the trainer's segment of 8 bytes"):
            SegmentReader().open(handle, torch.uint8, 8)


def broadcast_parcels(host: str) -> list:
    """Rank 0 sends two parcels of different sizes; the others receive them, beside the default group."""
    rank, members = dist.get_rank(), dist.get_world_size()
    addresses = [None]
    listener = None
    if rank == 0:
        listener = reserve_port(host)
        addresses = [GroupAddress("stage-0", host, listener.getsockname()[1], members, "gloo", 60.0)]
    dist.broadcast_object_list(addresses)
    address = addresses[0]
    parcels = [Parcel(CHUNKS, torch.bfloat16, "stage-0"), Parcel((ChunkMeta("c", 5, 20_000),), torch.float32, "stage-0")]
    if rank == 0:
        group = WeightGroup(address, 0, CPU, listener)
        works = [group.broadcast(torch.arange(parcel.numel).to(parcel.dtype)) for parcel in parcels]
        for work in works:
            group.wait_for(work)
        group.close()
        return []
    receiver = ParcelReceiver(CPU)
    receiver.join(address, rank)
    received = [(chunk.name, chunk.offset, chunk.data.tolist()) for parcel in parcels for chunk in receiver.open(parcel)]
    receiver.leave()
    with pytest.raises(WeightTransferError, match=r"weight group 'stage-0'; joined are \[\]"):
        list(receiver.open(parcels[0]))
    return received


def test_a_group_broadcasts_to_every_receiver(rank_pool) -> None:
    results = rank_pool.run(broadcast_parcels, world_size=3, host="127.0.0.1")
    expected = [("a", 3, [0.0, 1.0, 2.0, 3.0]), ("b", 0, [4.0, 5.0, 6.0, 7.0, 8.0, 9.0])]
    for received in results[1:]:
        assert received[:2] == expected
        assert received[2] == ("c", 5, [float(index) for index in range(20_000)])


RECEIVER = """
import sys, torch
from megarl.weights.bucket import ChunkMeta, GroupAddress, Parcel
from megarl.weights.receiver import ParcelReceiver
receiver = ParcelReceiver(torch.device("cpu"))
receiver.join(GroupAddress("g", "127.0.0.1", int(sys.argv[1]), 2, "gloo", 60.0), 1)
print("joined", flush=True)
sys.stdin.readline()
parcel = Parcel((ChunkMeta("a", 0, 2**20),), torch.float32, "g")
print(sum(float(chunk.data.sum()) for chunk in receiver.open(parcel)), flush=True)
"""


def test_a_sender_learns_that_a_receiver_was_killed_and_can_make_a_new_group() -> None:
    for outcome in ("killed", "received"):
        listener = reserve_port("127.0.0.1")
        port = listener.getsockname()[1]
        process = subprocess.Popen([sys.executable, "-c", RECEIVER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            group = WeightGroup(GroupAddress("g", "127.0.0.1", port, 2, "gloo", 60.0), 0, CPU, listener)
            assert process.stdout.readline() == "joined\n"
            work = group.broadcast(torch.ones(2**20))
            if outcome == "killed":
                process.kill()
                with pytest.raises(WeightTransferError, match="lost a peer in a broadcast"):
                    group.wait_for(work)
            else:
                process.stdin.write("\n")
                process.stdin.flush()
                group.wait_for(work)
                assert float(process.stdout.readline()) == 2**20
            group.close()
        finally:
            process.kill()
            process.communicate()


def test_a_group_whose_members_do_not_come_ends_in_time() -> None:
    listener = reserve_port("127.0.0.1")
    address = GroupAddress("g", "127.0.0.1", listener.getsockname()[1], 2, "gloo", 0.5)
    start_s = time.monotonic()
    with pytest.raises(WeightTransferError, match=r"rank 0 could not join within 0\.5 s"):
        WeightGroup(address, 0, CPU, listener)
    assert time.monotonic() - start_s < 30


def test_a_reserved_port_is_bound_to_its_address_alone() -> None:
    listener = reserve_port("127.0.0.1")
    assert listener.getsockname()[0] == "127.0.0.1"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(listener.getsockname())
    listener.close()
