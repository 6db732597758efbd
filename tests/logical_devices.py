"""Logical devices that replace the GPUs of a node in tests on a CPU: a process sees those that its
environment names, as with CUDA.

    MEGARL_LOGICAL_DEVICES=1,0      # sees both devices of the node; its own is 1, the first

Without the variable, a process sees all devices, and has none of its own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

VARIABLE = "MEGARL_LOGICAL_DEVICES"


class DeviceHandle(NamedTuple):
    """Counterpart of a CUDA IPC handle: another process can open the memory as long as the owner keeps it."""

    device: int
    path: str
    num_bytes: int


class DeviceMemory:
    """Memory of one device. `bytes`: (num_bytes,) uint8. It is freed with this object, and with the
    process."""

    def __init__(self, device: int, num_bytes: int) -> None:
        self._file = os.memfd_create(f"logical-device-{device}")
        os.ftruncate(self._file, num_bytes)
        self.bytes = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.handle = DeviceHandle(device, f"/proc/{os.getpid()}/fd/{self._file}", num_bytes)

    def __del__(self) -> None:
        os.close(self._file)


class VisibleDevices:
    """The devices that a process sees: `devices`, its own first, or by default those in the environment."""

    def __init__(self, devices: Sequence[int] | None = None) -> None:
        named = os.environ.get(VARIABLE)
        if devices is None and named is not None:
            devices = [int(device) for device in named.split(",") if device]
        self._devices = None if devices is None else tuple(devices)

    @property
    def own(self) -> int | None:
        return self._devices[0] if self._devices else None

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Allocate memory of the process's own device."""
        assert self.own is not None, f"{VARIABLE} names no device"
        return DeviceMemory(self.own, num_bytes)

    def open(self, handle: DeviceHandle) -> torch.Tensor:
        """Open the memory of another process, (num_bytes,) uint8, in place.

        Raises RuntimeError, like CUDA, if its device is not visible, and FileNotFoundError if its owner has
        freed it.
        """
        if self._devices is not None and handle.device not in self._devices:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: the memory is of device {handle.device}, this process "
                f"sees {self._devices}"
            )
        with Path(handle.path).open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), handle.num_bytes), dtype=torch.uint8)
