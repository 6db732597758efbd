"""Safetensors files: written from pieces that come in any order, and read one tensor at a time."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.weights.tensors import ChunkMeta, Manifest, WeightReceipt, WeightTransferError

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_WRITE_BYTES = 2**20  # at a time: the system copies twice as fast what fits into a core's cache


class SafetensorsFile:
    """A file that is complete when `close` returns. `manifest`: its tensors, which lie in it in this order.
    `durable`: it is to outlive a power cut."""

    def __init__(self, path: Path, manifest: Manifest, durable: bool = True) -> None:
        self._path = path
        self._durable = durable

        # the system writes a file for one thread at a time, and lets the others spin
        self._lock = threading.Lock()
        self._receipt = WeightReceipt(manifest)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0

        for name, meta in manifest.items():
            self._starts[name] = end
            end = end + prod(meta.shape) * meta.dtype.itemsize
            header[name] = {
                "dtype": DTYPE_NAMES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [self._starts[name], end],
            }

        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of eight
        self._data_start = 8 + len(encoded)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

        try:
            # The final size is set at once, because pieces arrive in any order.
            with self._named():
                os.ftruncate(self._file, self._data_start + end)
            self._write(len(encoded).to_bytes(8, "little") + encoded, 0)
        except OSError:
            os.close(self._file)
            raise

    def write(self, chunk: ChunkMeta, data: torch.Tensor) -> None:
        """`data`: flat, on the host. Raises WeightTransferError for a chunk that does not belong, OSError
        where the disk is full."""
        self._receipt.record(chunk, data.dtype)
        place = self._data_start + self._starts[chunk.name] + chunk.offset * data.element_size()
        self._write(data.view(torch.uint8).numpy().data, place)

    def _write(self, data: bytes | memoryview, place: int) -> None:
        rest = memoryview(data)
        with self._named():
            while rest:
                with self._lock:
                    written = os.pwrite(self._file, rest[:_WRITE_BYTES], place)
                rest = rest[written:]
                place = place + written

    def close(self) -> None:
        """Raises WeightTransferError that names tensors missing or doubled, OSError where the disk did not
        take all."""
        with self._named():
            try:
                self._receipt.close()
                if self._durable:
                    os.fsync(self._file)
            finally:
                os.close(self._file)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What the system raises does not say which file it is about."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def abandon(self) -> None:
        """Leaves the file as it is, incomplete."""
        os.close(self._file)


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor (on the host, contiguous) of every tensor in the folder's safetensors files.

    Raises WeightTransferError where there is no such file, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightTransferError(f"{folder} holds no *.safetensors file to load weights from")

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a file, not a mapping)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise WeightTransferError(
                f"{path} is no whole safetensors file ({error}); write it again"
            ) from error
