"""Reads files written by torch.save, or parts of files, without running them, and memory-maps their tensors.

A pickle is a program. `torch.load` is called with `weights_only`, which creates only tensors and plain data.
The names that a pickle may reference are restricted to a list, because Megatron and PyTorch will read the
same file later.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch

from megarl.machine.errors import CheckpointError

# torch and zipfile only use the methods of the last type, although their type hints require more.
ReadableFile = Path | IO[bytes] | io.RawIOBase
_CRC_BYTES = 2**20  # read at a time
# Exceptions raised for damaged files. MemoryError: a length that was made huge.
PICKLE_DAMAGE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
)
_DAMAGE = (*PICKLE_DAMAGE, AssertionError, RuntimeError, struct.error, zipfile.BadZipFile)
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_MEGATRON_ENUMS = {
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": (
        "ModelType",
        "LayerType",
        "AttnType",
        "AttnMaskType",
        "AttnBackend",
        "CudaGraphScope",
    ),
    "megatron.core.rerun_state_machine": ("RerunMode", "RerunDiagnostic", "RerunState"),
    "megatron.core.num_microbatches_calculator": ("ConstantNumMicroBatchesCalculator",),
    "megatron.model.enums": ("LayerType", "AttnType", "AttnMaskType", "ModelType", "PositionEmbeddingType"),
    "megatron.legacy.model.enums": (
        "LayerType",
        "AttnType",
        "AttnMaskType",
        "ModelType",
        "PositionEmbeddingType",
    ),
}
# Allowed names in addition to those that PyTorch considers safe.
DATA_NAMES = frozenset(
    {
        f"builtins.{name}"
        for name in (
            "frozenset",
            "list",
            "dict",
            "tuple",
            "bytes",
            "slice",
            "range",
            "int",
            "float",
            "str",
            "bool",
        )
    }
    | {f"{module}.{name}" for module in _NUMPY for name in ("_reconstruct", "scalar")}
    | {
        "numpy.ndarray",
        "numpy.dtype",
        "collections.defaultdict",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "_io.BytesIO",
    }
    | {"pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath", "signal.Signals"}
    | {f"{module}.{name}" for module, names in _MEGATRON_ENUMS.items() for name in names}
)


class Inert:
    """A placeholder for an object of a class that is not called.

    It has the attributes that the pickle sets.
    """

    def __new__(cls, *arguments: Any) -> Inert:  # not __init__, which a pickle may leave out
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


class FilePart(io.RawIOBase):
    """Bytes [start, start + nbytes) of a file as a readable file. Raises OSError."""

    def __init__(self, path: Path, start: int, nbytes: int) -> None:
        self._start = start
        self._nbytes = nbytes
        self._position = 0
        self._descriptor = os.open(path, os.O_RDONLY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        )
        if self._position < 0:
            raise OSError("a position before the beginning of the file")
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        # `preadv` does not move the file offset. The slice keeps the read inside the part.
        wanted = memoryview(buffer)[: max(self._nbytes - self._position, 0)]
        count = os.preadv(self._descriptor, [wanted], self._start + self._position) if wanted else 0
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()


@contextmanager
def _damage_named(source: str) -> Generator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{source}: the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        # torch's further lines are advice and stack frames.
        said = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{source}: damaged, or not in the zip format that torch.save has written since torch 1.6: "
            f"{type(error).__name__}: {said}"
        ) from error


def refuse_code(file: ReadableFile, source: str = "") -> set[str]:
    """Refuse a pickle that references something other than data, or is damaged.

    Args:
        source: The name in errors; default: the path.

    Returns:
        The names of `DATA_NAMES` that it references.

    Raises:
        CheckpointError: The pickle is refused.
    """
    source = source or str(file)
    with _damage_named(source):
        # pyrefly: ignore[bad-argument-type]
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if others := names - DATA_NAMES:
        raise CheckpointError(refusal(source, min(others)))

    return names


def refusal(source: str, name: str) -> str:
    return (
        f"{source}: its pickle names {name}, which is not on the list of names allowed in a checkpoint, so "
        f"it is not loaded; "
        "it may be code that runs on loading"
    )


def read_outline(file: ReadableFile, source: str) -> Any:
    """Read a file with its tensors on the device `meta`, without elements.

    Objects of listed classes are `Inert`.

    Raises:
        CheckpointError: Contains `source`, see `refuse_code`. Also if the file contains a sparse tensor.
    """
    with _damage_named(source):
        try:
            # pyrefly: ignore[bad-argument-type]
            return torch.load(file, map_location="meta", weights_only=True)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{source}: contains a sparse tensor, which megarl does not read; save it as a dense one"
            ) from error
        except pickle.UnpicklingError as error:  # its message recommends running the file
            if not isinstance(file, Path):
                file.seek(0)
            refuse_code(file, source)
            raise CheckpointError(
                f"{source}: damaged, its pickle contains something other than tensors and plain data"
            ) from error


def read_outline_with_objects(path: Path) -> Any:
    """Read a file like `read_outline`, also with objects of listed classes, which become `Inert`.

    This is not thread-safe.
    """
    with torch.serialization.safe_globals([(Inert, name) for name in refuse_code(path)]):
        return read_outline(path, str(path))


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A contiguous tensor in a file written by torch.save, beginning at the byte `position`."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.position + prod(self.shape) * self.dtype.itemsize


def stored_tensor(value: object) -> FileTensor | None:
    """Return where the elements of an outline's tensor are stored.

    The result is None if `value` is not a contiguous tensor.
    """
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.is_quantized
        or not value.is_contiguous()
    ):
        return None

    # torch records the position of the bytes here when it loads to the device `meta`.
    start = value.untyped_storage()._checkpoint_offset
    if start is None:
        return None
    return FileTensor(
        position=start + int(value.storage_offset()) * value.itemsize,
        shape=tuple(value.shape),
        dtype=value.dtype,
    )


def check_stored(file: ReadableFile, source: str, tensors: Mapping[str, FileTensor]) -> None:
    """Check the bytes of tensors in a file.

    Each tensor must lie within one entry of the zip file and match the CRC-32 that torch.save computed, if
    any. Each entry is read once.

    Raises:
        CheckpointError: Names the tensor.
    """
    with _damage_named(source), zipfile.ZipFile(file) as archive:
        assert archive.fp is not None
        # Entries are sorted by position, so a bisection finds the one that contains a tensor.
        entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
        headers = [entry.header_offset for entry in entries]
        read = set()
        for name, tensor in tensors.items():
            # An empty tensor has no bytes to check.
            if tensor.end == tensor.position:
                continue
            entry = entries[bisect_right(headers, tensor.position) - 1]
            start = _entry_start(archive.fp, entry)
            if (
                # Only an uncompressed entry can be memory-mapped.
                entry.compress_type != zipfile.ZIP_STORED
                or tensor.position < start
                or tensor.end > start + entry.file_size
            ):
                raise CheckpointError(f"{source}: damaged: the bytes of {name} are not in the file")
            # Several tensors may share an entry. torch.save writes a CRC of 0 if it computed none.
            if entry.CRC and entry.filename not in read and not _is_intact(archive, entry):
                raise CheckpointError(
                    f"{source}: {name} is not what was written (its CRC-32 differs); use another checkpoint"
                )
            read.add(entry.filename)


def _entry_start(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Return the position in the file at which the bytes of an entry begin."""
    file.seek(entry.header_offset + 26)  # the lengths of the name and of the padding that aligns the data
    return entry.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))


def _is_intact(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(entry) as opened:
            while opened.read(_CRC_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def mapped(path: Path, position: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory-map elements of a file, so that only accessed elements are read.

    Raises CheckpointError if the file cannot be read.
    """
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    # A map can only begin at a multiple of the page size, so it includes preceding bytes.
    before = position % mmap.ALLOCATIONGRANULARITY

    try:
        with path.open("rb") as file:
            # A private map counts as writable for torch, but the file cannot be changed through it.
            memory = mmap.mmap(
                file.fileno(),
                before + count * dtype.itemsize,
                offset=position - before,
                access=mmap.ACCESS_COPY,
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error

    return torch.frombuffer(memory, dtype=dtype, count=count, offset=before).view(shape)
