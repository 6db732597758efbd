"""Pickles that a user hands in, looked at without running them: each name that they call is on a list, or the file is refused.

A pickle is a program. Here it runs with inert stand-ins for everything that it names, so that it can build records and no more;
what it may name is listed, because the libraries that read the file later (`torch.load`, `pickle.load`) do run it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any, ClassVar

import torch

from megarl.config.errors import CheckpointError

Name = tuple[str, str]  # module, qualified name

_PLANNER = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
_METADATA = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_REAL_CONTAINERS: dict[Name, Callable[..., Any]] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        set,
        frozenset,
        list,
        dict,
        tuple,
        bytearray,
        bytes,
        complex,
        slice,
        range,
        int,
        float,
        str,
        bool,
        OrderedDict,
        defaultdict,
    )
} | {("torch", "Size"): torch.Size}
_CONTAINERS = frozenset(_REAL_CONTAINERS)
METADATA_NAMES: frozenset[Name] = _CONTAINERS | frozenset(
    {("torch.distributed.checkpoint.planner", name) for name in _PLANNER}
    | {("torch.distributed.checkpoint.metadata", name) for name in _METADATA}
    | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}
    | {("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath")}
    | {("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata")}
)
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_MEGATRON_ENUMS = {
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    "megatron.core.rerun_state_machine": ("RerunMode", "RerunDiagnostic", "RerunState"),
    "megatron.core.num_microbatches_calculator": ("ConstantNumMicroBatchesCalculator",),
    "megatron.model.enums": ("LayerType", "AttnType", "AttnMaskType", "ModelType", "PositionEmbeddingType"),
    "megatron.legacy.model.enums": ("LayerType", "AttnType", "AttnMaskType", "ModelType", "PositionEmbeddingType"),
    "megatron.training.tokenizer.tokenizer": (),
}
DATA_NAMES: frozenset[Name] = _CONTAINERS | frozenset(
    {("torch", f"{kind}Storage") for kind in _STORAGES}
    | {("torch._utils", name) for name in ("_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_tensor")}
    | {("torch", "device"), ("torch.serialization", "_get_layout"), ("torch.storage", "UntypedStorage")}
    | {(module, name) for module in _NUMPY for name in ("_reconstruct", "scalar")}
    | {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"), ("argparse", "Namespace"), ("_io", "BytesIO")}
    | {("pathlib", "PosixPath"), ("pathlib", "PurePosixPath"), ("pathlib._local", "PosixPath"), ("signal", "Signals")}
    | {(module, name) for module, names in _MEGATRON_ENUMS.items() for name in names}
)


class Record:
    """What stands for an object of a class that is not called: its name, what it was made with, and its state."""

    name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    state: Any
    items: dict[Any, Any]
    elements: list[Any]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Record:  # not __init__, which a pickle may leave out
        record = super().__new__(cls)
        record.arguments, record.keywords, record.state, record.items, record.elements = arguments, keywords, None, {}, []
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, element: Any) -> None:
        self.elements.append(element)

    def extend(self, elements: Collection[Any]) -> None:
        self.elements.extend(elements)

    def add(self, element: Any) -> None:
        self.elements.append(element)


class ListingUnpickler(pickle.Unpickler):
    """Raises CheckpointError, which names `source` and the name, for a name that is neither in `allowed` nor a torch dtype.

    Of containers and those in `real` it gives the thing itself, of all others a `Record` class.
    """

    def __init__(self, file: IO[bytes], source: str, allowed: frozenset[Name], real: dict[Name, Callable[..., Any]] | None = None) -> None:
        super().__init__(file)
        self._source, self._allowed, self._real = source, allowed, _REAL_CONTAINERS | (real or {})
        self._stand_ins: dict[Name, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and "." not in name and isinstance(dtype := getattr(torch, name, None), torch.dtype | torch.layout):
            return dtype
        key = (module, name)
        if key not in self._allowed:
            raise CheckpointError(
                f"{self._source}: its pickle names {module}.{name}, which is not on the list of what a checkpoint may hold, so it is "
                "not loaded; it may be code that runs on loading"
            )
        if key in self._real:
            return self._real[key]
        return self._stand_ins.setdefault(key, type(name, (Record,), {"name": f"{module}.{name}"}))

    def persistent_load(self, persistent_id: Any) -> Any:
        return ("persistent", persistent_id)


# What can go wrong in a damaged pickle. MemoryError: a length that was made huge.
_DAMAGE = (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError, MemoryError, OverflowError)


def load_listed(data: bytes, source: str, allowed: frozenset[Name], real: dict[Name, Callable[..., Any]] | None = None) -> Any:
    """The pickle's value, of stand-ins. `source`: the file in an error. Raises CheckpointError where it is damaged or not allowed."""
    try:
        return ListingUnpickler(io.BytesIO(data), source, allowed, real).load()
    except _DAMAGE as error:
        raise CheckpointError(f"{source}: damaged, its pickle cannot be read: {type(error).__name__}: {error}") from error


def refuse_code(path: str | Path) -> None:
    """`path`: what torch.save wrote. Raises CheckpointError where its pickle names something that is not data, or is damaged."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            refuse_code_in(file, str(path))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None


def refuse_code_in(file: IO[bytes], source: str) -> Any:
    """As `refuse_code`, of an open file; returns the pickle's value, of stand-ins."""
    return load_listed(read_pickle(file, source), source, DATA_NAMES)


def read_pickle(file: IO[bytes], source: str) -> bytes:
    """The bytes of `data.pkl` in what torch.save wrote. Raises CheckpointError where it is not such a file."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl") or entry.filename == "data.pkl"]
            if len(entries) != 1:
                raise CheckpointError(f"{source}: not a file that torch.save wrote: it has {len(entries)} pickles named data.pkl")
            if entries[0].CRC or entries[0].compress_type != zipfile.ZIP_STORED:
                return archive.read(entries[0])
            file.seek(entry_start(file, entries[0]))  # torch.serialization.set_crc32_options(False)
            return file.read(entries[0].file_size)
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
        raise CheckpointError(
            f"{source}: damaged, or not in the zip format that torch.save has written since torch 1.6: {error}"
        ) from error


def entry_start(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where in the file the bytes of an entry begin."""
    file.seek(entry.header_offset + 26)  # the lengths of the name and of the padding that align the data
    lengths = file.read(4)
    return entry.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
