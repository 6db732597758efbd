"""IPC buffers between two processes: rotation, release, and what each side learns when the other is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megarl.weights.ipc import IPCAddress, IPCReader, IPCWriter
from megarl.weights.tensors import WeightTransferError

CPU = torch.device("cpu")
SLOT_BYTES = 40
NUM_IPC_BUFFERS = 3
F32 = torch.float32


@pytest.fixture
def writer():
    writer = IPCWriter(SLOT_BYTES, NUM_IPC_BUFFERS, CPU, "device-0")
    yield writer
    writer.close()


def test_buffers_take_turns(writer: IPCWriter) -> None:
    reader = IPCReader(writer.address, CPU, "device-0")
    for _ in range(2):  # transfers
        assert not reader.is_written(0, 0.0)
        for number in range(NUM_IPC_BUFFERS):
            assert writer.is_free(number, 0.0)
            writer.buffer(number, F32).fill_(number)
            writer.has_written()
        assert not writer.is_free(NUM_IPC_BUFFERS, 0.0)  # the first has not been read
        for number in range(NUM_IPC_BUFFERS):
            assert reader.is_written(number, 1.0)
            assert reader.buffer(number, F32).tolist() == [float(number)] * 10
            reader.has_read()
        assert not reader.is_written(NUM_IPC_BUFFERS, 0.0)
        assert writer.is_free(NUM_IPC_BUFFERS, 1.0)
        assert writer.is_read(NUM_IPC_BUFFERS, 1.0)
        reader.end(NUM_IPC_BUFFERS)

    reader.close()


def resident_shared_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssShmem"))


def test_memory_is_given_back_to_all() -> None:
    size = 32 * 2**20
    before = resident_shared_bytes()
    writer = IPCWriter(size, 2, CPU, "device-0")
    reader = IPCReader(writer.address, CPU, "device-0")
    assert resident_shared_bytes() - before < size // 4

    for number in range(2):
        writer.buffer(number, torch.uint8).fill_(7)
        assert int(reader.buffer(number, torch.uint8)[-1]) == 7

    assert resident_shared_bytes() - before >= 2 * size
    writer.empty()
    assert resident_shared_bytes() - before < size // 4
    assert int(reader.buffer(1, torch.uint8)[-1]) == 0  # it is still connected, but holds no memory
    writer.close()
    assert resident_shared_bytes() - before < size // 4
    reader.close()


def transfer(writer: IPCWriter, reader: IPCReader, value: int) -> None:
    """Run one transfer of one round."""
    writer.buffer(0, torch.uint8).fill_(value)
    writer.has_written()
    assert reader.is_written(0, 1.0)
    assert reader.buffer(0, torch.uint8).unique().tolist() == [value]
    reader.has_read()
    assert writer.is_read(1, 1.0)
    reader.end(1)


def test_the_memory_is_freed_between_transfers_and_found_again() -> None:
    """The new memory has another address, as on CUDA, and the reader holds no memory in between."""
    size = 32 * 2**20
    before = resident_shared_bytes()
    writer = IPCWriter(size, 2, CPU, "device-0")
    reader = IPCReader(writer.address, CPU, "device-0")

    for value in (7, 3):
        transfer(writer, reader, value)
        transfer(writer, reader, value + 1)  # without being freed in between
        writer.empty()
        assert resident_shared_bytes() - before < size // 4
        open_maps = [
            line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:megarl-ipc-" in line
        ]
        assert open_maps == []

    writer.close()
    reader.close()


@pytest.mark.parametrize("successor", ["a file", "the memory of another trainer"])
def test_numbers_of_files_that_a_trainer_has_closed_lead_nowhere(tmp_path: Path, successor: str) -> None:
    writer = IPCWriter(SLOT_BYTES, NUM_IPC_BUFFERS, CPU, "device-0")
    reader = IPCReader(writer.address, CPU, "device-0")
    writer.buffer(0, F32).fill_(5.0)
    writer.has_written()
    numbers = open_files()
    writer.close()
    freed = numbers - open_files()

    if successor == "a file":
        (tmp_path / "file").write_bytes(b"PWD=/\0")
        new = os.open(tmp_path / "file", os.O_RDONLY)
    else:
        new = os.memfd_create(name := "megarl-ipc-of-another")
        os.write(new, f"{name} /proc/{os.getpid()}/fd/{new}".ljust(SLOT_BYTES * NUM_IPC_BUFFERS).encode())
    for number in freed:
        os.dup2(new, number)

    with pytest.raises(WeightTransferError, match=r"are gone.*transport=folder"):
        reader.buffer(0, F32)
    reader.close()
    for number in {new, *freed}:
        os.close(number)


def open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


READER = """
import sys, torch
from megarl.weights.ipc import IPCAddress, IPCReader
reader = IPCReader(IPCAddress(*eval(sys.argv[1])), torch.device("cpu"), "device-0")
print("joined", flush=True)
print(reader.is_written(0, 60.0), reader.buffer(0, torch.float32)[0].item(), flush=True)
reader.has_read()
sys.stdin.readline()
"""


def test_a_reader_that_is_killed_is_noticed(writer: IPCWriter) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", READER, repr(tuple(writer.address))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    writer.buffer(0, F32).fill_(5.0)
    writer.has_written()
    assert process.stdout.readline() == "True 5.0\n"
    assert writer.is_free(NUM_IPC_BUFFERS, 10.0)
    process.kill()
    process.communicate()
    with pytest.raises(WeightTransferError, match="is gone"):
        writer.is_free(NUM_IPC_BUFFERS + 1, 10.0)
    with pytest.raises(WeightTransferError, match="is gone"):
        writer.has_written()


WRITER = """
import sys, torch
from megarl.weights.ipc import IPCWriter
writer = IPCWriter(40, 3, torch.device("cpu"), "device-0")
print(tuple(writer.address), flush=True)
sys.stdin.readline()
"""


def test_a_writer_that_is_killed_is_noticed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    address = IPCAddress(*eval(process.stdout.readline()))
    reader = IPCReader(address, CPU, "device-0")
    assert not reader.is_written(0, 0.1)
    process.kill()
    process.communicate()
    with pytest.raises(WeightTransferError, match="is gone"):
        reader.is_written(0, 10.0)
    with pytest.raises(WeightTransferError, match="is gone"):
        reader.has_read()
    reader.close()
    with pytest.raises(WeightTransferError, match=r"IPC buffers for weights are gone .*transport=folder"):
        IPCReader(address, CPU, "device-0")


def test_another_device_and_other_files_are_refused(writer: IPCWriter, tmp_path) -> None:
    with pytest.raises(WeightTransferError, match="on device device-0, .*on device-1"):
        IPCReader(writer.address, CPU, "device-1")
    with (tmp_path / "file").open("wb+") as file:
        file.write(bytes(SLOT_BYTES * NUM_IPC_BUFFERS))
        file.flush()
        other = writer.address._replace(handle=f"/proc/{os.getpid()}/fd/{file.fileno()}")
        with pytest.raises(WeightTransferError, match="is not the trainer's memory of 120 bytes"):
            IPCReader(other, CPU, "device-0")
