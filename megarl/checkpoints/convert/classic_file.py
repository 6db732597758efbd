"""One rank's file of Megatron's classic checkpoint (`mp_rank_00_001/model_optim_rng.pt`): what is in it,
without running its pickle."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.torch_file import (
    Inert,
    StoredTensor,
    check_stored,
    mapped,
    read_outline_with_objects,
    stored_tensor,
)
from megarl.machine.errors import CheckpointError

# of layers of Transformer Engine: scales for eight-bit training, which are no weights
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """chunks: of each virtual stage, name -> tensor, with the stage's own layer numbers. arguments: of the
    program that wrote the file, empty where it kept none."""

    path: Path
    chunks: tuple[Mapping[str, StoredTensor], ...]
    arguments: Mapping[str, Any]
    iteration: int | None

    def open(self, chunk: int, name: str) -> torch.Tensor:
        """The tensor where it lies in the file."""
        stored = self.chunks[chunk][name]
        return mapped(self.path, stored.position, stored.shape, stored.dtype)

    def check(self) -> None:
        """Raises CheckpointError that names a tensor whose bytes are not those that torch.save wrote (by the
        CRC-32 it took of them)."""
        for tensors in self.chunks:
            check_stored(self.path, str(self.path), tensors)


def read_rank_file(path: Path) -> RankFile:
    """Raises CheckpointError for what is no such file, and for code in its pickle."""
    content = read_outline_with_objects(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no dictionary; it is not a Megatron checkpoint")
    arguments = content.get("args")
    iteration = content.get("iteration")

    return RankFile(
        path=path,
        chunks=tuple(_parameters(path, state) for state in _model_states(path, content)),
        arguments=vars(arguments) if isinstance(arguments, Inert | Namespace) else {},
        iteration=iteration if isinstance(iteration, int) else None,
    )


def _model_states(path: Path, content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """One, or one for each virtual pipeline stage."""
    numbered = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
    names = ["model"] if "model" in content else numbered

    if not names or (numbered and numbered != [f"model{number}" for number in range(len(numbered))]):
        keys = ", ".join(sorted(map(str, content))) or "nothing"
        raise CheckpointError(
            f"{path}: has no 'model', and no 'model0', 'model1', ... without a gap; it has {keys}"
        )

    states = [content[name] for name in names]
    for name, state in zip(names, states, strict=True):
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: {name!r} is not a dictionary of tensors")
        if "language_model" in state:
            raise CheckpointError(
                f"{path}: was written by Megatron's models of before Megatron-Core ('language_model'); "
                f"convert it with Megatron's own tools"
            )

    return states


def _parameters(path: Path, state: dict[Any, Any]) -> dict[str, StoredTensor]:
    parameters = {}
    for name, value in state.items():
        if str(name).endswith(_EXTRA_STATE):
            continue
        if (stored := stored_tensor(value)) is None:
            raise CheckpointError(f"{path}: {name} is not a contiguous tensor of ordinary numbers")
        parameters[str(name)] = stored

    return parameters
