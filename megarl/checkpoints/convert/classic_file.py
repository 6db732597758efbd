"""Reads one rank's file of Megatron's classic checkpoint without running its pickle.

An example is `mp_rank_00_001/model_optim_rng.pt`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoints.torch_file import (
    FileTensor,
    Inert,
    check_stored,
    mapped,
    read_outline_with_objects,
    stored_tensor,
)
from megarl.machine.errors import CheckpointError

# State of Transformer Engine layers: scales for FP8 training, which are not weights.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """The contents of a rank's file.

    Attributes:
        chunks: For each virtual stage, name -> tensor, with the stage's own layer numbers.
        arguments: The arguments of the program that wrote the file; empty if they were not saved.
    """

    path: Path
    chunks: tuple[Mapping[str, FileTensor], ...]
    arguments: Mapping[str, Any]
    iteration: int | None

    def open(self, chunk: int, name: str) -> torch.Tensor:
        """Return the tensor, memory-mapped from the file."""
        stored = self.chunks[chunk][name]
        return mapped(self.path, stored.position, stored.shape, stored.dtype)

    def check(self) -> None:
        """Compare the tensors with the CRC-32 checksums that torch.save computed.

        Raises:
            CheckpointError: Names a tensor whose bytes have changed.
        """
        for tensors in self.chunks:
            check_stored(self.path, str(self.path), tensors)


def read_rank_file(path: Path) -> RankFile:
    """Read a rank's file. Raises CheckpointError for any other file, and for code in its pickle."""
    content = read_outline_with_objects(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: contains no dictionary, so it is not a Megatron checkpoint")
    arguments = content.get("args")
    iteration = content.get("iteration")

    return RankFile(
        path=path,
        chunks=tuple(_parameters(path, state) for state in _model_states(path, content)),
        arguments=vars(arguments) if isinstance(arguments, Inert | Namespace) else {},
        iteration=iteration if isinstance(iteration, int) else None,
    )


def _model_states(path: Path, content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """Return the model's state, or one state for each virtual pipeline stage."""
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
                f"{path}: was written by Megatron's legacy models, before Megatron-Core ('language_model'); "
                f"convert it with Megatron's own tools"
            )

    return states


def _parameters(path: Path, state: dict[Any, Any]) -> dict[str, FileTensor]:
    parameters = {}
    for name, value in state.items():
        if str(name).endswith(_EXTRA_STATE):
            continue
        if (stored := stored_tensor(value)) is None:
            raise CheckpointError(f"{path}: {name} is not a contiguous tensor of a plain dtype")
        parameters[str(name)] = stored

    return parameters
