"""One rank's file of Megatron's classic checkpoint (`mp_rank_00_001/model_optim_rng.pt`): what is in it, without running its pickle."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.convert.source import mapped
from megarl.checkpoints.pickles import Record, refuse_code_in
from megarl.checkpoints.torch_dist import StoragePlace, TensorRecord, storage_places, tensor_record
from megarl.config.errors import CheckpointError

_EXTRA_STATE = "_extra_state"  # of layers of Transformer Engine: scales for eight-bit training, which are no weights


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """chunks: of each virtual stage, name -> tensor, with the stage's own layer numbers. arguments: of the program that wrote the file,
    empty where it kept none."""

    path: Path
    chunks: tuple[Mapping[str, TensorRecord], ...]
    places: Mapping[str, StoragePlace]
    arguments: Mapping[str, Any]
    iteration: int | None

    def open(self, chunk: int, name: str) -> torch.Tensor:
        """The tensor where it lies in the file."""
        record = self.chunks[chunk][name]
        start = self.places[record.storage].position + record.offset * record.dtype.itemsize
        return mapped(self.path, start, record.shape, record.dtype)


def read_rank_file(path: Path) -> RankFile:
    """Raises CheckpointError for what is no such file, for code in its pickle, and for a tensor that does not lie whole in the file."""
    try:
        with path.open("rb") as file:
            content = refuse_code_in(file, str(path))
            places = storage_places(file, str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dictionary; it is not a Megatron checkpoint")
    chunks = tuple(_parameters(path, state, places) for state in _model_states(path, content))
    arguments = content.get("args")
    iteration = content.get("iteration")
    return RankFile(
        path=path,
        chunks=chunks,
        places=places,
        arguments=arguments.state if isinstance(arguments, Record) and isinstance(arguments.state, dict) else {},
        iteration=iteration if isinstance(iteration, int) else None,
    )


def _model_states(path: Path, content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """One, or one for each virtual pipeline stage."""
    numbered = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
    names = ["model"] if "model" in content else numbered
    if not names or (numbered and numbered != [f"model{number}" for number in range(len(numbered))]):
        keys = ", ".join(sorted(map(str, content))) or "nothing"
        raise CheckpointError(f"{path}: has no 'model', and no 'model0', 'model1', ... without a gap; it has {keys}")
    states = [content[name] for name in names]
    for name, state in zip(names, states, strict=True):
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {name!r} is not a dictionary of tensors")
        if "language_model" in state:
            raise CheckpointError(
                f"{path}: was written by Megatron's models of before Megatron-Core ('language_model'); convert it with Megatron's own tools"
            )
    return states


def _parameters(path: Path, state: dict[Any, Any], places: Mapping[str, StoragePlace]) -> dict[str, TensorRecord]:
    parameters = {}
    for name, value in state.items():
        if str(name).endswith(_EXTRA_STATE):
            continue
        record = tensor_record(value)
        if record is None or not record.is_contiguous:
            raise CheckpointError(f"{path}: {name} is not a contiguous tensor of ordinary numbers")
        place = places.get(record.storage)
        if place is None or (record.offset + prod(record.shape)) * record.dtype.itemsize > place.nbytes:
            raise CheckpointError(f"{path}: damaged: the bytes of {name} are not in the file")
        parameters[str(name)] = record
    return parameters


def check_storages(file: RankFile) -> None:
    """Raises CheckpointError that names a tensor whose bytes are not those that torch.save wrote (by the CRC-32 it took of them)."""
    checked = set()
    for parameters in file.chunks:
        for name, record in parameters.items():
            place = file.places[record.storage]
            if record.storage in checked or not place.crc32:
                continue
            checked.add(record.storage)
            data = mapped(file.path, place.position, (place.nbytes,), torch.uint8)
            if zlib.crc32(memoryview(data.numpy())) != place.crc32:
                raise CheckpointError(f"{file.path}: {name} is not what was written (its CRC-32 differs); use another checkpoint")
